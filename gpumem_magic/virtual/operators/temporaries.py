"""Memory that CUDA's kernels take only while they run, and that no other module here counts: embeddings' gradients, powers.

The dense gradient of an embedding, or of an embedding bag (``Embedding.cu``, ``EmbeddingBag.cu`` and
``EmbeddingBackwardKernel.cu`` in ATen/native/cuda; read from 1.13 to 2.13). Up to 3072 indices of an embedding are added up in
place. More, and a bag's in any case, are sorted first, with a list of where they stood. Each run of one index is then added up in
parts of ten: lists of runs and of parts, which are as long as they can become, and a row of the accumulation type (float32 for
half precision) for each part. From 2.11 on, an embedding with few rows adds up into the gradient itself, or into one of float32.
What CUB takes to find the runs, to count their parts and how often each index comes (``scale_grad_by_freq``) is in `cub`.
Since 2.12 only the bits that a row's number has are sorted. A bag of maxima needs none of this.

Where cuDNN samples by a grid, it gets grids that lie plainly, and no image or gradient that is one number expanded
(``cudnn/GridSampler.cpp``; `cond_cudnn_grid_sampler` in ``GridSampler.cpp``).

Sizes and angles of complex numbers are made complex, and their real parts are copied (`unary_op_impl_with_complex_to_float_out`
in ``UnaryOps.cpp``; an H100 with 2.11): a size beside its result, an angle before.

A number to the power of a tensor comes to the device in a tensor of its own (``Pow.cpp`` in ATen/native).

A condition of bytes is made one of flags (`where_self_out` in ``TensorCompare.cpp``), a copy beside the result.

A product with weights in eight bits is worked out in float32 (``int8mm.cu``; an H100 with 2.11): rows, factors and result.

What other kernels that sort take is in `sorting`, copies into another layout are in `copies`, convolutions in `convolutions`.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine.calls import bytes_of, copies_of
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.half_precision import HALF, accumulator
from gpumem_magic.virtual.engine.modes import pushed
from gpumem_magic.virtual.engine.rules import BESIDE, special
from gpumem_magic.virtual.operators import growing
from gpumem_magic.virtual.operators.cub import cub_of

# The most indices of an embedding that the kernel without a sort is used for.
MOST_UNSORTED = 3072
_COUNTER_BYTES = 8
_INDICES_OF_A_PART = 10
# Adding up without rows for the parts: since when, threads of a warp and of a block, blocks of a multiprocessor that are few.
_FUSED_FROM = (2, 11)
_FEWER_BITS_FROM = (2, 13)
# Since when `max_norm` sees all indices as one list.
_ONE_LIST_FROM = (2, 13)
_WARP, _MOST_THREADS, _FEW_BLOCKS = 32, 1024, 4
_MEAN, _MAX = 1, 2


def _adds_in_place(engine: Engine, device: int, width: int, runs: int, parts: int) -> bool:
    """Whether so few blocks would add up the runs that the parts are added to the gradient at once."""
    if engine.memory.torch_version(device) < _FUSED_FROM or torch.are_deterministic_algorithms_enabled():
        return False
    threads = -(-width // _WARP) * _WARP
    blocks = -(-runs * threads // max(1, min(threads, _MOST_THREADS)))
    return blocks < engine.memory.processors(device)[0] * _FEW_BLOCKS and parts > blocks * 4


def _by_sorting(
    engine: Engine, func: Any, args: Any, kwargs: Any, device: int, rows: int, by_frequency: bool, bags: bool
) -> Any:
    """The gradient for so many rows of an embedding, after the indices are sorted."""
    gradient, indices = args[:2]
    count, item = indices.numel(), indices.element_size()
    listed = count * item
    width = int(gradient.shape[-1]) if gradient.dim() else 1
    runs = min(count, rows)
    parts = count // _INDICES_OF_A_PART + runs
    if not bags and _adds_in_place(engine, device, width, runs, parts):
        sums = [parts * item] + ([rows * width * 4] if gradient.dtype in HALF else [])
    else:
        sums = [parts * width * accumulator(gradient.dtype).itemsize]
    cub, is_newest = cub_of(engine, device), engine.memory.torch_version(device) >= _FEWER_BITS_FROM
    with engine.scratch(device, listed, listed):
        bits = rows.bit_length() if is_newest else None
        with engine.scratch(device, listed):
            growing.fill(engine, device, item)
            with engine.scratch(device, cub.radix_sort(count, item, item, bits)):
                pass
        with engine.scratch(device, listed if by_frequency else 0):
            # How often each index occurs: the places in each run, and then the last one's for all of it.
            for _ in range(2 if by_frequency else 0):
                with engine.scratch(device, cub.scan_by_key(count, item)):
                    pass
            out = engine.run(func, args, kwargs, device)
            with engine.scratch(device, listed, _COUNTER_BYTES):
                with engine.scratch(device, listed, cub.first_of_each(count, item, item if is_newest else 4)):
                    pass
                with engine.scratch(device, runs * item, runs * item):
                    with engine.scratch(device, cub.scan(runs, item)):
                        pass
                    with engine.scratch(device, _COUNTER_BYTES, parts * item, *sums):
                        return out


@special(_aten.embedding_dense_backward.default)
def _embedding_backward(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    gradient, indices, rows, *rest = args
    by_frequency = bool(rest[1]) if len(rest) > 1 else bool(kwargs.get("scale_grad_by_freq", False))
    with engine.scratch(device, *copies_of(indices, gradient)):
        if indices.numel() <= MOST_UNSORTED and not by_frequency:
            return engine.run(func, args, kwargs, device)
        return _by_sorting(engine, func, args, kwargs, device, rows, by_frequency, bags=False)


@special(_aten.embedding_renorm_.default)
def _shortened(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """`max_norm`: the indices in order, and each of them once. All are one list with a newer PyTorch, and sorted from a copy."""
    indices = args[1]
    copied = None
    with pushed(engine.mode):
        if engine.memory.torch_version(device) >= _ONE_LIST_FROM:
            indices = indices.reshape(-1)
            copied = indices.clone()
        in_order, places = indices.sort()
        in_order = in_order.contiguous()
    del places
    engine.table.drain()
    count, item = in_order.numel(), in_order.element_size()
    with engine.scratch(device, count * item, _COUNTER_BYTES, cub_of(engine, device).differing(count, item)):
        out = engine.run(func, args, kwargs, device)
    del in_order
    del copied
    return out


@special(_aten._embedding_bag.default, _aten._embedding_bag_forward_only.default)
def _bag(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """The bags' sizes first, then which bag each index is in, then the result."""
    args = _of_one_type(engine, args)
    out = engine.fake_call(func, args, kwargs)
    engine.settle((out[2], out[1], out[0], out[3]))
    return out


