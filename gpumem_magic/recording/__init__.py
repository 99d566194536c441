"""Recording: running the user's code once, and keeping what happened at every moment that has a name."""
