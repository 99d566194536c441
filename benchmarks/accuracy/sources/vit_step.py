"""PyTorch's tutorial on optimizers in the backward pass: ViT-L/16, one image, Adam with foreach and one by one.

Its figures are read off a picture, so they are worth two digits. torchvision is not needed: the sizes are public.
"""

from __future__ import annotations

import torch
from torch import nn

from accuracy.building import unfilled
from accuracy.plans import Plan, Readings, Skip, readings
from accuracy.table import Row

DEVICE = "A100-40GB"
STEPS = 3


def plan(row: Row) -> Plan | Skip:
    if "vit_l_16" not in row.model or row.optimizer != "Adam":
        return Skip("not the tutorial's ViT-L/16")
    batch, pixels, in_backward = int(row.batch), int(row.seq_or_image), "post_accumulate_grad" in row.extras
    return Plan((batch, pixels, in_backward), DEVICE, lambda: _run(batch, pixels, in_backward), "max_memory_allocated")


class Block(nn.Module):
    """Attention and a perceptron of four times the width, each behind a LayerNorm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before = nn.LayerNorm(width, eps=1e-6)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.between = nn.LayerNorm(width, eps=1e-6)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normal = self.before(x)
        x = x + self.attention(normal, normal, normal, need_weights=False)[0]
        out: torch.Tensor = x + self.perceptron(self.between(x))
        return out


class VisionTransformer(nn.Module):
    """ViT-L/16 for 1000 classes: 24 blocks, 1024 wide, 16 heads."""

    def __init__(self, pixels: int, width: int = 1024, layers: int = 24, heads: int = 16, patch: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.empty(1, 1, width))
        self.position = nn.Parameter(torch.empty(1, (pixels // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(images), -1, -1), patches), dim=1) + self.position
        out: torch.Tensor = self.head(self.norm(self.blocks(x))[:, 0])
        return out


def _run(batch: int, pixels: int, in_backward: bool) -> Readings:
    with unfilled():
        model = VisionTransformer(pixels)
    model.cuda()
    if in_backward:
        optimizers = {p: torch.optim.Adam([p], foreach=False) for p in model.parameters()}

        def step(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()  # type: ignore[index]
            optimizers[parameter].zero_grad()  # type: ignore[index]

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        finish = []
    else:
        finish = [torch.optim.Adam(model.parameters())]
    for _ in range(STEPS):
        model(torch.rand(batch, 3, pixels, pixels, device="cuda")).sum().backward()
        for optimizer in finish:
            optimizer.step()
            optimizer.zero_grad()
    return readings()
