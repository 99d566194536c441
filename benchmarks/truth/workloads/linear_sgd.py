"""Two linear layers, SGD with momentum: what the smallest training loop takes."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(2048, 4096), nn.ReLU(), nn.Linear(4096, 10)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for _ in range(3):
    x = torch.randn(512, 2048).cuda()
    y = torch.randint(0, 10, (512,)).cuda()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
