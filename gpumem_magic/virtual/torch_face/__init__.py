"""PyTorch's face: what a program sees of `torch.cuda`, streams, graphs and files while a virtual GPU is on."""
