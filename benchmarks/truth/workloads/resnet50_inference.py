"""ResNet-50 without a graph, in inference mode."""

import torch
from programs import resnet50

model = resnet50().cuda().eval()
with torch.inference_mode():
    for size in (8, 64, 8):
        x = torch.randn(size, 3, 224, 224, device="cuda")
        scores = model(x).softmax(-1)
del x, scores
torch.cuda.empty_cache()
