"""Attribution: which category every allocation belongs to, and how that is known."""
