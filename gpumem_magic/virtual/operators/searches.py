"""Searching in what is in order, and asking of each element whether it is one of several.

After ``Bucketization.cu``, ``BucketizationUtils.h`` and ``TensorCompare.cpp`` of ATen/native.
"""

from __future__ import annotations

from typing import Any

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine.calls import copies_of
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.modes import pushed
from gpumem_magic.virtual.engine.rules import BESIDE, special


@special(_aten.searchsorted.Tensor, _aten.bucketize.Tensor, table=BESIDE)
def _searched(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    """Plain tensors of one type on both sides (`searchsorted_maybe_trim_input_tensors` in ``BucketizationUtils.h``)."""
    boundaries, wanted = args[:2] if func is _aten.searchsorted.Tensor else args[1::-1]
    both = torch.result_type(boundaries, wanted)
    copied = copies_of(wanted, boundaries)
    return copied + [one.numel() * both.itemsize for one in (wanted, boundaries) if one.dtype != both]


def _has_no_order(engine: Engine, args: Any, kwargs: Any) -> bool:
    return kwargs.get("sorter") is None


@special(_aten.searchsorted.Tensor, plain=_has_no_order)
def _searched_in_an_order(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """The lowest and the highest place of the order are looked at first (`searchsorted_pre_check`)."""
    order = kwargs.get("sorter")
    if order is not None and order.numel():
        with pushed(engine.mode):
            ends = order.aminmax()
        del ends
        engine.table.drain()
    return engine.run(func, args, kwargs, device)


@special(_aten.searchsorted.Scalar, _aten.bucketize.Scalar)
def _searched_for_a_number(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """It comes to the device in a tensor of its own, and is converted there (`searchsorted_scalar_tensor`)."""
    boundaries, number = args[:2] if func is _aten.searchsorted.Scalar else args[1::-1]
    wide = _TYPES_OF_NUMBERS[type(number)]
    both = torch.result_type(boundaries, number)
    with engine.scratch(device, wide.itemsize):
        out = engine.run(func, args, kwargs, device)
        converted = [both.itemsize] if wide != both else []
        widened = [boundaries.numel() * both.itemsize] if boundaries.dtype != both else []
        with engine.scratch(device, *converted, *copies_of(boundaries), *widened):
            return out


_TYPES_OF_NUMBERS = {int: torch.int64, float: torch.float64, bool: torch.bool}


@special(_aten.isin.Tensor_Tensor, _aten.isin.Tensor_Tensor_out)
def _is_in(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """Each element is compared with each, where these are few, else they are sorted together (``TensorCompare.cpp``)."""
    elements, tested = args[:2]
    out = engine.run(func, args, kwargs, device)
    if tested.numel() < 10 * elements.numel() ** 0.145:
        with engine.scratch(device, elements.numel() * tested.numel(), elements.numel()):
            return out
    with pushed(engine.mode):
        flags = kwargs.get("assume_unique", False), kwargs.get("invert", False)
        _sorted_together(elements, tested, *flags, engine.memory.torch_version(device))
    return out


def _sorted_together(
    elements: torch.Tensor, tested: torch.Tensor, assume_unique: bool, invert: bool, version: tuple[int, int]
) -> None:
    order = None
    if assume_unique:
        elements, tested = elements.ravel(), tested.ravel()
    else:
        elements, order = _aten._unique.default(elements, False, True)
        tested, _ = _aten._unique.default(tested, False)
    both = torch.cat([elements, tested])
    del tested, elements
    ordered, places = both.sort(stable=True)
    twice = torch.empty_like(ordered, dtype=torch.bool)
    following, before = ordered[1:], ordered[:-1]
    twice[:-1].copy_(following.ne(before) if invert else following.eq(before))
    twice[-1:].fill_(invert)
    mask = torch.empty_like(twice)
    mask.index_copy_(0, places, twice)
    if order is not None:
        mask[order]
    # C++ lets go of the last first, but for the pair that the sort gives (which 2.3 has as one, and 2.2 as two variables).
    del mask, following, before, twice
    if version < (2, 3):
        del places, ordered
    else:
        del ordered, places
    del both
