"""What kernels that sort hold while they run: `sort`, `topk`, `unique`, `randperm`, writing through indices with accumulation.

After ``Sort.cpp``, ``SortStable.cu``, ``TensorTopK.cpp``, ``UniqueCub.cu`` and ``Indexing.cu`` in ATen/native/cuda. Rows of up to
4096 are sorted in place. What CUB's radix sort takes follows from ``dispatch_radix_sort.cuh``; recorded on GPUs: 72,191 bytes for
4096 pairs of eight bytes each by two passes, 138,751 for 8192 (`radix_bytes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from math import ceil, log, log2, prod
from typing import Any

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine import values
from gpumem_magic.virtual.engine.calls import bytes_of
from gpumem_magic.virtual.engine.engine import Engine, special
from gpumem_magic.virtual.engine.tensors import VirtualTensor
from gpumem_magic.virtual.operators.written_gradients import IN_PLACE, writes_into_zeros

# The longest row that is sorted in place.
MOST_IN_PLACE = 4096
# Rows of so many are sorted one after the other; so many rows by one sort for each.
_LONG_ROW = 1_000_000
_MANY_ROWS = 128
_INDEX = 8
# CUB's threads of one tile, and values of four bytes for each of them: where one tile is enough, and where it is not.
_ONE_TILE, _NOMINAL_ONE = 256, 19
_TILE, _NOMINAL = 384, 21


def radix_bytes(count: int, key: int, value: int, bits: int | None = None) -> int:
    """What CUB takes to sort `count` keys of `key` bytes with `value` bytes each, by their lowest `bits`.

    Few are sorted in one tile, for which PyTorch asks for one byte. More take a histogram of eight-byte numbers for each pass
    over eight bits, one of four-byte numbers for each tile, a counter for each pass, and with several passes a second copy of
    all; each rounded to 256 bytes. Tiles are those of Ampere and newer (``tuning_radix_sort.cuh``).
    """
    widest = max(key, value, 4)
    if count <= _ONE_TILE * max(1, _NOMINAL_ONE * 4 // widest):
        return 1
    passes = -(-(8 * key if bits is None else bits) // 8)
    tiles = -(-count // (_TILE * max(1, _NOMINAL * 4 // widest)))
    copies = (count * key, count * value) if passes > 1 else ()
    parts: tuple[int, ...] = (passes * 2048, tiles * 1024, *copies, passes * 4)
    return 255 + sum(-(-part // 256) * 256 for part in parts)


def sort_blocks(count: int, row: int, item: int, by_last: bool) -> tuple[list[int], list[list[int]]]:
    """Blocks held throughout a sort, and those held in addition, step by step. Bytes, in the order of the allocations.

    count: of elements; row: how many are sorted together; item: bytes of each; by_last: whether rows lie together in memory.
    """
    if row <= MOST_IN_PLACE:
        return [], [[row * _INDEX]]
    held = [] if by_last else [count * item, count * item, count * _INDEX]
    rows = count // row
    if rows == 1 or row >= _LONG_ROW:
        return [*held, row * _INDEX], [[radix_bytes(row, item, _INDEX)]]
    if rows < _MANY_ROWS:
        # By value with (row, place) beside each, then by row; the sorted keys are not kept.
        pairs = count * 2 * 4
        return [*held, pairs, pairs], [[count * item, radix_bytes(count, item, 8)], [radix_bytes(count, 8, 0, 32)]]
    # A sort by segments has no histograms.
    return [*held, count * _INDEX], [[count * (item + _INDEX) if item > 1 else 0]]


def _hold_for_sort(engine: Engine, device: int, source: Any, dim: int) -> None:
    if not source.dim() or not source.numel():
        return
    dim %= source.dim()
    by_last = source.stride(dim) == 1 and is_dense(source)
    held, steps = sort_blocks(source.numel(), source.shape[dim], source.element_size(), by_last)
    with engine.scratch(device, *held):
        for step in steps:
            with engine.scratch(device, *step):
                pass


def is_dense(tensor: Any) -> bool:
    """Whether the elements lie side by side, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


