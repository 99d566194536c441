"""Operators whose result or memory on CUDA is more than a shape: what their kernels return, take and give back."""
