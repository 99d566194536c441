"""Who holds the memory: every live allocation traced back to the names that keep it."""
