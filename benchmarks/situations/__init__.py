"""Situations from public threads, and what a report should say about each in its first two lines."""
