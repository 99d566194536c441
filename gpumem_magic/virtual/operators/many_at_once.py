"""Kernels that work on several tensors, or on several pieces of one, at once.

After ``TensorShape.cu`` and ``ForeachReduceOp.cu`` of ATen/native/cuda: lists about the pieces come to the device, and what is
added up has a place for each 65536 elements of a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod, sqrt
from typing import Any

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.modes import pushed
from gpumem_magic.virtual.engine.rules import BESIDE, special
from gpumem_magic.virtual.operators.sorting import is_dense

_PIECE = 65536
# Threads of a block that copies pieces of several tensors, and the bytes of it.
_THREADS = 128
_BLOCK = 16 * _THREADS
# Since when it looks at how the tensors lie. (2.11 does, 2.7 does not; between them it is not known.)
_CHUNKS_LOOKED_AT_FROM = (2, 8)


@special(_aten._chunk_cat.default, _aten._chunk_cat.out)
def _chunks(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """Six lists about the tensors come to the device, and which of them each block of 2048 bytes copies (``TensorShape.cu``). Of
    others than plain ones, those that don't divide evenly are copied with what is missing first (``TensorShape.cpp``)."""
    sources, dim, chunks = args[:3]
    rows = [-(-one.shape[dim] // chunks) * prod(one.shape[dim + 1 :]) for one in sources]
    looks = engine.memory.torch_version(device) >= _CHUNKS_LOOKED_AT_FROM
    if looks and not all(one.is_contiguous() for one in sources):
        padded = [
            chunks * row * prod(one.shape[:dim]) * one.element_size()
            for one, row in zip(sources, rows, strict=True)
            if one.shape[dim] % chunks
        ]
        with engine.scratch(device, *padded):
            return engine.run(func, args, kwargs, device)
    out = engine.run(func, args, kwargs, device)
    blocks = sum(-(-count * out.element_size() // _BLOCK) for count in rows)
    with engine.scratch(device, 8 * (6 * len(rows) + 2 + blocks)):
        return out


# Since when that is one kernel. (The build of 2.3 has it, that of 2.2 does not.)
_SPLIT_BY_KERNEL_FROM = (2, 3)


@special(_aten.split_with_sizes_copy.out, table=BESIDE)
def _pieces_copied(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    """Three lists about the pieces, where their blocks begin, and which of them each block copies (``TensorShape.cu``).

    Where that would be more than twice the blocks that the card runs at once, each copies more."""
    source, sizes, dim = args[0], args[1], args[2] if len(args) > 2 else kwargs.get("dim", 0)
    by_kernel = source.numel() and engine.memory.torch_version(device) >= _SPLIT_BY_KERNEL_FROM
    if not by_kernel or not all(is_dense(one) and one.dtype == source.dtype for one in (source, *kwargs["out"])):
        return []
    pieces = [size * source.stride(dim) * source.element_size() for size in sizes]
    rows, (processors, threads) = prod(source.shape[:dim]), engine.memory.processors(device)
    rounds = -(-sum(-(-piece // _BLOCK) for piece in pieces) * rows // (2 * (processors * threads // _THREADS)))
    at_once = _BLOCK * -(-rounds // min(ceil(sqrt(rounds)), rows))
    return [8 * (4 * len(pieces) + 1 + sum(-(-piece // at_once) for piece in pieces))]


# Since when each of these norms is a tensor of its own, not a place in one for all. (The build of 2.3 has it, not that of 2.2.)
_APART_FROM = (2, 3)


@special(_aten._foreach_norm.Scalar)
def _norms(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """A place for each piece of the largest; a norm of nothing is made last, and the one that was meant for it dropped."""
    out = engine.fake_call(func, args, kwargs)
    item = 8 if any(tensor.dtype == torch.float64 for tensor in args[0]) else 4
    together = engine.memory.torch_version(device) < _APART_FROM and all(tensor.numel() for tensor in args[0])
    with engine.scratch(device, len(args[0]) * _pieces(args[0]) * item):
        if together:
            with pushed(engine.mode):
                return list(args[0][0].new_empty(len(out), dtype=out[0].dtype).unbind())
        filled = [one for one, tensor in zip(out, args[0], strict=True) if tensor.numel()]
        engine.settle(filled)
        with engine.scratch(device, *[one.element_size() for one in out[len(filled) :]]):
            engine.settle(out)
    return out


_LARGEST = tuple(overloads("_foreach_max") if hasattr(_aten, "_foreach_max") else ())
# Since when the results are made before the room for the pieces. (2.13 does so, the builds of 2.8 and 2.9 do not; between them it
# is not known.)
_LARGEST_MADE_FIRST_FROM = (2, 10)


@special(*_LARGEST)
def _largest(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """The largest of each piece."""
    pieces = len(args[0]) * _pieces(args[0]) * args[0][0].element_size()
    if engine.memory.torch_version(device) < _LARGEST_MADE_FIRST_FROM:
        with engine.scratch(device, pieces):
            return engine.run(func, args, kwargs, device)
    out = engine.run(func, args, kwargs, device)
    with engine.scratch(device, pieces):
        return out


def _pieces(tensors: Sequence[Any]) -> int:
    return max((-(-tensor.numel() // _PIECE) for tensor in tensors), default=0)
