"""A decoder in bfloat16 with the fused attention kernel."""

import torch
from programs import Decoder

model = Decoder(layers=8, width=768, heads=12, vocabulary=32000).cuda().bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
tokens = torch.randint(0, 32000, (4, 512), device="cuda")
for _ in range(2):
    loss = model.loss(tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
