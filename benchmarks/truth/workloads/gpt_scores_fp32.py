"""The decoder in float32 with attention spelled out: the scores of every layer are kept for backward."""

import torch
from programs import Decoder

model = Decoder(layers=6, width=512, heads=8, vocabulary=16000, fused=False).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
tokens = torch.randint(0, 16000, (4, 512), device="cuda")
for _ in range(2):
    loss = model.loss(tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
