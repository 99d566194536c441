"""Adam over lists of tensors: the temporaries are as large as the model."""

import torch
from torch import nn

model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(6)]).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=True)
x = torch.randn(256, 2048, device="cuda")
for _ in range(3):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
