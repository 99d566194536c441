"""Reductions that several blocks of threads share: a buffer for their partial results, and a semaphore for each block of outputs.

After ``setReduceConfig`` and ``gpu_reduce_kernel`` in ATen/native/cuda/Reduce.cuh (the same in torch 2.1 to 2.15) and after the
order that TensorIterator brings dimensions into (``reorder_dimensions``, ``coalesce_dimensions`` in TensorIterator.cpp). How far
the work is split follows from shape, strides and size of the elements, and from the card's multiprocessors and their threads.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch

from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine.alike import Kernels
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.half_precision import HALF
from gpumem_magic.virtual.engine.modes import pushed
from gpumem_magic.virtual.engine.rules import BESIDE, special
from gpumem_magic.virtual.engine.strides import in_one_piece, lies_in_one_row

_aten = torch.ops.aten

# Of a block, and of one for complex numbers in double precision (`mnt_wrapper` in ``Reduce.cuh``).
_MOST_THREADS, _MOST_OF_COMPLEX_DOUBLES = 512, 256
_WARP = 32
_FEWEST_VALUES, _MOST_VALUES = 16, 256
_VECTOR = 4
_MOST_INDEXED = 2**31 - 1


class _Plan(NamedTuple):
    """The joined dimensions of a reduction, reduced ones first, then by stride; strides of the input in bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    reduced: int


class _ReductionKernel(NamedTuple):
    """accumulator: bytes of a partial result; None: an element's (float32 for half precision), 0: an element's in any case.
    at_once: how many elements a thread loads at once. in_results_type: whether an input of another type is converted first.
    results: how many partial results there are of each. is_number: whether one can be kept where the result will be.
    keeps_half: whether that may be in half precision, as kernels do that are compiled by need (`jitted_gpu_reduce_kernel`).
    is_real: whether those of complex numbers are real (`NormTwoOps` and the others in ``ReduceNormKernel.cu``)."""

    accumulator: int | None = None
    at_once: int = _VECTOR
    in_results_type: bool = False
    results: int = 1
    is_number: bool = True
    keeps_half: bool = False
    is_real: bool = False


