"""Sums, products and extremes from the first element on, along a dimension.

After ``ScanKernels.cpp`` of ATen/native/cuda: CUB's room where all lies in one row, plain copies elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine.calls import bytes_of, copies_of
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.half_precision import HALF
from gpumem_magic.virtual.engine.rules import BESIDE, special
from gpumem_magic.virtual.operators.cub import cub_of
from gpumem_magic.virtual.operators.positions import blocks_in_turn
from gpumem_magic.virtual.operators.sorting import is_dense

# What is written in order: by the operator that writes into `out`, the one that makes the same.
_IN_ORDER = {
    _aten.arange.start_out: _aten.arange.start_step,
    _aten.range.out: _aten.range.step,
    _aten.linspace.out: _aten.linspace.default,
    _aten.logspace.out: _aten.logspace.default,
}


@special(*_IN_ORDER)
def _written_in_order(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """A tensor with so many elements keeps its shape; one that does not lie in one piece is written by way of one that does
    (``RangeFactories.cu``)."""
    out = kwargs["out"]
    count = _IN_ORDER[func](*args, device=torch.device("meta")).numel()
    if out.numel() != count:
        out.resize_((count,))
    with engine.scratch(device, 0 if out.is_contiguous() else bytes_of(out)):
        return out


_IN_PLACE_SCANS = frozenset(overloads("cumsum_ cumprod_"))


@special(*overloads("cumsum cumprod cumsum_ cumprod_ cumsum.out cumprod.out"), table=BESIDE)
def _scan(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    """In the result's type, then side by side, as the result is; one row alone is CUB's (``ScanUtils.cuh``)."""
    source = args[0]
    if not source.dim():
        # A number is filled with itself, if it is written in place: with a copy (`fill_` in ``Fill.cpp``).
        return [bytes_of(out)] if func in _IN_PLACE_SCANS else []
    if not source.numel():
        return []
    converted = source.dtype != out.dtype
    laid_out = not source.is_contiguous() and (is_dense(source) or not converted)
    copied = converted + laid_out + (not out.is_contiguous())
    return [bytes_of(out)] * copied + of_one_row(engine, device, func, args, kwargs, out)


@special(_aten._cummax_helper.default, _aten._cummin_helper.default)
def _extremes_so_far(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> None:
    """What `cummax` and `cummin` have for ``out=``: results side by side (`cummax_helper_cuda` in ``ScanKernels.cpp``).

    (It has no shape rule, and returns nothing.)"""
    with engine.scratch(device, *copies_of(*args[1:3])):
        pass


@special(_aten.logcumsumexp.default, table=BESIDE)
def _scan_of_logarithms(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    source = args[0]
    if not source.dim() or not source.numel():
        return []
    copied = [] if source.is_contiguous() else [bytes_of(source)]
    return copied + of_one_row(engine, device, func, args, kwargs, out)


@special(_aten._logcumsumexp.out)
def _scan_of_logarithms_into(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """(It has no shape rule.)"""
    out = kwargs["out"].resize_(args[0].shape)
    with engine.scratch(device, *_scan_of_logarithms(engine, func, args, kwargs, out, device)):
        return out


_SUMS = frozenset(overloads("cumsum cumsum_ cumsum.out"))
_IN_ORDER_FROM = (2, 6)


def of_one_row(engine: Engine, device: int, func: Any, args: Any, kwargs: Any, out: Any) -> list[int]:
    dim = args[1] if len(args) > 1 else kwargs["dim"]
    if out.numel() != out.shape[dim]:
        return []
    item, version = out.element_size(), engine.memory.torch_version(device)
    is_class = out.dtype in HALF or out.is_complex()
    in_order = func in _SUMS and torch.are_deterministic_algorithms_enabled() and version >= _IN_ORDER_FROM
    if in_order and (out.is_floating_point() or out.is_complex()):
        # Each block's sum (``inclusive_deterministic_scan`` in ATen/cuda/cub.cuh).
        return [item * blocks_in_turn(out.numel(), engine.memory.processors(device)[0])]
    return [cub_of(engine, device).scan(out.numel(), item, not is_class)]
