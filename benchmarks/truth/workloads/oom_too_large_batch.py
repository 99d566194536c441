"""A batch that is doubled until 1 GiB is not enough: forward, backward or the optimizer's step?"""

import torch
from programs import Decoder

limit = (1 << 30) / torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction(limit)
model = Decoder(layers=4, width=512, heads=8, vocabulary=16000).cuda()
optimizer = torch.optim.Adam(model.parameters())
for power in range(8):
    tokens = torch.randint(0, 16000, (2**power, 256), device="cuda")
    loss = model.loss(tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
