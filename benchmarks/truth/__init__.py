"""The virtual GPU against a real one, on twenty programs."""
