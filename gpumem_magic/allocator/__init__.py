"""The caching allocator: PyTorch's rules for segments, blocks, splitting, merging and release, emulated exactly."""
