"""transformers' BERT, of bert-base's size, as a classifier."""

import torch
from transformers import BertConfig, BertForSequenceClassification

model = BertForSequenceClassification(BertConfig()).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
tokens = torch.randint(0, 30000, (8, 128), device="cuda")
labels = torch.randint(0, 2, (8,), device="cuda")
for _ in range(2):
    out = model(input_ids=tokens, labels=labels)
    out.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
