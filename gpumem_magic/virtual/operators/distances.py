"""Distances between points, and their gradients (``Distance.cpp`` and ``DistanceKernel.cu`` of ATen/native)."""

from __future__ import annotations

from typing import Any

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine.calls import bytes_of, copies_of
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.rules import BESIDE, special


@special(_aten._cdist_forward.default)
def _distances(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """Between points that are laid out, each batch for itself (`cdist_impl` in ``Distance.cpp``)."""
    with engine.scratch(device, *_laid_out_batches(args[0], args[1])):
        return engine.run(func, args, kwargs, device)


def _laid_out_batches(first: Any, second: Any) -> list[int]:
    if not all(one.layout is torch.strided and one.dim() > 1 for one in (first, second)):
        return []
    try:
        batch = torch.broadcast_shapes(first.shape[:-2], second.shape[:-2])
    except RuntimeError:
        return []
    return copies_of(*(one.expand(*batch, *one.shape[-2:]) for one in (first, second)))


@special(_aten._cdist_backward.default)
def _of_distances(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """What each distance gives to each coordinate (``DistanceKernel.cu``); those that only count differences give nothing."""
    gradient, first, second, power, distances = args
    with engine.scratch(device, *_laid_out_batches(first, second), *copies_of(distances, gradient)):
        out = engine.run(func, args, kwargs, device)
        of_each = gradient.numel() * first.shape[-1] * first.element_size() if power and first.numel() else 0
        with engine.scratch(device, of_each):
            return out


@special(_aten._pdist_backward.default, table=BESIDE)
def _of_distances_in_pairs(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    gradient, first, power = args[:3]
    return [(first.shape[0] - 1) * bytes_of(first)] if power and gradient.numel() and first.numel() else []
