"""Looks at the program's objects that run none of its code."""
