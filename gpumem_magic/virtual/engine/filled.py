"""Which parts of a large tensor a program assigned to: of a cache that was made for the longest text, how much is in use.

Asked at each assignment to a part (``cache[:, :, t] = k`` is `copy_` into a view, or `index_put_`; libraries call `index_copy_`).
Kept are the looks of the parts, and where they began; what cannot be told so is taken for all of the tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from gpumem_magic.devices.base import FilledPart
from gpumem_magic.private import overloads
from gpumem_magic.units import MIB
from gpumem_magic.virtual.engine.storage import Placement
from gpumem_magic.virtual.engine.tensors import VirtualTensor

_COPIES = frozenset(overloads("copy_"))
_BY_LIST = frozenset(overloads("index_copy_"))
_BY_INDICES = frozenset(overloads("index_put_ _index_put_impl_"))
ASSIGN = _COPIES | _BY_LIST | _BY_INDICES
# Smaller ones are nobody's trouble, and of more parts nobody keeps account.
_LEAST = MIB
_MOST = 20_000
# What is kept of one that cannot be told so, or was assigned to as a whole.
_NOT_TOLD: dict[Any, set[int]] = {}


def note(find: Callable[[Any], Placement | None], known: Callable[[Any], Any], func: Any, args: Any) -> None:
    """An operator assigns to a tensor, or to a part of it. Under the lock.

    find: gives a storage's placement. known: gives what is known of a tensor's values."""
    target = args[0]
    if not isinstance(target, VirtualTensor) or target.layout is not torch.strided:
        return
    placement = find(target.untyped_storage())
    if placement is None or placement.nbytes < _LEAST or placement.filled is _NOT_TOLD:
        return
    sizes, strides, offset = list(target.size()), target.stride(), target.storage_offset()
    if func in _BY_LIST:
        given = {args[1] % max(1, target.dim()): args[2]}
    elif func in _BY_INDICES:
        given = {dim: index for dim, index in enumerate(args[1]) if index is not None}
    else:
        given = {}
    for dim, index in given.items():
        span = _span(known, index)
        if span is None:
            placement.filled = _NOT_TOLD
            return
        first, last = (one + sizes[dim] if one < 0 else one for one in span)
        offset += first * strides[dim]
        sizes[dim] = last - first + 1
    part = tuple(map(int, sizes)), tuple(map(int, strides))
    if placement.filled is None:
        placement.filled = {}
    starts = placement.filled.setdefault(part, set())
    starts.add(int(offset))
    if (
        prod(part[0]) * target.element_size() >= placement.nbytes
        or len(starts) > _MOST
        or len(placement.filled) > _MOST
    ):
        placement.filled = _NOT_TOLD


def _span(known: Callable[[Any], Any], index: Any) -> tuple[int, int] | None:
    """The first and the last of the places in a list of them; None where they are not known, or are a mask's."""
    if index.dtype not in (torch.int64, torch.int32) or not index.numel() or index.dim() > 1:
        return None
    if not isinstance(index, VirtualTensor):
        return int(index.min()), int(index.max())
    values = known(index)
    if values is None or not values.exact:
        return None
    return int(values.host.min()), int(values.host.max())


def parts_of(filled: dict[Any, set[int]]) -> tuple[FilledPart, ...]:
    return tuple(FilledPart(sizes, strides, tuple(sorted(starts))) for (sizes, strides), starts in filled.items())