def _of_one_type(engine: Engine, args: Any) -> Any:
    """With indices and offsets that are of one type (`promoteIndicesAndOffsets` in ``EmbeddingBag.cpp``)."""
    first, indices, offsets, *rest = args
    if indices.dtype == offsets.dtype:
        return args
    with pushed(engine.mode):
        return (first, indices.long(), offsets.long(), *rest)


@special(_aten._embedding_bag_dense_backward.default)
def _bag_backward(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """Of an embedding bag."""
    gradient, indices, _, _, _, rows, by_frequency, mode, *_ = args
    with engine.scratch(device, *copies_of(gradient)):
        if mode == _MAX or not indices.numel():
            return engine.run(func, args, kwargs, device)
        with engine.scratch(device, *copies_of(indices)):
            return _by_sorting(engine, func, args, kwargs, device, rows, by_frequency, bags=True)


@special(_aten._embedding_bag_backward.default)
def _bag_by_parts(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """One function for host and CUDA (``EmbeddingBag.cpp``), which calls the kernel of the dense gradient."""
    args = _of_one_type(engine, args)
    gradient, indices, _, bags, sizes, highest, rows, by_frequency, mode, sparse, *rest = args
    if sparse:
        out = engine.run(func, args, kwargs, device)
        if mode == _MEAN:
            # One over each bag's size, and that of each index's bag (`apply_bag_size_backward`).
            of_bags = sizes.numel() * gradient.element_size()
            with ExitStack() as last, engine.scratch(device, of_bags, of_bags):
                last.enter_context(engine.scratch(device, indices.numel() * gradient.element_size()))
        return out
    with pushed(engine.mode):
        dense = _aten._embedding_bag_dense_backward.default
        return dense(gradient, indices, bags, sizes, highest, rows, by_frequency, mode, *rest, **kwargs)


@special(_aten.pow.Scalar, table=BESIDE)
def _power(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    return [] if args[0] == 1 else [16 if isinstance(args[0], complex) else 8]


def _is_of_flags(engine: Engine, args: Any, kwargs: Any) -> bool:
    return args[0].dtype is torch.bool


@special(_aten.where.self, plain=_is_of_flags, by_looks=True)
def _where(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    if args[0].dtype is not torch.uint8:
        return engine.run(func, args, kwargs, device)  # which refuses it
    with pushed(engine.mode):
        flags = args[0].bool()
    return engine.run(func, (flags, *args[1:]), kwargs, device)


@special(_aten._weight_int8pack_mm.default)
def _product_in_eight_bits(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    rows, weight, factors = args
    wide = torch.float32
    with engine.scratch(device, *(one.numel() * wide.itemsize for one in (rows, factors) if one.dtype != wide)):
        if rows.dtype == wide:
            return engine.run(func, args, kwargs, device)
        with engine.scratch(device, rows.shape[0] * weight.shape[0] * wide.itemsize):
            return engine.run(func, args, kwargs, device)


_BILINEAR = _ZEROS = 0
_MOST_CHANNELS = 1024


def _samples_by_cudnn(input: Any, grid: Any, interpolation: int, padding: int, align_corners: bool) -> bool:
    if not torch.backends.cudnn.enabled or (interpolation, padding) != (_BILINEAR, _ZEROS) or not align_corners:
        return False
    return bool(input.numel() and grid.numel() and input.shape[1] <= _MOST_CHANNELS and input.dtype != torch.bfloat16)


def _for_cudnn(grid: Any, *others: Any) -> list[int]:
    expanded = [one for one in others if 0 in one.stride()]
    return [*map(bytes_of, expanded), *copies_of(grid)]


@special(_aten.grid_sampler_2d.default, table=BESIDE)
def _sampled(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    return _for_cudnn(args[1], args[0]) if _samples_by_cudnn(*args[:5]) else []


@special(_aten.grid_sampler_2d_backward.default)
def _sampled_backward(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    gradient, input, grid = args[:3]
    copies = _for_cudnn(grid, input, gradient) if _samples_by_cudnn(*args[1:6]) else []
    with engine.scratch(device, *copies):
        return engine.run(func, args, kwargs, device)


def _is_real(engine: Engine, args: Any, kwargs: Any) -> bool:
    return not args[0].is_complex()


@special(_aten.abs.default, _aten.abs.out, _aten.angle.out, table=BESIDE, plain=_is_real, by_looks=True)
def _size_of_complex(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    return [] if _is_real(engine, args, kwargs) or out.is_complex() else [args[0].numel() * args[0].element_size()]


@special(_aten.angle.default, plain=_is_real, by_looks=True)
def _angle(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    with engine.scratch(device, args[0].numel() * args[0].element_size() if args[0].is_complex() else 0):
        return engine.run(func, args, kwargs, device)
