"""ResNet-50, batch 32, SGD."""

import torch
from programs import resnet50
from torch import nn

model = resnet50().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(2):
    x = torch.randn(32, 3, 224, 224).cuda()
    y = torch.randint(0, 1000, (32,)).cuda()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
