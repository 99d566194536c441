"""Convolutions with batch norm in plain float32: what cuDNN's algorithms take for themselves shows here."""

from itertools import pairwise

import torch
from torch import nn

channels = (3, 64, 128, 256)
layers = []
for inside, outside in pairwise(channels):
    layers += [
        nn.Conv2d(inside, outside, 3, padding=1),
        nn.BatchNorm2d(outside),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
    ]
model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
x = torch.randn(64, 3, 64, 64, device="cuda")
y = torch.randint(0, 10, (64,), device="cuda")
for _ in range(3):
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
