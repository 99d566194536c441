"""Training that rounds as a quantised network would (``FakeQuantPerTensorAffine.cpp`` and ``FakeQuantPerChannelAffine.cpp`` in
ATen/native/quantized; of channels as an H100 was asked with 2.11).

Zero points of channels that are integers are looked through for the lowest and the highest. Where scale and zero point are
learnt, the zero points of channels are rounded first, and the gradients of both are worked out for every element, then summed up.
"""

from __future__ import annotations

from typing import Any

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine.calls import bytes_of
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.modes import pushed
from gpumem_magic.virtual.engine.rules import special
from gpumem_magic.virtual.operators.shapes import empty_like


def _look_through(engine: Engine, zero_points: Any) -> None:
    with pushed(engine.mode):
        lowest = zero_points.min()
        highest = zero_points.max()
    del highest
    engine.table.drain()
    del lowest
    engine.table.drain()


@special(
    *overloads("fake_quantize_per_tensor_affine_cachemask _fake_quantize_per_tensor_affine_cachemask_tensor_qparams"),
    _aten.fake_quantize_per_channel_affine_cachemask.default,
)
def _rounded(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """The rounded values, and a mask of one byte for each."""
    of_channels = func is _aten.fake_quantize_per_channel_affine_cachemask.default
    if of_channels and not args[2].is_floating_point() and args[2].numel():
        _look_through(engine, args[2])
    return empty_like(engine, args[0], device), empty_like(engine, args[0], device, torch.bool)


_OF_CHANNELS = overloads(
    "_fake_quantize_learnable_per_channel_affine _fake_quantize_learnable_per_channel_affine_backward"
)


@special(*overloads("_fake_quantize_learnable_per_tensor_affine"), _OF_CHANNELS[0])
def _rounded_as_learnt(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """Without the mask."""
    source, _, zero_points, *_ = args
    integers: Any = None
    if func in _OF_CHANNELS and zero_points.numel():
        with engine.scratch(device, bytes_of(zero_points)):
            integers = empty_like(engine, zero_points, device, torch.int32)
        _look_through(engine, integers)
    out = empty_like(engine, source, device)
    with engine.scratch(device, source.numel()):
        pass
    del integers
    engine.table.drain()
    return out


@special(*overloads("_fake_quantize_learnable_per_tensor_affine_backward"), _OF_CHANNELS[1])
def _gradients(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    _, source, scale, zero_points, *rest = args
    if not source.numel():
        return source, scale, zero_points
    of_channels = func in _OF_CHANNELS
    with engine.scratch(device, bytes_of(zero_points) if of_channels else 0):
        if of_channels:
            _look_through(engine, zero_points)
        gradient, for_scale, for_zero_points = (empty_like(engine, source, device) for _ in range(3))
        dims = [dim for dim in range(source.dim()) if dim != rest[0]] if of_channels else None
        with pushed(engine.mode):
            sums = [(one.sum(dims) if of_channels else one.sum().unsqueeze(0)) for one in (for_scale, for_zero_points)]
        del for_zero_points
        engine.table.drain()
        del for_scale
        engine.table.drain()
    return gradient, *sums
