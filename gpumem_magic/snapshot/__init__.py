"""PyTorch's memory snapshot: the common language of every source of memory (a virtual GPU, a real one, a file)."""
