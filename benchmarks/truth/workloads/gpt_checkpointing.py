"""The decoder with activation checkpointing in every layer."""

import torch
from programs import Decoder

model = Decoder(layers=12, width=768, heads=12, vocabulary=32000, checkpointing=True).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
tokens = torch.randint(0, 32000, (4, 1024), device="cuda")
for _ in range(2):
    loss = model.loss(tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
