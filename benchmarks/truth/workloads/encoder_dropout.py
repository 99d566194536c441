"""PyTorch's own encoder with dropout."""

import torch
from torch import nn

layer = nn.TransformerEncoderLayer(768, 12, 3072, 0.1, "gelu", batch_first=True)
model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
x = torch.randn(8, 256, 768, device="cuda")
for _ in range(2):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
