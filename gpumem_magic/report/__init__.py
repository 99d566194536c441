"""The report as plain data, and how a recording becomes one."""
