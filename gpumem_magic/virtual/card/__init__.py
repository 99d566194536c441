"""The card: which GPUs can be emulated, what is known of each, and what answers `nvidia-smi` and NVML for it."""
