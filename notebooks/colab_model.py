"""A stand-in for the model of the Colab investigation, which its author never published.

The layers are ordinary; their widths were fitted until nvidia-smi's figure changes, line by line, as the author's did.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import skip_init

BATCH = 61


def conv(before: int, after: int) -> nn.Conv2d:
    return nn.Conv2d(before, after, kernel_size=3, padding=1)


class MyModel(nn.Module):
    """From an image and a comb of 100 x 1632 numbers to an image of the same size."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.MaxPool2d(2),
            conv(2, 29),
            nn.GELU(),
            conv(29, 29),
            nn.ReLU(),
            nn.AvgPool2d(2),
            conv(29, 19),
            nn.BatchNorm2d(19),
            nn.ReLU(inplace=True),
            conv(19, 85),
            nn.ReLU(),
            conv(85, 56),
            nn.ReLU(inplace=True),
            conv(56, 88),
            nn.ReLU(),
            conv(88, 82),
            nn.BatchNorm2d(82),
            nn.ReLU(),
            conv(82, 83),
            nn.ReLU(),
            nn.MaxPool2d(2),
            conv(83, 75),
            nn.ReLU(inplace=True),
            conv(75, 13),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d((3, 51)),
        )
        # Without initial values: they are not looked at, and 2.32 GiB of host memory are saved.
        self.head = nn.Sequential(
            nn.Flatten(),
            skip_init(nn.Linear, 13 * 3 * 51, 3810),
            nn.ReLU(),
            skip_init(nn.Linear, 3810, 100 * 1632),
        )

    def forward(self, image: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
        both = torch.cat([image, comb.expand_as(image)], dim=1)
        return self.head(self.features(both)).view(-1, 1, 100, 1632)


def my_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def get_accuracy(output: torch.Tensor, target: torch.Tensor) -> float:
    return ((output - target).abs() < 0.1).float().mean().item()


trainloader = [
    (f"batch {i}", torch.zeros(BATCH, 1, 100, 1632), torch.zeros(BATCH, 1, 100, 1632))
    for i in range(2)
]
