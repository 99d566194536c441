"""A recurrent network: cuDNN keeps its weights in one piece, and a reserve for backward."""

import torch
from torch import nn

words = nn.Embedding(20000, 512).cuda()
model = nn.LSTM(512, 1024, num_layers=2, batch_first=True).cuda()
head = nn.Linear(1024, 20000).cuda()
optimizer = torch.optim.Adam([*words.parameters(), *model.parameters(), *head.parameters()])
tokens = torch.randint(0, 20000, (16, 64), device="cuda")
for _ in range(2):
    hidden, state = model(words(tokens))
    loss = nn.functional.cross_entropy(head(hidden).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
