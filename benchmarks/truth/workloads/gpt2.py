"""transformers' GPT-2, of its smallest size, as a language model."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

model = GPT2LMHeadModel(GPT2Config()).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
tokens = torch.randint(0, 50257, (2, 512), device="cuda")
for _ in range(2):
    out = model(input_ids=tokens, labels=tokens)
    out.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
