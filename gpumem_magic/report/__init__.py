"""The report: the object that a user holds, and its faces (text, HTML, picture)."""
