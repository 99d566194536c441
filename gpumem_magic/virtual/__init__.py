"""The virtual GPU: unmodified code on `cuda` without a device, through the real allocator's decisions."""
