"""Convolution networks as torchvision builds them, for rows that name one: in plain torch, since torchvision is no dependency."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def _block(
    inside: int, outside: int, kernel: int, stride: int = 1, groups: int = 1, *, last: nn.Module | None
) -> list[nn.Module]:
    layers: list[nn.Module] = [
        nn.Conv2d(inside, outside, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outside),
    ]
    return layers if last is None else [*layers, last]


def vgg16() -> nn.Module:
    layers: list[nn.Module] = []
    inside = 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(inside, width, 3, padding=1), nn.ReLU(inplace=True)]
            inside = width
        layers.append(nn.MaxPool2d(2))
    head = [nn.AdaptiveAvgPool2d(7), nn.Flatten()]
    for inside, outside in ((25088, 4096), (4096, 4096)):
        head += [nn.Linear(inside, outside), nn.ReLU(inplace=True), nn.Dropout()]
    return nn.Sequential(*layers, *head, nn.Linear(4096, 1000))


class _Added(nn.Module):
    """A block and what goes around it."""

    def __init__(self, block: list[nn.Module], around: nn.Module | None, after: nn.Module | None) -> None:
        super().__init__()
        self.block = nn.Sequential(*block)
        self.around = around
        self.after = after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.block(x)
        past = x if self.around is None else self.around(x)
        # torchvision's ResNet adds in place, its MobileNetV2 does not.
        return past + y if self.after is None else self.after(y.add_(past))  # type: ignore[no-any-return]


def resnet50() -> nn.Module:
    layers = [*_block(3, 64, 7, 2, last=nn.ReLU(inplace=True)), nn.MaxPool2d(3, 2, 1)]
    inside = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(count):
            step = stride if number == 0 else 1
            block = [
                *_block(inside, width, 1, last=nn.ReLU(inplace=True)),
                *_block(width, width, 3, step, last=nn.ReLU(inplace=True)),
                *_block(width, 4 * width, 1, last=None),
            ]
            around = nn.Sequential(*_block(inside, 4 * width, 1, step, last=None)) if number == 0 else None
            layers.append(_Added(block, around, nn.ReLU(inplace=True)))
            inside = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


def mobilenet_v2() -> nn.Module:
    layers = _block(3, 32, 3, 2, last=nn.ReLU6(inplace=True))
    inside = 32
    for widening, width, count, stride in (
        (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
    ):  # fmt: skip
        for number in range(count):
            step = stride if number == 0 else 1
            wide = inside * widening
            block = [] if widening == 1 else _block(inside, wide, 1, last=nn.ReLU6(inplace=True))
            block += _block(wide, wide, 3, step, wide, last=nn.ReLU6(inplace=True)) + _block(wide, width, 1, last=None)
            layers.append(_Added(block, None, None) if step == 1 and inside == width else nn.Sequential(*block))
            inside = width
    layers += _block(inside, 1280, 1, last=nn.ReLU6(inplace=True))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(1280, 1000))


NETS: dict[str, Callable[[], nn.Module]] = {"VGG-16": vgg16, "ResNet-50": resnet50, "MobileNetV2": mobilenet_v2}
