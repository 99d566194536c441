"""What kernels that sort hold while they run: `sort`, `topk`, `unique`, `randperm`, writing through indices with accumulation.

After ``Sort.cpp``, ``SortStable.cu``, ``TensorTopK.cpp``, ``TensorTopK.cu``, ``UniqueCub.cu`` and ``Indexing.cu`` in
ATen/native/cuda. Rows of up to 4096 are sorted in place. What CUB takes is in `cub`; recorded on GPUs: 72,191 bytes for 4096
pairs of eight bytes each by two passes, 138,751 for 8192.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from math import ceil, log, log2, prod
from typing import Any

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine import values
from gpumem_magic.virtual.engine.calls import bytes_of
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.half_precision import HALF
from gpumem_magic.virtual.engine.mismatch import refuse_mask_of_numbers
from gpumem_magic.virtual.engine.modes import STATE
from gpumem_magic.virtual.engine.rules import BESIDE, special
from gpumem_magic.virtual.engine.strides import in_order
from gpumem_magic.virtual.engine.tensors import VirtualTensor
from gpumem_magic.virtual.operators import growing, index_lists, reductions
from gpumem_magic.virtual.operators.cub import Cub, cub_of
from gpumem_magic.virtual.operators.positions import hold_while_found
from gpumem_magic.virtual.operators.written_gradients import IN_PLACE, writes_into_zeros

# The longest row that is sorted in place.
MOST_IN_PLACE = 4096
# Rows of so many are sorted one after the other; so many rows by one sort for each.
_LONG_ROW = 1_000_000
_MANY_ROWS = 128
_INDEX = 8


def sort_blocks(cub: Cub, count: int, row: int, item: int, held: list[int]) -> tuple[list[int], list[list[int]]]:
    """Blocks held throughout a sort, and those held in addition, step by step. Bytes, in the order of the allocations.

    count: of elements; row: how many are sorted together; item: bytes of each; held: what stands for tensors that lie otherwise.
    """
    if row <= MOST_IN_PLACE:
        return [], [[row * _INDEX]]
    rows = count // row
    if rows == 1 or row >= _LONG_ROW:
        return [*held, row * _INDEX], [[cub.radix_sort(row, item, _INDEX)]] * rows
    if rows < _MANY_ROWS:
        # By value with (row, place) beside each, then by row; the sorted keys are not kept.
        pairs = count * 2 * 4
        by_row = cub.radix_sort(count, 8, 0, rows.bit_length())
        return [*held, pairs, pairs], [[count * item, cub.radix_sort(count, item, 8)], [by_row]]
    return [*held, count * _INDEX], [[cub.segmented_sort(count, item, _INDEX)]]


def _hold_for_sort(engine: Engine, device: int, source: Any, dim: int, results: tuple[Any, Any]) -> None:
    if not source.dim() or not source.numel():
        return
    dim %= source.dim()
    cub, item = cub_of(engine, device), source.element_size()
    others = _lying_otherwise(source, dim, results)
    held, steps = sort_blocks(cub, source.numel(), source.shape[dim], item, others)
    is_in_place = source.shape[dim] <= MOST_IN_PLACE
    with engine.scratch(device, *held):
        for step in steps:
            with engine.scratch(device, *step):
                if is_in_place:
                    # (The places of a row, by `arange`.)
                    growing.fill(engine, device, _INDEX)


def _lying_otherwise(source: Any, dim: int, results: tuple[Any, Any]) -> list[int]:
    """Copies of what is sorted, of values and of places, unless they lie side by side, that dimension innermost (`Sort.cpp`)."""
    copied = not (source.stride(dim) == 1 and is_dense(source))
    lies = tuple(source.stride())
    if copied:
        outwards = sorted(
            (place for place in range(source.dim()) if place != dim), key=lambda place: (source.stride(place), -place)
        )
        lies = in_order(source.shape, [dim, *outwards])
    return [
        *([bytes_of(source)] if copied else []),
        *(source.numel() * one.element_size() for one in results if tuple(one.stride()) != lies),
    ]


@special(*overloads("sort.values sort.values_stable"), table=BESIDE)
def _sort_into(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> tuple[int, ...]:
    place = 1 if func is _aten.sort.values else 2
    _hold_for_sort(engine, device, args[0], args[place] if len(args) > place else kwargs.get("dim", -1), out)
    return ()


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
    _hold_for_sort(engine, device, args[0], dim, out)
    return out


@special(_aten.topk.default)
def _topk(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """Selected by radix, then put in order: in place up to 4096 of them, otherwise by a sort into new tensors."""
    source = args[0]
    dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
    in_order = args[4] if len(args) > 4 else kwargs.get("sorted", True)
    chosen, indices = out = engine.run(func, args, kwargs, device)
    with engine.scratch(device, 0 if source.is_contiguous() else bytes_of(source)):
        hold_for_selection(engine, device, source, dim)
    if in_order and chosen.dim() and chosen.shape[dim] > MOST_IN_PLACE:
        with engine.scratch(device, bytes_of(indices), bytes_of(chosen)):
            _hold_for_sort(engine, device, chosen, dim, (chosen, indices))
            # The indices are picked in the new order.
            with engine.scratch(device, bytes_of(indices)):
                pass
    return out


# Rows of one slice that several blocks work on: up to so many slices, from so many elements on.
_SHARED_FROM = ((20, 20_000), (40, 10_000), (80, 8_000), (199, 5_000), (799, 3_000), (4_000, 800), (2**32 - 1, 400))
_THREADS, _REGISTERS, _FEWEST_ITEMS, _MOST_ITEMS = 256, 40, 4, 64
_REGISTERS_OF_PROCESSOR = 65_536
_DIGITS = 256


def hold_for_selection(engine: Engine, device: int, source: Any, dim: int) -> None:
    """What `topk` holds where several blocks count the digits of one slice (``sbtopk`` and ``mbtopk`` in ``TensorTopK.cu``)."""
    if not source.dim() or not source.numel():
        return
    size = source.shape[dim]
    slices = source.numel() // size
    if size < next(fewest for most, fewest in _SHARED_FROM if slices <= most):
        return
    item, version, cub = source.element_size(), engine.memory.torch_version(device), cub_of(engine, device)
    at_a_time = cub.processors[0] * (_REGISTERS_OF_PROCESSOR // (_REGISTERS * _THREADS)) * _THREADS
    items = max(_FEWEST_ITEMS, min(-(-size * slices // at_a_time), _MOST_ITEMS))
    blocks = slices * -(-size // (items * _THREADS))
    # The k-th value, how many are still to be found, and the digits known so far: of this pass, and since 2.7 of the next.
    key, passes = max(4, item), 2 if version >= (2, 7) else 1
    known = [passes * 4 * slices, passes * key * slices]
    counts = [blocks * _DIGITS * 2]
    if version >= (2, 11):
        counts.append(slices * _DIGITS * 4)
    else:
        known.insert(0, 4 * slices)
    with engine.scratch(device, item * slices, *known, *counts, 4 * blocks, 4 * blocks):
        for _ in range(2):
            with engine.scratch(device, cub.scan_by_key(blocks, 4)):
                pass


@special(_aten._unique2.default, _aten._unique.default)
def _unique(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    flags = dict(zip(("sorted", "return_inverse", "return_counts"), args[1:], strict=False)) | kwargs
    found = _distinct(engine, device, args[0], flags, is_sorted=False)
    return found if func is _aten._unique2.default else found[:2]


def _distinct(engine: Engine, device: int, source: Any, flags: Any, is_sorted: bool) -> Any:
    """The most that there can be: every element once, or all that they were chosen among. Values and counts keep room for as many
    as there are elements anyway."""
    count, item = source.numel(), source.element_size()
    most = engine.selected("unique", min(count, engine.among(source) or count))
    counted, inverted = bool(flags.get("return_counts")), bool(flags.get("return_inverse"))
    if source.dtype == torch.bool and count and not is_sorted:
        return _distinct_flags(engine, device, source, most, inverted, counted)
    cub, listed = cub_of(engine, device), count * _INDEX
    inverse = None
    with ExitStack() as held:
        if not source.is_contiguous():
            held.enter_context(engine.scratch(device, count * item))
        if not is_sorted:
            held.enter_context(engine.scratch(device, count * item))
            # With the inverse: the places in order, and where they went.
            with ExitStack() as places:
                if inverted:
                    places.enter_context(engine.scratch(device, listed))
                    held.enter_context(engine.scratch(device, listed))
                floats = source.dtype == torch.float32
                sorting = cub.radix_sort(count, item, _INDEX if inverted else 0, floats=floats) if count else 0
                with engine.scratch(device, sorting):
                    pass
        if inverted:
            inverse = _placed(engine, tuple(source.shape), torch.int64, device)
            numbers = cub.scan(count, 4, by_sum=True) if count else 0
            with engine.scratch(device, listed // 2 if is_sorted else listed, numbers):
                pass
        found = _placed(engine, (count,), source.dtype, device)
        with engine.scratch(device, _INDEX):
            counts = _placed(engine, (count if counted else 0,), torch.int64, device)
            is_number = source.dtype not in HALF
            with engine.scratch(device, cub.runs(count) if counted else cub.differing(count, item, is_number)):
                pass
    found.resize_((most,))
    counts.resize_((most if counted else 0,))
    return found, _placed(engine, (0,), torch.int64, device) if inverse is None else inverse, counts


def _distinct_flags(engine: Engine, device: int, source: Any, most: int, inverted: bool, counted: bool) -> Any:
    """The true ones are counted: no sort."""
    count = source.numel()
    with engine.scratch(device, 0 if source.is_contiguous() else count), engine.scratch(device, 4):
        with engine.scratch(device, cub_of(engine, device).sum(count)):
            pass
        found, counts = _placed(engine, (2,), torch.bool, device), _placed(engine, (2,), torch.int64, device)
        inverse = _placed(engine, tuple(source.shape) if inverted else (0,), torch.int64, device)
    found.resize_((min(most, 2),))
    counts.resize_((min(most, 2),))
    return found, inverse, counts if counted else _placed(engine, (0,), torch.int64, device)


@special(_aten.unique_consecutive.default, _aten.unique_dim.default)
def _unique_along(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """The numbers of the rows are sorted, by comparing rows where they lie (``Unique.cu``)."""
    source = args[0]
    by_dim = func is _aten.unique_dim.default
    names = "dim sorted return_inverse return_counts" if by_dim else "return_inverse return_counts dim"
    flags = dict(zip(names.split(), args[1:], strict=False)) | kwargs
    dim = flags.get("dim")
    if dim is None:
        return _distinct(engine, device, source, flags, is_sorted=True)
    rows = source.shape[dim]
    cub, listed = cub_of(engine, device), rows * _INDEX
    shape = list(source.shape)
    shape[dim] = count = engine.selected("unique", rows)
    inverse, counts = (_placed(engine, (0,), torch.int64, device) for _ in range(2))
    with engine.scratch(device, 0 if source.movedim(dim, 0).is_contiguous() else bytes_of(source), listed):
        if by_dim and rows:
            with engine.scratch(device, cub.merge_sort(rows, _INDEX)):
                pass
        if flags.get("return_inverse"):
            # Where a row differs from the one before, and the sums of that.
            with engine.scratch(device, listed):
                inverse = _placed(engine, (rows,), torch.int64, device)
                for size in (cub.differences(), cub.scan(rows, _INDEX, by_sum=cub.version >= (3, 0))):
                    with engine.scratch(device, size):
                        pass
        if flags.get("return_counts"):
            with engine.scratch(device, listed + _INDEX):
                with engine.scratch(device, cub.unique_by_key(rows)):
                    pass
                counts = _placed(engine, (count,), torch.int64, device)
                with engine.scratch(device, cub.differences()):
                    pass
        else:
            with engine.scratch(device, cub.unique(rows)):
                pass
        return _placed(engine, tuple(shape), source.dtype, device), inverse, counts


# The longest row whose most frequent value one kernel finds.
_LONGEST_MODE = 2048


@special(_aten.mode.default, table=BESIDE)
def _mode(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> tuple[int, ...]:
    """A copy of rows that are long or do not lie plainly; of long ones each is sorted there, and its runs counted, one by one;
    flags are counted as they are (``TensorModeKernel.cpp`` and ``.cu``, with Thrust)."""
    source = args[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", -1)
    if not source.dim() or source.shape[dim] == 1 or not source.numel():
        return ()
    count = source.shape[dim]
    if count <= _LONGEST_MODE and source.transpose(dim, -1).is_contiguous():
        return ()
    with engine.scratch(device, bytes_of(source)):
        if count > _LONGEST_MODE and source.dtype != torch.bool:
            for distinct in _distinct_in_rows(source, dim):
                _hold_for_mode(engine, device, source.dtype, count, distinct)
        elif count > _LONGEST_MODE:
            cub = cub_of(engine, device)
            for size in (cub.true_ones(), cub.first_found()) * (source.numel() // count):
                with engine.scratch(device, size):
                    pass
    return ()


def _distinct_in_rows(source: Any, dim: int) -> list[int]:
    """How many values each row has: as many as there can be where they are not known."""
    count = source.shape[dim]
    known = values.known(source)
    if known is None:
        return [min(count, 1 << 8 * source.element_size())] * (source.numel() // count)
    return [len(row.unique()) for row in known.host.transpose(dim, -1).reshape(-1, count)]


def _hold_for_mode(engine: Engine, device: int, dtype: torch.dtype, count: int, distinct: int) -> None:
    cub, item = cub_of(engine, device), dtype.itemsize
    # (Thrust knows an order of its own of plain numbers alone.)
    by = cub.merge_sort if dtype in HALF else cub.radix_sort_of_thrust
    with engine.scratch(device, count * _INDEX):
        for size in (by(count, item, _INDEX), cub.sum(count) + 4):
            with engine.scratch(device, size):
                pass
        with engine.scratch(device, distinct * item, distinct * _INDEX):
            for size in (cub.sums_by_key(count), cub.largest_of(distinct), cub.first_found()):
                with engine.scratch(device, size):
                    pass


def hold_for_shuffle(engine: Engine, device: int, numbers: Any) -> None:
    """What `randperm` holds: the numbers in order, and random keys by which these are sorted (``Randperm.cu``).

    For a moment a number of the result's type comes first (`check_supported_max_int_with_precision` in ``TensorFactories.h``).
    """
    count, item = numbers.numel(), numbers.element_size()
    if not count:
        return
    # So many bits that with nine in ten no two keys are the same.
    bits = min(64, ceil(log2(count - (6 * count**2 + 1) / (12 * log(0.9)))))
    key = 4 if bits <= 32 else 8
    with engine.scratch(device, item):
        pass
    with engine.scratch(device, count * item):
        growing.fill(engine, device, item)
        sorting = cub_of(engine, device).radix_sort(count, key, item, bits)
        with engine.scratch(device, count * key, count * key, sorting):
            pass


def _placed(engine: Engine, shape: tuple[int, ...], dtype: torch.dtype, device: int) -> Any:
    return torch.empty(shape, dtype=dtype, device=torch.device("cuda", device))


# ---- writing through indices


def _accumulate(
    engine: Engine,
    device: int,
    places: int,
    on_host: Sequence[bool],
    unplain: Sequence[int],
    highest: int,
    copies: Sequence[int],
    is_checked: bool,
    positions: ExitStack,
) -> None:
    """What `index_put_` holds with accumulation, which sorts the places so that each is written once (``Indexing.cu``).

    places: how many are written; on_host: for each index tensor that says which, whether it is on the host; unplain: bytes of its
    plain copy, if it needs one; highest: the highest number of a place; copies: bytes of the values and of the target where they
    have to be laid out anew; is_checked: whether the host looks at the lowest and the highest index; positions: those of masks,
    which are given back before the sort.
    """
    listed = places * _INDEX
    with ExitStack() as held:
        for number, (at_home, copied_index) in enumerate(zip(on_host, unplain, strict=True)):
            # Each index is wrapped around, then multiplied, and added to the first; where it is on the host, there, and copied.
            if not at_home and is_checked:
                _hold_ends(engine, device, places, copied_index)
            wrapped = 0 if at_home else listed
            if number:
                with engine.scratch(device, wrapped, listed, first_out=True):
                    pass
            else:
                with engine.scratch(device, wrapped):
                    held.enter_context(engine.scratch(device, listed))
        positions.close()
        sorting = cub_of(engine, device).radix_sort(places, _INDEX, _INDEX, max(1, highest.bit_length()))
        with engine.scratch(device, *copies, listed, listed, listed):
            growing.fill(engine, device, _INDEX)
            with engine.scratch(device, sorting):
                pass


# Since when each end is compared on the device, and since when both are looked for at once.
_COMPARED_FROM, _BOTH_ENDS_FROM = (2, 4), (2, 13)


def _hold_ends(engine: Engine, device: int, places: int, copied: int) -> None:
    """The highest and the lowest index, each compared with what is allowed. copied: bytes of a plain copy of the indices."""
    version = engine.memory.torch_version(device)
    compared = [1] if version >= _COMPARED_FROM else []
    at_once = 2 if version >= _BOTH_ENDS_FROM else 1
    shared = reductions.shared_by_extremes(engine, places, _INDEX, device, at_once)
    for _ in range(2 // at_once):
        with engine.scratch(device, *[_INDEX] * at_once, first_out=True):
            with engine.scratch(device, copied), engine.scratch(device, *shared):
                pass
            for size in compared * at_once:
                with engine.scratch(device, size):
                    pass


def _writes_plainly(engine: Engine, args: Any, kwargs: Any) -> bool:
    """Whether nothing is held beside the result: nothing is added up, and the lists, of 64 bits and on the device, lie alike."""
    if STATE.backward or kwargs or len(args) > 3 or torch.are_deterministic_algorithms_enabled():
        return False
    indices = [index for index in args[1] if index is not None]
    if not isinstance(args[2], VirtualTensor) or not indices:
        return False
    if not all(isinstance(index, VirtualTensor) and index.dtype is torch.int64 for index in indices):
        return False
    return len(indices) == 1 or not index_lists.bytes_laid_out([index_lists.lie_of(index) for index in indices])


@special(
    *overloads("_index_put_impl_ index_put_ index_put _unsafe_index_put"), plain=_writes_plainly, outside_backward=True
)
def _index_put(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    target, indices, source = args[:3]
    index_lists.refuse_others(target, indices, engine.assumed)
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    is_checked = func is not _aten._index_put_impl_.default or not (args[4] if len(args) > 4 else kwargs.get("unsafe"))
    if func in IN_PLACE and writes_into_zeros(func, args[0]):
        # (A gradient's own indices are in range.)
        func, is_checked = IN_PLACE[func], False
    given = [(index, dim) for index, dim in index_lists.with_dims(indices) if isinstance(index, torch.Tensor)]
    is_number = not isinstance(source, VirtualTensor)
    on_device = [isinstance(index, VirtualTensor) and index_lists.is_mask(index) for index, _ in given]
    # A number for the places of a mask is filled in without looking for them, if the mask is on the device.
    is_filled = is_number and on_device == [True] and not accumulate and source.numel() == 1
    if is_filled:
        refuse_mask_of_numbers(given[0][0])
    out = engine.run(func, args, kwargs, device)
    if is_filled:
        return out
    shapes: list[tuple[int, ...]] = []
    on_host: list[bool] = []
    moved: list[int] = []
    widened: list[int] = []
    lies: list[index_lists.Lie] = []
    chosen_dims = []
    with ExitStack() as number, ExitStack() as positions:
        for index, dim in given:
            chosen_dims += list(range(dim, dim + index_lists.width(index)))
            at_home = not isinstance(index, VirtualTensor)
            on_host += [at_home] * index_lists.width(index)
            if index_lists.is_mask(index):
                count = _positions(engine, index, source, target.dim() - dim - index.dim(), len(given) == 1)
                listed = count * index.dim() * _INDEX
                if at_home and not (accumulate or _is_sorted_anyway(engine, device, source)):
                    moved += index_lists.positions_to_device(count, index.dim(), engine.memory.torch_version(device))
                elif not at_home:
                    _hold_positions(engine, device, index, listed, positions)
                shapes += [(count,)] * index.dim()
                lies += index_lists.lies_of_positions(count, index.dim())
            else:
                shapes.append(tuple(index.shape))
                # Those on the host come to the device first.
                moved += index_lists.bytes_to_device(index)
                widened.append(0 if at_home and accumulate else index_lists.bytes_widened(index))
                lies.append(index_lists.lie_of(index))
        if not given:
            return out
        if is_number:
            # A number comes to the device.
            number.enter_context(engine.scratch(device, source.element_size()))
        if not (accumulate or _is_sorted_anyway(engine, device, source)):
            with engine.scratch(device, *moved, *widened, *index_lists.bytes_laid_out(lies)):
                return out
        positions.enter_context(engine.scratch(device, *widened))
        places = prod(torch.broadcast_shapes(*shapes))
        rows = prod(target.shape[dim] for dim in chosen_dims)
        values_there = places * (target.numel() // max(1, rows))
        is_plain = source.numel() == values_there and source.is_contiguous()
        copied = 0 if is_plain else values_there * source.element_size()
        adjacent = chosen_dims == list(range(chosen_dims[0], chosen_dims[-1] + 1))
        copies = [copied, 0 if adjacent else bytes_of(target)]
        if values_there:
            unplain = index_lists.plain_copies(lies)
            last = sum((size - 1) * stride for size, stride in zip(target.shape, target.stride(), strict=True))
            together = target.shape[chosen_dims[-1] + 1 :] if adjacent else _others(target, chosen_dims)
            highest = last // max(1, prod(together))
            with engine.scratch(device, 0 if target.is_contiguous() else bytes_of(target)):
                _accumulate(engine, device, places, on_host, unplain, highest, copies, is_checked, positions)
    return out


def _others(target: Any, dims: Sequence[int]) -> list[int]:
    """The sizes of the dimensions that no index is about."""
    return [size for dim, size in enumerate(target.shape) if dim not in dims]


# Since when one number for all places is written without a sort. (The build of 2.11 does so, that of 2.7 does not; between
# them it is not known.)
_ONE_NUMBER_FROM = (2, 8)


def _is_sorted_anyway(engine: Engine, device: int, source: Any) -> bool:
    """Without accumulation: where algorithms are deterministic, so that of several values for a place the same stays."""
    if not torch.are_deterministic_algorithms_enabled():
        return False
    return source.numel() > 1 or engine.memory.torch_version(device) < _ONE_NUMBER_FROM


def _hold_positions(engine: Engine, device: int, mask: Any, listed: int, held: ExitStack) -> None:
    hold_while_found(engine, device, mask, lambda: held.enter_context(engine.scratch(device, listed)))


def _positions(engine: Engine, mask: Any, source: Any, behind: int, is_alone: bool) -> int:
    """How many places a mask chooses: as many as are known, else as many as there are values, else all.

    behind: how many dimensions lie behind those of the mask; is_alone: whether no other index says what is chosen. Then a card
    would refuse another number, so that the mask has as many when it is asked again, as by the gradient of the values.
    """
    known = values.exact(mask) if isinstance(mask, VirtualTensor) else mask
    if known is not None:
        return int(known.count_nonzero())
    given = int(source.shape[-1 - behind]) if source.dim() > behind else 1
    if given <= 1:
        return int(mask.numel())
    if is_alone and given <= mask.numel():
        engine.tell(mask, given)
    return given
