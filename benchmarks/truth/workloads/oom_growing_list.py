"""Losses that are kept with their graphs until a quarter of a GiB is full: the statement that fails is told."""

import torch
from torch import nn

limit = (256 << 20) / torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction(limit)
model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)).cuda()
x = torch.randn(1024, 1024, device="cuda")
losses = []
for _ in range(100):
    hidden = model(x)
    loss = hidden.square().mean()
    losses.append(loss)