def split(
    plan: _Plan, item: int, at_once: int, accumulator: int, processors: int, threads: int
) -> tuple[int, int] | None:
    """Bytes of the buffer and of the semaphores; None where one block does all the work for its outputs.

    item: bytes of an element; at_once: how many of them a thread loads at once; accumulator: bytes of a partial result;
    processors: the card's multiprocessors, with so many threads each.
    """
    outputs = prod(plan.shape[plan.reduced :])
    inputs = prod(plan.shape[: plan.reduced])
    if not plan.shape:
        return None
    along = plan.reduced == len(plan.shape) or plan.strides[0] < plan.strides[plan.reduced]
    width, height = (inputs, outputs) if along else (outputs, inputs)
    vector = 1
    if plan.shape and plan.strides[0 if along else plan.reduced] == item:
        if not along:
            vector = _output_vector(plan, item)
            width //= vector
        elif width >= 128 and plan.reduced == 1:
            width //= at_once
    most = (_MOST_OF_COMPLEX_DOUBLES if item == 16 else _MOST_THREADS) // vector
    width, height = (min(most, _power_of_two(size)) for size in (width, height))
    block_height = min(height, most // min(width, _WARP))
    block_width = min(width, most // block_height)
    step_input, step_output = (block_width, 1) if along else (1, block_width)
    over_warps = -(-inputs // step_input) >= min(block_height * _FEWEST_VALUES, _MOST_VALUES)
    if not over_warps:
        return None
    step_input *= block_height
    values = -(-inputs // step_input)
    wanted = processors * (threads // (block_width * block_height))
    grid = -(-(outputs // vector) // step_output)
    if values < _MOST_VALUES or grid > wanted:
        return None
    blocks = max(min(-(-wanted // grid), -(-values // _FEWEST_VALUES)), -(-values // _MOST_VALUES))
    if blocks <= 1:
        return None
    buffer = accumulator * outputs * blocks * (1 if along else block_width * vector)
    return buffer, 4 * grid


def _power_of_two(size: int) -> int:
    """The largest power of two up to `size`."""
    return 1 << (max(1, size).bit_length() - 1)


def _output_vector(plan: _Plan, item: int) -> int:
    """How many outputs that lie side by side a thread works on."""
    others = [stride // item for place, stride in enumerate(plan.strides) if place != plan.reduced]
    vector = _VECTOR
    while any(number % vector for number in (plan.shape[plan.reduced], *others)):
        vector //= 2
    return vector


def _plan(shape: Sequence[int], strides: Sequence[int], dims: Collection[int]) -> _Plan:
    strides = [0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True)]
    results = _result_strides(shape, dims)
    order = list(reversed(range(len(shape))))
    for place in range(1, len(order)):
        moving = place
        for before in range(place - 1, -1, -1):
            comparison = _compare(order[before], order[moving], shape, strides, results)
            if comparison > 0:
                order[before], order[moving] = order[moving], order[before]
                moving = before
            elif comparison < 0:
                break
    joined: list[list[int]] = []
    for dim in order:
        one = [shape[dim], strides[dim], results[dim]]
        if joined and _joins(joined[-1], one):
            last = joined[-1]
            if last[0] == 1:
                last[1:] = one[1:]
            last[0] *= one[0]
        else:
            joined.append(one)
    reduced = sum(size > 1 and not result for size, _, result in joined)
    return _Plan(tuple(one[0] for one in joined), tuple(one[1] for one in joined), reduced)


def _result_strides(shape: Sequence[int], dims: Collection[int]) -> list[int]:
    """The strides of the result, 0 along what is reduced and where there is one element."""
    strides, stride = [0] * len(shape), 1
    for dim in reversed(range(len(shape))):
        if dim not in dims and shape[dim] > 1:
            strides[dim] = stride
            stride *= shape[dim]
    return strides


def _compare(one: int, other: int, shape: Sequence[int], strides: Sequence[int], results: Sequence[int]) -> int:
    """Positive where `other` belongs further inside: what is reduced first, then by the input's stride."""
    if (results[one] == 0) != (results[other] == 0):
        return 1 if results[other] == 0 else -1
    for given in (results, strides):
        if given[one] and given[other]:
            if given[one] != given[other]:
                return -1 if given[one] < given[other] else 1
            if shape[one] > shape[other]:
                return 1
    return 0


def _joins(inner: Sequence[int], outer: Sequence[int]) -> bool:
    if inner[0] == 1 or outer[0] == 1:
        return True
    return all(after == inner[0] * before for before, after in zip(inner[1:], outer[1:], strict=True))


_SUM = _ReductionKernel(in_results_type=True)
_PRODUCT = _ReductionKernel(in_results_type=True, keeps_half=True)
_INDEXED = _ReductionKernel(accumulator=16, is_number=False)
_WELFORD = _ReductionKernel(accumulator=16, at_once=2, is_number=False)
_ITEM = _ReductionKernel(accumulator=0)
# (`and_kernel_cuda` in ``ReduceLogicKernel.cu``.)
_TRUTH = _ReductionKernel(accumulator=0)
# Since when blocks share whether a number is true, and not the numbers as they come. (2.10 to 2.13: the builds' own names.)
_TRUTH_FROM = (2, 12)
_COUNTS = set(overloads("count_nonzero count_nonzero.dim_IntList"))

KERNELS: dict[Any, _ReductionKernel] = {
    _aten.sum.default: _SUM,
    _aten.sum.dim_IntList: _SUM,
    _aten.sum.IntList_out: _SUM,
    _aten.nansum.default: _SUM,
    _aten.count_nonzero.default: _SUM,
    _aten.count_nonzero.dim_IntList: _SUM,
    _aten.mean.default: _SUM,
    _aten.mean.dim: _SUM,
    _aten.prod.default: _PRODUCT,
    _aten.prod.dim_int: _PRODUCT,
    _aten.linalg_vector_norm.default: _ReductionKernel(is_real=True),
    _aten.amax.default: _ITEM,
    _aten.amin.default: _ITEM,
    _aten.max.default: _ITEM,
    _aten.min.default: _ITEM,
    _aten.aminmax.default: _ReductionKernel(accumulator=0, results=2, is_number=False),
    _aten.any.default: _TRUTH,
    _aten.any.dim: _TRUTH,
    _aten.any.dims: _TRUTH,
    _aten.all.default: _TRUTH,
    _aten.all.dim: _TRUTH,
    _aten.all.dims: _TRUTH,
    _aten._is_any_true.default: _TRUTH,
    _aten._is_all_true.default: _TRUTH,
    _aten.max.dim: _INDEXED,
    _aten.min.dim: _INDEXED,
    _aten.argmax.default: _INDEXED,
    _aten.argmin.default: _INDEXED,
    _aten.var.correction: _WELFORD,
    _aten.std.correction: _WELFORD,
    _aten.var_mean.correction: _WELFORD,
    _aten.std_mean.correction: _WELFORD,
}
_BY_SIZE_FROM = (2, 4)
# The dimensions are an operator's second argument, but for these.
_DIM_PLACE = {_aten.linalg_vector_norm.default: 2}
_OF_ALL = {
    _aten.sum.default, _aten.mean.default, _aten.prod.default, _aten.max.default, _aten.min.default,
    _aten.any.default, _aten.all.default, _aten._is_any_true.default, _aten._is_all_true.default,
}  # fmt: skip
# What has a copy where the numbers don't lie plainly (``ReduceAllOps.cpp``; 2.1, 2.6, 2.11 and 2.13).
_OF_PLAIN = {_aten.max.default, _aten.min.default, _aten.aminmax.default}


# What has one where they can't be looked at as one row (`argmax_argmin_impl` in ``ReduceOps.cpp``, since 1.10).
_OF_ONE_ROW = {_aten.argmax.default, _aten.argmin.default}


@special(*KERNELS, table=BESIDE)
def _reduce(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> Kernels:
    source, first = args[0], out[0] if isinstance(out, tuple) else out
    if source.layout is not torch.strided or not source.numel():
        return Kernels((), ())
    kernel = KERNELS[func]
    item, copied = source.element_size(), 0
    given = kwargs.get("dtype") if func is _aten.linalg_vector_norm.default else None
    if func is _aten.linalg_vector_norm.default and _is_of_single_numbers(engine, args, kwargs, device):
        return Kernels(tuple(_sizes_of_numbers(args, given)), ())
    if kernel is _TRUTH and source.numel() == 1:
        # One number is converted, and no kernel of a reduction runs.
        return Kernels(() if source.dtype == torch.bool else (1,), ())
    half = source.dtype in HALF
    if func in _COUNTS:
        # What is added up are truth values.
        item, copied, half = 8, source.numel() * 8, False
    elif ((kernel.in_results_type and first.dtype != source.dtype) or given not in (None, source.dtype)) and not (
        half and first.dtype == torch.float32
    ):
        item, half = (given or first.dtype).itemsize, False
        copied = source.numel() * item
    accumulator = kernel.accumulator or (4 if half and kernel.accumulator is None else item)
    if kernel is _TRUTH and engine.memory.torch_version(device) >= _TRUTH_FROM:
        accumulator = 1
    if kernel.is_real and (given or source.dtype).is_complex:
        accumulator //= 2
    accumulator *= kernel.results
    if kernel is _WELFORD and source.dtype == torch.float64:
        accumulator *= 2
    strides = source.stride()
    if func in _OF_PLAIN and kwargs.get("dim") is None and not source.is_contiguous():
        copied, strides = source.numel() * item, in_one_piece(source.shape)
    dims = _dims(func, args, kwargs, source.dim())
    if func in _OF_ONE_ROW and len(dims) == source.dim() > 1 and not lies_in_one_row(source.shape, strides):
        copied, strides = source.numel() * item, in_one_piece(source.shape)
    processors = engine.memory.processors(device)
    each = _shared(source.shape, strides, dims, item, kernel.at_once, accumulator, processors)
    # Several kernels add to what cannot hold their sum, or no such pair of numbers (`AccumulationBuffer`).
    is_held = kernel.is_number and (kernel.keeps_half or not (half and first.dtype == source.dtype))
    sums = 0 if len(each) == 1 or is_held or first.element_size() >= accumulator else first.numel() * accumulator
    return Kernels(tuple(filter(None, (copied, sums))), tuple(filter(None, each)))


def _is_of_single_numbers(engine: Engine, args: Any, kwargs: Any, device: int) -> bool:
    """Whether each norm is one number's, which since 2.4 is its size (`linalg_vector_norm_out` in ``LinearAlgebra.cpp``)."""
    dims = _dims(_aten.linalg_vector_norm.default, args, kwargs, args[0].dim())
    is_single = all(args[0].shape[dim] == 1 for dim in dims if args[0].dim())
    return is_single and engine.memory.torch_version(device) >= _BY_SIZE_FROM


def _sizes_of_numbers(args: Any, given: torch.dtype | None) -> list[int]:
    """A copy in another type, and of complex numbers the sizes as such, unless all that is asked is whether they are zero."""
    dtype, order = given or args[0].dtype, args[1] if len(args) > 1 else 2
    size = args[0].numel() * dtype.itemsize
    return [size] * (dtype != args[0].dtype) + [size] * (dtype.is_complex and order != 0)


def shared_by_statistics(
    engine: Engine, shape: Sequence[int], strides: Sequence[int], dims: Collection[int], item: int, device: int
) -> list[int]:
    """Of one kernel for means and variances (`var_mean_out`), in bytes. item: bytes of an element."""
    processors = engine.memory.processors(device)
    each = _shared(shape, strides, frozenset(dims), item, _WELFORD.at_once, 4 * item, processors)
    return [size for kernel in each for size in kernel]


def shared_by_extremes(engine: Engine, count: int, item: int, device: int, at_once: int = 1) -> list[int]:
    """Of a highest or a lowest of that many numbers that lie side by side, in bytes; at_once: 2 where one kernel finds both."""
    processors = engine.memory.processors(device)
    each = _shared((count,), (1,), frozenset((0,)), item, _ITEM.at_once, item * at_once, processors)
    return [size for kernel in each for size in kernel]


@special(*_COUNTS)
def _counted(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """Which are not zero, and their sum (`count_nonzero_cuda` in ``TensorAdvancedIndexing.cpp``)."""
    with engine.scratch(device, 0 if args[0].dtype == torch.bool else args[0].numel()):
        return engine.run(func, args, kwargs, device)


@lru_cache(maxsize=1024)
def _shared(
    shape: Sequence[int],
    strides: Sequence[int],
    dims: frozenset[int],
    item: int,
    at_once: int,
    accumulator: int,
    processors: tuple[int, int],
) -> list[tuple[int, ...]]:
    """For each kernel of a reduction, what its blocks share (`split`); nothing where one block does all the work."""
    whole = _plan(shape, [stride * item for stride in strides], dims)
    return [split(plan, item, at_once, accumulator, *processors) or () for plan in _indexable(whole)]


def _dims(func: Any, args: Any, kwargs: Any, count: int) -> frozenset[int]:
    """The dimensions that are reduced: all where none are named."""
    place = _DIM_PLACE.get(func, 1)
    given = None if func in _OF_ALL else args[place] if len(args) > place else kwargs.get("dim")
    if given is None or (isinstance(given, (list, tuple)) and not given):
        return frozenset(range(count))
    return frozenset(dim % max(1, count) for dim in (given if isinstance(given, (list, tuple)) else (given,)))


def _indexable(plan: _Plan) -> list[_Plan]:
    """The parts that a kernel each can work on: those with more elements or bytes than 31 bits can count are halved."""
    extents = [(size - 1) * stride for size, stride in zip(plan.shape, plan.strides, strict=True)]
    if prod(plan.shape) <= _MOST_INDEXED and 1 + sum(extents) <= _MOST_INDEXED:
        return [plan]
    place = extents.index(max(extents))
    half = plan.shape[place] // 2
    parts = []
    for size in (half, plan.shape[place] - half):
        parts += _indexable(plan._replace(shape=(*plan.shape[:place], size, *plan.shape[place + 1 :])))
    return parts


@special(_aten.segment_reduce.default)
def _segments(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """Where each segment begins, as sums of the lengths, or the lengths between these (``SegmentReduce.cpp`` and ``.cu``).
    Single numbers are reduced by CUB, which asks for a byte."""
    data, lengths = args[0], kwargs.get("lengths")
    with pushed(engine.mode):
        plain = data.contiguous()
        if lengths is not None and not kwargs.get("unsafe", False):
            lengths.min()
            sums = lengths.sum(-1)
            fits = sums == data.shape[kwargs.get("axis", 0)]
            found = fits.all()
            del found, fits, sums
            engine.table.drain()
        plain_bounds = _plain_bounds(kwargs)
        out = engine.run(func, (plain, *args[1:]), kwargs, device)
        held = _bounds_of_segments(kwargs, plain_bounds)
    with engine.scratch(device, *([1] if data.dim() == 1 else [])):
        pass
    del held, plain_bounds, plain
    return out


@special(*overloads("_segment_reduce_backward"))
def _segments_gradient(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    with pushed(engine.mode):
        # The gradient, the result and the data.
        plain = [one.contiguous() for one in args[:3]]
        plain_bounds = _plain_bounds(kwargs)
        out = engine.run(func, (*plain, *args[3:]), kwargs, device)
        held = _bounds_of_segments(kwargs, plain_bounds)
    # C++ lets go of the last first.
    del held, plain_bounds
    while plain:
        plain.pop()
    return out


def _plain_bounds(kwargs: Any) -> Any:
    given = kwargs.get("lengths") if kwargs.get("offsets") is None else kwargs["offsets"]
    return None if given is None else given.contiguous()


def _bounds_of_segments(kwargs: Any, plain: Any) -> Any:
    if plain is None or kwargs.get("offsets") is not None:
        return None if plain is None else plain.diff()
    bounds = torch.cat([plain.new_zeros((*plain.shape[:-1], 1)), plain], -1)
    return bounds.cumsum_(-1)
