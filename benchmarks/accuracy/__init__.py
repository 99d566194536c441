"""The virtual GPU against figures that other people measured on real GPUs and published."""
