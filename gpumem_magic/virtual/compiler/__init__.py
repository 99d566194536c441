"""`torch.compile` for a virtual card: PyTorch's own compiler runs as ever, for the card that is on, and what it generates is run.

Memory of compiled programs is decided on the host, from shapes: AOTAutograd's partitioner chooses what is kept for backward,
Inductor fuses buffers away, reuses and frees them, and writes a Python function that asks for each one. `tracing` lets the
compiler trace tensors of the card, `dynamo` lets it see virtual tensors as the program's own, and `inductor` answers for the
card. The `kernels` that Inductor generates are neither compiled nor launched, all others go their eager ways. `whose` knows
the modules of what a graph returns.
"""
