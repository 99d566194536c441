"""Programs run in processes of their own, with one thing varied: the largest value that fits, and what a change would save."""
