"""Losses whose kernels work out every element's share first: that is memory of the input's size.

``Loss.cpp`` in ATen/native: the result of `mse_loss` and `smooth_l1_loss` is made in the input's size and then shrunk, which
keeps its memory, and the shares are another tensor. ``Loss.cu``: binary cross-entropy's result holds the shares. `huber_loss`
lets them go.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine.alike import Kernels
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.mismatch import refuse_mixed_devices, refuse_other_types, together
from gpumem_magic.virtual.engine.rules import BESIDE, special

_NONE, _MEAN = 0, 1


def _shrunk(engine: Engine, args: Any, reduction: int, device: int) -> Any:
    """The result's memory, then the shares', then what their sum takes."""
    result = _full(args)
    shares = _full(args)
    _add_up(engine, reduction, shares, result, device)
    return engine.on_memory_of(result, (), (), 0)


def _kept(engine: Engine, args: Any, reduction: int, device: int) -> Any:
    shares = _full(args)
    with engine.scratch(device, shares.element_size()):
        _add_up(engine, reduction, shares, shares, device)
    return engine.on_memory_of(shares, (), (), 0)


def _passing(engine: Engine, args: Any, reduction: int, device: int) -> Any:
    shares = _full(args)
    return shares.mean() if reduction == _MEAN else shares.sum()


# The way of each, and which argument says how the shares become one number.
_WAYS: dict[Any, tuple[Callable[..., Any], int]] = {
    _aten.mse_loss.default: (_shrunk, 2),
    _aten.smooth_l1_loss.default: (_shrunk, 2),
    _aten.binary_cross_entropy.default: (_kept, 3),
    _aten.huber_loss.default: (_passing, 2),
}


@special(*_WAYS)
def _loss(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    way, place = _WAYS[func]
    reduction = args[place] if len(args) > place else kwargs.get("reduction", _MEAN)
    if reduction == _NONE:
        return engine.run(func, args, kwargs, device)
    refuse_mixed_devices(func, args, kwargs)
    if func is _aten.binary_cross_entropy.default:
        refuse_other_types(args[0], args[1])
    return way(engine, args, reduction, device)


def _full(args: Any) -> Any:
    """A tensor of the size of all shares."""
    input, target = args[:2]
    shape = input.shape if input.shape == target.shape else together(input.shape, target.shape)
    return torch.empty(shape, dtype=torch.promote_types(input.dtype, target.dtype), device=input.device)


def _add_up(engine: Engine, reduction: int, shares: Any, result: Any, device: int) -> None:
    func = _aten.mean.default if reduction == _MEAN else _aten.sum.default
    kernels = BESIDE[func](engine, func, (shares,), {}, result, device)
    assert isinstance(kernels, Kernels)
    engine.run_kernels(kernels, device)
