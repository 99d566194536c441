"""The same kind of network in channels-last memory and half precision."""

import torch
from torch import nn

model = nn.Sequential(
    nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(), nn.Conv2d(64, 128, 3, 2, 1), nn.ReLU(), nn.Conv2d(128, 256, 3, 2, 1), nn.ReLU(),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 100),
)  # fmt: skip
model = model.cuda().half().to(memory_format=torch.channels_last)
x = torch.randn(32, 3, 224, 224, device="cuda", dtype=torch.half).to(memory_format=torch.channels_last)
for _ in range(2):
    loss = model(x).float().square().mean()
    loss.backward()
    model.zero_grad()
