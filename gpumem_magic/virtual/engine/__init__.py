"""The engine: tensors without data, the memory that they hold, and what happens when an operator meets one."""