@special(_aten.sort.default, _aten.sort.stable)
def _sort(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    place = 1 if func is _aten.sort.default else 2
    dim = args[place] if len(args) > place else kwargs.get("dim", -1)
    out = engine.run(func, args, kwargs, device)
    _hold_for_sort(engine, device, args[0], dim)
    return out


@special(_aten.topk.default)
def _topk(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """Selected by radix, then put in order: in place up to 4096 of them, otherwise by a sort into new tensors."""
    source = args[0]
    dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
    in_order = args[4] if len(args) > 4 else kwargs.get("sorted", True)
    chosen, indices = out = engine.run(func, args, kwargs, device)
    with engine.scratch(device, 0 if source.is_contiguous() else bytes_of(source)):
        pass
    if in_order and chosen.dim() and chosen.shape[dim] > MOST_IN_PLACE:
        with engine.scratch(device, bytes_of(indices), bytes_of(chosen)):
            _hold_for_sort(engine, device, chosen, dim)
            # The indices are picked in the new order.
            with engine.scratch(device, bytes_of(indices)):
                pass
    return out


@special(_aten._unique2.default)
def _unique(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    flags = dict(zip(("sorted", "return_inverse", "return_counts"), args[1:], strict=False)) | kwargs
    return _distinct(engine, device, args[0], flags, is_sorted=False)


def _distinct(engine: Engine, device: int, source: Any, flags: Any, is_sorted: bool) -> Any:
    """The most that there can be: every element once. The values keep room for that many anyway."""
    count, item = source.numel(), source.element_size()
    most = engine.selected("unique", count)
    lists = [count * _INDEX] if flags.get("return_inverse") else []
    with ExitStack() as held:
        if not source.is_contiguous():
            held.enter_context(engine.scratch(device, count * item))
        if not is_sorted:
            held.enter_context(engine.scratch(device, count * item))
            # With the inverse: the places in order, and where they went.
            with engine.scratch(device, *lists):
                held.enter_context(engine.scratch(device, *lists))
                with engine.scratch(device, radix_bytes(count, item, _INDEX if lists else 0)):
                    pass
        inverse = _placed(engine, tuple(source.shape) if lists else (0,), torch.int64, device)
        with engine.scratch(device, *([size // 2 for size in lists] if is_sorted else lists)):
            pass
        found = _placed(engine, (most,), source.dtype, device)
        with engine.scratch(device, _INDEX):
            counts = _placed(engine, (most if flags.get("return_counts") else 0,), torch.int64, device)
    return found, inverse, counts


@special(_aten.unique_consecutive.default, _aten.unique_dim.default)
def _unique_along(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """Rows are compared where they lie (``Unique.cu``); what sorts them takes is not known here."""
    source = args[0]
    by_dim = func is _aten.unique_dim.default
    names = "dim sorted return_inverse return_counts" if by_dim else "return_inverse return_counts dim"
    flags = dict(zip(names.split(), args[1:], strict=False)) | kwargs
    dim = flags.get("dim")
    if dim is None:
        return _distinct(engine, device, source, flags, is_sorted=True)
    most = source.shape[dim]
    listed = most * _INDEX
    shape = list(source.shape)
    shape[dim] = count = engine.selected("unique", most)
    with engine.scratch(device, 0 if source.movedim(dim, 0).is_contiguous() else bytes_of(source), listed):
        with engine.scratch(device, listed if flags.get("return_inverse") else 0):
            inverse = _placed(engine, (most if flags.get("return_inverse") else 0,), torch.int64, device)
        with engine.scratch(device, listed + _INDEX if flags.get("return_counts") else 0):
            counts = _placed(engine, (count if flags.get("return_counts") else 0,), torch.int64, device)
        return _placed(engine, tuple(shape), source.dtype, device), inverse, counts


def hold_for_shuffle(engine: Engine, device: int, numbers: Any) -> None:
    """What `randperm` holds: the numbers in order, and random keys by which these are sorted (``Randperm.cu``)."""
    count, item = numbers.numel(), numbers.element_size()
    if not count:
        return
    # So many bits that with nine in ten no two keys are the same.
    bits = min(64, ceil(log2(count - (6 * count**2 + 1) / (12 * log(0.9)))))
    key = 4 if bits <= 32 else 8
    sizes = [count * item, count * key, count * key, radix_bytes(count, key, item, bits)]
    with engine.scratch(device, *sizes):
        pass


def _placed(engine: Engine, shape: tuple[int, ...], dtype: torch.dtype, device: int) -> Any:
    return torch.empty(shape, dtype=dtype, device=torch.device("cuda", device))


# ---- writing through indices


def _accumulate(engine: Engine, device: int, places: int, on_host: Sequence[bool], rows: int, copied: int) -> None:
    """What `index_put_` holds with accumulation, which sorts the places so that each is written once (``Indexing.cu``).

    places: how many are written; on_host: for each index tensor that says which, whether it is on the host; rows: how many there
    are to choose from; copied: bytes of the values where they have to be laid out anew.
    """
    listed = places * _INDEX
    with ExitStack() as held:
        for number, at_home in enumerate(on_host):
            # Each index is wrapped around, then multiplied, and added to the first; where it is on the host, there, and copied.
            with ExitStack() as passing:
                if not at_home:
                    passing.enter_context(engine.scratch(device, listed))
                (passing if number else held).enter_context(engine.scratch(device, listed))
        bits = max(1, (rows - 1).bit_length())
        with engine.scratch(device, copied, listed, listed, listed, radix_bytes(places, _INDEX, _INDEX, bits)):
            pass


@special(_aten._index_put_impl_.default, _aten.index_put_.default, _aten.index_put.default)
def _index_put(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    target, indices, source = args[:3]
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    if func in IN_PLACE and writes_into_zeros():
        func = IN_PLACE[func]
    out = engine.run(func, args, kwargs, device)
    given = [(index, dim) for index, dim in _with_dims(indices) if isinstance(index, torch.Tensor)]
    shapes: list[tuple[int, ...]] = []
    on_host: list[bool] = []
    found = moved = 0
    chosen_dims = []
    for index, dim in given:
        chosen_dims += list(range(dim, dim + _width(index)))
        at_home = not isinstance(index, VirtualTensor)
        on_host += [at_home] * _width(index)
        if _is_mask(index):
            count = _positions(index, source)
            found += count * index.dim() * _INDEX
            shapes += [(count,)] * index.dim()
        else:
            shapes.append(tuple(index.shape))
            # Those on the host come to the device first.
            moved += at_home * index.numel() * _INDEX
    if not given or (found and not accumulate and len(given) == 1 and source.numel() == 1):
        # One value for the places of a mask is filled in without looking for them.
        return out
    sorts = accumulate or torch.are_deterministic_algorithms_enabled()
    with engine.scratch(device, found, 0 if sorts else moved):
        if sorts:
            places = prod(torch.broadcast_shapes(*shapes))
            rows = prod(target.shape[dim] for dim in chosen_dims)
            values_there = places * (target.numel() // max(1, rows))
            copied = (
                0 if source.numel() == values_there and source.is_contiguous() else values_there * source.element_size()
            )
            adjacent = chosen_dims == list(range(chosen_dims[0], chosen_dims[-1] + 1))
            laid_out = [] if target.is_contiguous() and adjacent else [bytes_of(target)]
            with engine.scratch(device, *laid_out):
                if values_there:
                    _accumulate(engine, device, places, on_host, rows, copied)
    return out


def _is_mask(index: Any) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def _width(index: Any) -> int:
    """How many dimensions an index is about."""
    return int(index.dim()) if index is not None and _is_mask(index) else 1


def _with_dims(indices: Any) -> Iterator[tuple[Any, int]]:
    """Each index with the first dimension that it is about."""
    dim = 0
    for index in indices:
        yield index, dim
        dim += _width(index)


def _positions(mask: Any, source: Any) -> int:
    """How many places a mask chooses: as many as are known, else as many as there are values, else all."""
    known = values.exact(mask) if isinstance(mask, VirtualTensor) else mask
    if known is not None:
        return int(known.count_nonzero())
    return int(source.shape[0]) if source.dim() and source.shape[0] > 1 else int(mask.numel())
