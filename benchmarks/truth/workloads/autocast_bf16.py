"""bfloat16 by autocast: half-precision copies of the weights live as long as the forward pass."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 1000)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
x = torch.randn(1024, 4096, device="cuda")
y = torch.randint(0, 1000, (1024,), device="cuda")
for _ in range(2):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(x)
        loss = nn.functional.cross_entropy(logits, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
