"""Changes to a cell that would save memory: each is made to a copy of its code, and run in a process of its own."""
