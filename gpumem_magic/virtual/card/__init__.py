"""The card: the GPUs that can be emulated (``cards.json``), their names, and what answers `nvidia-smi` and NVML for them."""
