"""Lists of indices as the kernels of `x[i, j]` and `x[i, j] = ...` want them, and what is copied for that.

After ``TensorAdvancedIndexingUtils.h`` in ATen/native and ``TensorAdvancedIndexing.cpp``: integers of 32 bits are made 64 bits
wide, each list for itself. Several lists get one shape; where they do not lie alike then (one runs along the rows, another along
the columns), each that is not contiguous is laid out anew. What is written with accumulation goes another way after the first
step (``Indexing.cu``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from gpumem_magic.virtual.engine.calls import bytes_of
from gpumem_magic.virtual.engine.tensors import VirtualTensor

_INDEX = 8


class Lie(NamedTuple):
    """How a list of indices lies in memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


def lie_of(index: torch.Tensor) -> Lie:
    return Lie(tuple(index.shape), tuple(index.stride()))


def lies_of_positions(count: int, dims: int) -> list[Lie]:
    """Of a mask's positions: a plain list for each dimension, also of one that comes from the host."""
    return [Lie((count,), (1,))] * dims


# Since when the positions of a mask on the host come as one list (`ensure_same_device` in ``IndexingUtils.h``, since 2.9). The
# builds of 2.6 and 2.8 send each dimension's apart.
_POSITIONS_TOGETHER_FROM = (2, 9)


def is_mask(index: Any) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def width(index: Any) -> int:
    """How many dimensions an index is about."""
    return int(index.dim()) if index is not None and is_mask(index) else 1


def with_dims(indices: Any) -> Iterator[tuple[Any, int]]:
    """Each index with the first dimension that it is about."""
    dim = 0
    for index in indices:
        yield index, dim
        dim += width(index)


_TYPES = (torch.int64, torch.int32, torch.uint8, torch.bool)


def refuse_others(source: torch.Tensor, indices: Any, assumed: set[int]) -> None:
    """Places have one of four types, and a mask has the sizes of the dimensions that it is about (`checkIndexTensorTypes` and
    `expandTensors` in ``IndexingUtils.h``).

    assumed: sizes of which nobody knows what they are on a card, which alone refuse nothing."""
    for index, first in with_dims(indices):
        if index is not None and index.dtype not in _TYPES:
            raise IndexError("tensors used as indices must be long, int, byte or bool tensors")
        if index is None or not is_mask(index):
            continue
        pairs = zip(index.shape, source.shape[first:], strict=False)
        other = [(place, pair) for place, pair in enumerate(pairs) if pair[0] != pair[1]]
        if any(assumed.isdisjoint(pair) for _, pair in other):
            place = other[0][0]
            raise IndexError(
                f"The shape of the mask {[*index.shape]} at index {place} does not match the shape of the indexed tensor "
                f"{[*source.shape]} at index {first + place}"
            )


def bytes_to_device(index: torch.Tensor) -> list[int]:
    """Of a list on the host, as it comes to the device."""
    return [] if isinstance(index, VirtualTensor) else [bytes_of(index)]


def positions_to_device(count: int, dims: int, version: tuple[int, int]) -> list[int]:
    """Of the positions that a mask on the host chooses."""
    if version < _POSITIONS_TOGETHER_FROM:
        return [count * _INDEX] * dims
    return [count * dims * _INDEX]


def bytes_widened(index: torch.Tensor) -> int:
    return index.numel() * _INDEX if index.dtype == torch.int32 else 0


def bytes_laid_out(lies: Sequence[Lie]) -> list[int]:
    """For each list that has to be laid out anew."""
    if len(lies) < 2:
        return []
    try:
        shape = torch.broadcast_shapes(*(lie.shape for lie in lies))
    except RuntimeError:
        # (`make_info` in ``TensorAdvancedIndexing.cpp``.)
        shapes = ", ".join(str(list(lie.shape)) for lie in lies)
        raise IndexError(
            f"shape mismatch: indexing tensors could not be broadcast together with shapes {shapes}"
        ) from None
    strides = [_expanded(lie, shape) for lie in lies]
    if all(one == strides[0] for one in strides):
        return []
    return list(filter(None, plain_copies(lies)))


def plain_copies(lies: Sequence[Lie]) -> list[int]:
    """For each list, in the shape of all: the bytes of a plain copy, 0 where it is plain."""
    shape = torch.broadcast_shapes(*(lie.shape for lie in lies))
    plain = [_is_contiguous(shape, _expanded(lie, shape)) for lie in lies]
    return [0 if is_plain else prod(shape) * _INDEX for is_plain in plain]


def _expanded(lie: Lie, shape: Sequence[int]) -> tuple[int, ...]:
    missing = len(shape) - len(lie.shape)
    strides = []
    for dim, size in enumerate(shape):
        own = lie.shape[dim - missing] if dim >= missing else 1
        strides.append(0 if own == 1 and size != 1 else lie.strides[dim - missing] if dim >= missing else 0)
    return tuple(strides)


def _is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
