"""Across the cells of a notebook: what each left behind, what running one again added, and budgets that it must keep."""
