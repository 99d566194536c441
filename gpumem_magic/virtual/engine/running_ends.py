"""Buffers that an operator of quantised training gives a size on its first call, which its schema says nothing of.

`fused_moving_avg_obs_fake_quant` keeps the lowest and the highest number of each channel, with its scale and zero point. Where
there are none yet, it makes room for them (``FusedObsFakeQuant.cpp`` and ``fused_obs_fake_quant.cu`` in ATen/native/quantized).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

KEEPING = torch.fused_moving_avg_obs_fake_quant


def make_room(args: Sequence[Any]) -> None:
    """args: of a call of `KEEPING`. What does not fit is left to PyTorch to refuse."""
    if len(args) < 12 or not args[11]:
        return
    source, lowest, highest, scale, zero_point, dim = args[0], *args[3:7], args[10]
    if lowest.numel() or not -source.dim() <= dim < source.dim():
        return
    channels = source.shape[dim]
    with torch.no_grad():
        lowest.resize_(channels).fill_(math.inf)
        highest.resize_(channels).fill_(-math.inf)
        scale.resize_(channels)
        zero_point.resize_(channels)
