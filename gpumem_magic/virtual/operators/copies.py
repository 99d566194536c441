"""Kernels that copy what they are given before they start, and those that draw or add up in memory of their own.

After ATen/native/cuda: ``SoftMax.cu``, ``layer_norm_kernel.cu``, ``DilatedMaxPool2d.cu``, ``AveragePool2d.cu`` and their like,
``Im2Col.cu``, ``Col2Im.cu``, ``ReflectionPad.cu``, ``ReplicationPadding.cu``,
``UpSampleNearest2d.cu``, ``UpSampleNearest3d.cu``, ``ScanKernels.cpp``, ``Sorting.cpp`` and ``TensorModeKernel.cpp`` want plain
layouts, ``Embedding.cpp`` one list of indices, ``TensorCompare.cpp`` numbers of its bounds' type; ``Copy.cu`` takes plain tensors
between host and device; ``Blas.cpp`` one dimension of each matrix whose elements lie side by side;
``Distributions.cpp`` and ``MultinomialKernel.cu`` draw into tensors of the weights' size; ``ForeachReduceOp.cu`` adds up each
tensor in pieces of 65536 elements; ``IndexKernel.cu`` counts the places of a `masked_scatter` in eight bytes for each element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, prod, sqrt
from typing import Any

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine.alike import Kernels
from gpumem_magic.virtual.engine.calls import bytes_of, copies_of
from gpumem_magic.virtual.engine.engine import BESIDE, Engine, special
from gpumem_magic.virtual.engine.half_precision import HALF, accumulator
from gpumem_magic.virtual.engine.modes import pushed
from gpumem_magic.virtual.engine.strides import lies_in_one_row, like_channels_last
from gpumem_magic.virtual.operators import growing
from gpumem_magic.virtual.operators.cub import cub_of
from gpumem_magic.virtual.operators.positions import blocks_in_turn
from gpumem_magic.virtual.operators.sorting import hold_for_selection, is_dense
from gpumem_magic.virtual.operators.written_gradients import IN_PLACE, writes_into_zeros

# Which arguments are copied unless they are contiguous, before the results are there.
_LAID_OUT: dict[Any, tuple[int, ...]] = {
    _aten.native_layer_norm.default: (0,),
    _aten.native_group_norm.default: (0,),
    _aten.native_group_norm_backward.default: (0, 1),
    _aten.max_unpool2d.default: (0, 1),
    _aten.max_unpool3d.default: (0, 1),
    _aten.kthvalue.default: (0,),
    _aten.median.dim: (0,),
    _aten.nanmedian.dim: (0,),
    _aten._adaptive_avg_pool3d.default: (0,),
    _aten.fractional_max_pool2d_backward.default: (0,),
}
_PRODUCTS: dict[Any, tuple[int, int]] = {
    _aten.mm.default: (0, 1),
    _aten.bmm.default: (0, 1),
    _aten.addmm.default: (1, 2),
    _aten.baddbmm.default: (1, 2),
}
# Products of a matrix, at this place, and a vector after it.
_WITH_VECTORS: dict[Any, int] = {
    **dict.fromkeys(overloads("mv mv.out"), 0),
    **dict.fromkeys(overloads("addmv addmv_ addmv.out"), 1),
}
# The same, once they are there.
_LAID_OUT_AFTER: dict[Any, tuple[int, ...]] = {
    **dict.fromkeys(
        (
            *overloads(
                "reflection_pad1d reflection_pad2d reflection_pad3d reflection_pad1d_backward reflection_pad2d_backward"
            ),
            *overloads(
                "cummax cummin _softmax _log_softmax upsample_nearest1d_backward _upsample_nearest_exact1d_backward"
            ),
            *overloads("avg_pool3d avg_pool3d_backward adaptive_max_pool3d adaptive_max_pool3d_backward"),
            *overloads(
                "_adaptive_avg_pool3d_backward upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d_backward"
            ),
            *overloads("upsample_bicubic2d_backward _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward"),
            *overloads("upsample_nearest3d_backward _upsample_nearest_exact3d_backward"),
        ),
        (0,),
    ),
    _aten.nll_loss_forward.default: (0, 1),
    _aten.nll_loss_backward.default: (2, 1, 0),
    _aten._log_softmax_backward_data.default: (0, 1),
}
# The same, after results and gradients that do not lie in one piece.
_PLAIN_ALL_ROUND = overloads("adaptive_max_pool2d adaptive_max_pool2d_backward")
# The same, but in the order of the channels that another argument has, or this one itself.
_LAID_OUT_LIKE: dict[Any, int] = {
    **dict.fromkeys(overloads("max_pool2d_with_indices avg_pool2d upsample_bilinear2d_backward"), 0),
    **dict.fromkeys(overloads("max_pool2d_with_indices_backward avg_pool2d_backward _adaptive_avg_pool2d_backward"), 1),
}
# Those that copy that one, too (``DilatedMaxPool2d.cu``, ``AveragePool2d.cu``).
_WITH_WHAT_WAS_POOLED = overloads("max_pool2d_with_indices_backward avg_pool2d_backward")
_NEAREST = overloads(
    "upsample_nearest2d upsample_nearest2d_backward _upsample_nearest_exact2d _upsample_nearest_exact2d_backward "
    "upsample_nearest3d _upsample_nearest_exact3d"
)
_SMOOTHED = overloads("_upsample_bilinear2d_aa _upsample_bicubic2d_aa")
_VOLUMES: dict[Any, int] = {
    **dict.fromkeys(overloads("max_pool3d_with_indices"), 0),
    **dict.fromkeys(overloads("max_pool3d_with_indices_backward"), 1),
}
# Since when the largest values of volumes are found with the channels last (PyTorch's pull request 80748).
_LARGEST_OF_VOLUMES_FROM = (1, 13)
# The fewest channels for which a kernel of channels-last tensors enlarges them.
_CHANNELS = 4
_PIECE = 65536
# Threads of a block that copies pieces of several tensors, and the bytes of it.
_THREADS = 128
_BLOCK = 16 * _THREADS
# `multinomial`: since when the device checks the weights, and looks for the lowest and the highest together.
_CHECKED_ON_DEVICE_FROM, _ENDS_AT_ONCE_FROM = (2, 5), (2, 12)


def _lies_plainly(places: Sequence[int]) -> Callable[..., bool]:
    """Whether none of these arguments is copied."""
    return lambda engine, args, kwargs: all(args[place].is_contiguous() for place in places)


def _laid_out(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    return laid_out(engine, func, args, kwargs, device, _LAID_OUT[func])


for _func, _arguments in _LAID_OUT.items():
    special(_func, plain=_lies_plainly(_arguments), by_looks=True)(_laid_out)


def laid_out(engine: Engine, func: Any, args: Any, kwargs: Any, device: int, places: Sequence[int]) -> Any:
    """Runs an operator beside copies of those arguments (their `places`) that are not contiguous."""
    sizes = copies_of(*(args[place] for place in places))
    if not sizes:
        return engine.run(func, args, kwargs, device)
    with engine.scratch(device, *sizes):
        return engine.run(func, args, kwargs, device)


@special(_aten.roll.default)
def _rolled(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """One dimension after the other (``TensorTransformations.h``), each from a plain tensor."""
    source, shifts = args[:2]
    dims = args[2] if len(args) > 2 else kwargs.get("dims", ())
    if len(shifts) < 2 or len(shifts) != len(dims):
        return laid_out(engine, func, args, kwargs, device, (0,))
    with pushed(engine.mode):
        for shift, dim in zip(shifts, dims, strict=True):
            source = func(source, [shift], [dim])
        return source


@special(_aten.nll_loss2d_forward.default)
def _loss_of_images(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """The sum of weights first; what is not reduced reads its arguments as they lie (``NLLLoss2d.cu``)."""
    out = engine.fake_call(func, args, kwargs)
    engine.settle(out[::-1])
    with engine.scratch(device, *(copies_of(*args[:2]) if args[3] else ())):
        return out


@special(_aten.nll_loss2d_backward.default, table=BESIDE)
def _of_a_loss_of_images(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    return copies_of(*args[2:3]) if args[4] else []


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


@special(_aten.unfold_backward.default, table=BESIDE)
def _of_windows(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    """The numbers of those places of a dimension that lie in a window, unless each lies in one only (``UnfoldBackward.h``)."""
    gradient, sizes, dim, size, step = args
    if not out.dim() or step >= size:
        return []
    return [min(sizes[dim], (gradient.shape[dim] - 1) * step + size) * 8]


@special(_aten._cdist_forward.default)
def _distances(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """Between points that are laid out, each batch for itself (`cdist_impl` in ``Distance.cpp``)."""
    with engine.scratch(device, *_laid_out_batches(args[0], args[1])):
        return engine.run(func, args, kwargs, device)


def _laid_out_batches(first: Any, second: Any) -> list[int]:
    if not all(one.layout is torch.strided and one.dim() > 1 for one in (first, second)):
        return []
    try:
        batch = torch.broadcast_shapes(first.shape[:-2], second.shape[:-2])
    except RuntimeError:
        return []
    return copies_of(*(one.expand(*batch, *one.shape[-2:]) for one in (first, second)))


@special(_aten._cdist_backward.default)
def _of_distances(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """What each distance gives to each coordinate (``DistanceKernel.cu``); those that only count differences give nothing."""
    gradient, first, second, power, distances = args
    with engine.scratch(device, *_laid_out_batches(first, second), *copies_of(distances, gradient)):
        out = engine.run(func, args, kwargs, device)
        of_each = gradient.numel() * first.shape[-1] * first.element_size() if power and first.numel() else 0
        with engine.scratch(device, of_each):
            return out


@special(_aten._pdist_backward.default, table=BESIDE)
def _of_distances_in_pairs(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    gradient, first, power = args[:3]
    return [(first.shape[0] - 1) * bytes_of(first)] if power and gradient.numel() and first.numel() else []


@special(*overloads("rrelu_with_noise rrelu_with_noise_"), table=BESIDE)
def _leaky_by_chance(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    """In training, plain copies of input, noise and result (``RreluWithNoise.cu``)."""
    training = args[4] if len(args) > 4 else kwargs.get("training", False)
    return copies_of(args[0], args[1], out) if training and out.numel() else []


@special(_aten.index_reduce.default, _aten.index_reduce_.default, table=BESIDE)
def _reduced_by_index(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> tuple[int, ...]:
    """A mean: how many values come to each place, by adding ones, and where none does (``Indexing.cu``)."""
    if args[4] == "mean":
        with engine.scratch(device, bytes_of(out)):
            for size in (bytes_of(args[3]), out.numel()):
                with engine.scratch(device, size):
                    pass
    return ()


# As `torch.nn.functional` numbers its reductions.
_MEAN = 1


@special(_aten.multilabel_margin_loss_forward.default)
def _margins_of_labels(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """Which are targets, each sample's share, and then the result (``MultiLabelMarginCriterion.cu``)."""
    # (Of one sample a number comes back, also where nothing is summed up.)
    reduction = args[2] if args[0].dim() > 1 else _MEAN
    out = engine.fake_call(func, (*args[:2], reduction), kwargs)
    is_summed = args[0].dim() == 2 and not out[0].dim()
    with engine.scratch(device, *copies_of(*args[:2])):
        engine.settle(out[1])
        with engine.scratch(device, args[0].shape[0] * out[0].element_size() if is_summed else 0):
            engine.settle(out[0])
    return out


@special(*_PRODUCTS, table=BESIDE)
def _product(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int] | Kernels:
    """Plain copies, and of complex numbers those that are conjugated, where a product takes them as they lie: cuBLAS conjugates
    what it transposes. The second first (`cublasCommonArgs` and `prepare_batch_matrix_for_cublas` in ``Blas.cpp``). It is not
    asked for a result without elements."""
    if not out.numel():
        return Kernels((), ())
    in_rows = out.stride(-1) == 1 and (out.dim() == 2 or out.stride(-2) != 1)
    matrices = (
        [args[place] for place in reversed(_PRODUCTS[func])] if in_rows else [args[place] for place in _PRODUCTS[func]]
    )
    copied = [
        bytes_of(one)
        for one in matrices
        if not _lies_right(one) or (one.is_conj() and not _is_transposed(one, in_rows))
    ]
    # (Nothing is copied of any that look so. What is, is there while the library takes its workspace.)
    return copied or Kernels((), ())


@special(*_WITH_VECTORS, table=BESIDE)
def _product_with_a_vector(
    engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int
) -> list[int] | Kernels:
    """A vector that is one number again and again is written out, then a matrix that cuBLAS cannot read as it lies
    (`addmv_out_cuda` in ``Blas.cpp``, from 2.1 to 2.13)."""
    matrix, vector = args[_WITH_VECTORS[func] :][:2]
    if matrix.layout is not torch.strided or not matrix.numel():
        return Kernels((), ())
    copied = copies_of(*(() if vector.stride(0) else (vector,)))
    if not fits_blas(matrix.shape, matrix.stride()):
        copied += copies_of(matrix)
    return copied or Kernels((), ())


@special(*_LAID_OUT_AFTER, table=BESIDE)
def _laid_out_after(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    if func is _aten.reflection_pad2d.default:
        # (Of one and of three dimensions the result is made in its size.)
        growing.fill(engine, device, out.element_size())
    return copies_of(*(args[place] for place in _LAID_OUT_AFTER[func]))


@special(*_PLAIN_ALL_ROUND, table=BESIDE)
def _plain_all_round(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    """``AdaptiveMaxPooling2d.cu`` works on plain tensors alone, and copies its results back."""
    results = out if isinstance(out, (tuple, list)) else (out,)
    if len(results) > 1:
        return copies_of(*results, args[0])
    gradient, _, places = args
    return copies_of(gradient, places, *results)


# Since when the gradient of softmax is there before the product; 1.9 has it the other way round.
_GRADIENT_FIRST_FROM = (1, 10)


def _has_gradient_first(engine: Engine, args: Any, kwargs: Any) -> bool:
    return engine.memory.torch_version(args[0].get_device()) >= _GRADIENT_FIRST_FROM


@special(_aten._softmax_backward_data.default, table=BESIDE)
def _softmax_backward(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    """The gradient times the result, and plain copies of that and of the result (``SoftMax.cu``)."""
    gradient, result = args[:2]
    size = result.numel() * max(gradient.element_size(), result.element_size())
    if gradient.is_contiguous() and result.is_contiguous():
        return [size]
    product = engine.fake_call(_aten.mul.Tensor, (gradient, result), {})
    copied = bytes_of(result) if not result.is_contiguous() else 0
    return [size, 0 if product.is_contiguous() else size, copied]


@special(_aten._softmax_backward_data.default, plain=_has_gradient_first)
def _softmax_backward_in_order(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    if _has_gradient_first(engine, args, kwargs):
        return engine.run(func, args, kwargs, device)
    size, *copied = _softmax_backward(engine, func, args, kwargs, None, device)
    with engine.scratch(device, size, *copied[:1]):
        out = engine.fake_call(func, args, kwargs)
        engine.settle(out)
        with engine.scratch(device, *copied[1:]):
            return out


@special(*_LAID_OUT_LIKE, table=BESIDE)
def _laid_out_like(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    source, like = args[0], args[_LAID_OUT_LIKE[func]]
    is_last = like.dim() == 4 and like_channels_last(like.shape, like.stride())
    if is_last and func is _aten._adaptive_avg_pool2d_backward.default:
        return []
    layout = torch.channels_last if is_last else torch.contiguous_format
    asked = [like, source] if func in _WITH_WHAT_WAS_POOLED else [source]
    return [bytes_of(one) for one in asked if not one.is_contiguous(memory_format=layout)]


@special(*_VOLUMES, table=BESIDE)
def _largest_of_volumes(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    """In the order of the channels that the volume has (``DilatedMaxPool3d.cu``)."""
    source, like = args[0], args[_VOLUMES[func]]
    last = torch.channels_last_3d
    is_last = like.dim() == 5 and not like.is_contiguous() and like.is_contiguous(memory_format=last)
    if is_last and engine.memory.torch_version(device) >= _LARGEST_OF_VOLUMES_FROM:
        return [] if source.is_contiguous(memory_format=last) else [bytes_of(source)]
    return copies_of(source)


@special(_aten._adaptive_avg_pool2d.default)
def _averaged(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    source = args[0]
    is_last = source.dim() == 4 and like_channels_last(source.shape, source.stride())
    out = laid_out(engine, func, args, kwargs, device, () if is_last else (0,))
    growing.fill(engine, device, out.element_size())
    return out


@special(*_SMOOTHED, table=BESIDE)
def _smoothed(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    return copies_of(out, args[0])


@special(_aten.upsample_trilinear3d_backward.default, table=BESIDE)
def _smoothed_volume(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    """A plain gradient that comes, and a plain one that goes (``UpSampleTrilinear3d.cu``; an H100 with 2.11)."""
    return copies_of(args[0], out)


@special(_aten.im2col.default, _aten.col2im.default)
def _columns(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """The result is made as large as the argument, and keeps that memory unless it has to be larger."""
    source = args[0]
    shape = engine.fake_call(func, args, kwargs).shape
    copied = copies_of(source)
    if prod(shape) > source.numel():
        with engine.scratch(device, bytes_of(source), *copied, first_out=True):
            out = engine.run(func, args, kwargs, device)
        growing.fill(engine, device, out.element_size())
        return out
    out = torch.empty(source.shape, dtype=source.dtype, device=torch.device("cuda", device))
    with engine.scratch(device, *copied):
        return out.resize_(shape)


@special(_aten.multi_margin_loss.default, table=BESIDE)
def _margins(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    """Plain copies, and each sample's share, before they are added up (``MultiMarginLoss.cu``)."""
    weights = args[4] if len(args) > 4 else kwargs.get("weight")
    growing.fill(engine, device, out.element_size())
    copied = copies_of(*args[:2], *([] if weights is None else [weights]))
    return [*copied, *([args[0].shape[0] * out.element_size()] if not out.dim() and args[0].dim() == 2 else [])]


@special(*_NEAREST, table=BESIDE)
def _nearest(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    """A plain result, and a plain argument; where channels lie last in two dimensions, an argument of that layout."""
    source = args[0]
    if out.dim() == 4:
        if out.shape == source.shape:
            return []
        last = torch.channels_last
        if out.shape[1] >= _CHANNELS and not out.is_contiguous() and out.is_contiguous(memory_format=last):
            return [] if source.is_contiguous(memory_format=last) else [bytes_of(source)]
    return copies_of(out, source)


def _is_plain_list(engine: Engine, args: Any, kwargs: Any) -> bool:
    return bool(args[1].is_contiguous())


@special(_aten.embedding.default, plain=_is_plain_list, by_looks=True)
def _embedding(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """Rows by one list of indices, which is a copy where they do not lie as one."""
    with engine.scratch(device, 0 if lies_in_one_row(args[1].shape, args[1].stride()) else bytes_of(args[1])):
        return engine.run(func, args, kwargs, device)


@special(
    *overloads("embedding index_select where.self arange arange.start arange.start_step range range.step eye eye.m"),
    table=BESIDE,
)
def _grown(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    """Their result grows from nothing."""
    return [out.element_size()] if out.numel() and growing.fills(engine, device) else []


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
    return [bytes_of(out)] * copied + _of_one_row(engine, device, func, args, kwargs, out)


@special(_aten._cummax_helper.default, _aten._cummin_helper.default)
def _extremes_so_far(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> None:
    """What `cummax` and `cummin` have for ``out=``: results side by side (`cummax_helper_cuda` in ``ScanKernels.cpp``).

    (It has no shape rule, and returns nothing.)"""
    with engine.scratch(device, *copies_of(*args[1:3])):
        pass


def _is_floating(engine: Engine, args: Any, kwargs: Any) -> bool:
    return bool(args[0].is_floating_point())


@special(*overloads("clamp clamp_min clamp_max"), plain=_is_floating, by_looks=True)
def _clamp(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """Integers between floating numbers are made floating first."""
    bounds = (*args[1:], *kwargs.values())
    if args[0].is_floating_point() or not any(isinstance(bound, float) for bound in bounds):
        return engine.run(func, args, kwargs, device)
    with engine.scratch(device, args[0].numel() * torch.get_default_dtype().itemsize):
        return engine.run(func, args, kwargs, device)


@special(_aten.logcumsumexp.default, table=BESIDE)
def _scan_of_logarithms(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    source = args[0]
    if not source.dim() or not source.numel():
        return []
    copied = [] if source.is_contiguous() else [bytes_of(source)]
    return copied + _of_one_row(engine, device, func, args, kwargs, out)


@special(_aten._logcumsumexp.out)
def _scan_of_logarithms_into(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """(It has no shape rule.)"""
    out = kwargs["out"].resize_(args[0].shape)
    with engine.scratch(device, *_scan_of_logarithms(engine, func, args, kwargs, out, device)):
        return out


_SUMS = frozenset(overloads("cumsum cumsum_ cumsum.out"))
_IN_ORDER_FROM = (2, 6)


def _of_one_row(engine: Engine, device: int, func: Any, args: Any, kwargs: Any, out: Any) -> list[int]:
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


def staged_bytes(on_device: Any, on_host: Any, non_blocking: bool = False) -> int:
    """What a copy between host and device takes on the device beside its result (``Copy.cu``): a plain copy where the two do not
    lie densely in one order, and one in the source's type where a copy that is not waited for converts on the device."""
    if on_device.layout is not torch.strided or not on_device.numel():
        return 0
    if non_blocking and on_device.dtype != on_host.dtype:
        return int(on_device.numel() * on_host.element_size())
    alike = on_device.stride() == on_host.stride() and on_device.shape == on_host.shape and is_dense(on_device)
    return 0 if on_device.is_contiguous() or (alike and on_device.dtype == on_host.dtype) else bytes_of(on_device)


def fits_blas(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether cuBLAS can read the matrices of a tensor as they lie: their rows, or their columns, without gaps inside."""
    rows, columns = shape[-2], shape[-1]
    down, along = stride[-2], stride[-1]
    return (along == 1 and down >= max(1, columns)) or (down == 1 and along >= max(1, rows))


def _lies_right(matrices: Any) -> bool:
    """A single matrix that is dense does whatever the strides of its sides of one are (`prepare_matrix_for_cublas`)."""
    if matrices.layout is not torch.strided or (matrices.dim() == 2 and is_dense(matrices)):
        return True
    return fits_blas(matrices.shape, matrices.stride())


def _is_transposed(matrices: Any, in_rows: bool) -> bool:
    """As cuBLAS is told of them, for a result that lies so."""
    if matrices.dim() == 2 and is_dense(matrices):
        return bool(in_rows != matrices.is_contiguous())
    side = -1 if in_rows else -2
    return not (matrices.stride(side) == 1 and matrices.stride(-3 - side) >= max(1, matrices.shape[side]))


@special(_aten.masked_scatter.default, _aten.masked_scatter_.default)
def _masked_scatter(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """Which value goes where is counted for every element of the target, chosen or not."""
    _, mask, source = args
    if func in IN_PLACE and writes_into_zeros(func, args[0]):
        func = IN_PLACE[func]
    out = engine.run(func, args, kwargs, device)
    # (A target that is smaller than the mask is repeated first.)
    count = out.numel()
    mask_is_plain = mask.shape == out.shape and mask.is_contiguous()
    copied = 0 if source.is_contiguous() else bytes_of(source)
    scan = cub_of(engine, device).scan(count, 8) if count else 0
    with engine.scratch(device, count * 8, 0 if mask_is_plain else count):
        with engine.scratch(device, scan):
            pass
        with engine.scratch(device, copied):
            return out


@special(_aten.multinomial.default, _aten.multinomial.out)
def _multinomial(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    weights, count, *rest = args
    again = rest[0] if rest else kwargs.get("replacement", False)
    out = engine.run(func, args, kwargs, device)
    if not out.numel():
        return out
    if again and count > 1:
        # The weights, in shares, and their sums from the first on.
        scan = _of_one_row(engine, device, _aten.cumsum.default, (weights, -1), {}, weights)
        with engine.scratch(device, *[bytes_of(weights)] * 3, *scan):
            return out
    with pushed(engine.mode):
        checks = _checks(engine.memory.torch_version(device), weights)
    engine.table.drain()
    # Exponential draws for each weight, and the highest quotients where there are several.
    with engine.scratch(device, bytes_of(weights), out.numel() * weights.element_size() if count > 1 else 0):
        if count > 1:
            hold_for_selection(engine, device, weights, -1)
    del checks
    return out


def _checks(version: tuple[int, int], weights: Any) -> Any:
    """That all weights are finite, none is negative, and each row has one (``Distributions.cpp``): what is held to the end.

    Up to 2.4 the host read both answers; since 2.5 the device looks at them itself.
    """
    is_at_once = version >= _ENDS_AT_ONCE_FROM
    lowest, highest = weights.aminmax() if is_at_once else (None, weights.max())
    finite = highest < float("inf")
    lowest = weights.min() if lowest is None else lowest
    positive = lowest >= 0
    valid = finite & positive
    del positive
    if not is_at_once:
        del lowest, finite, highest
        lowest = highest = None
    finite = None
    if version < _CHECKED_ON_DEVICE_FROM:
        valid = None
    sums = weights.sum() if weights.dim() == 1 else weights.sum(1)
    is_none = sums == 0
    empty = is_none.any() if weights.dim() > 1 else is_none
    del is_none, sums
    if version < _CHECKED_ON_DEVICE_FROM:
        return None
    empty.logical_not()
    return highest, lowest, valid, empty


@special(*overloads("bernoulli bernoulli_.Tensor"), table=BESIDE)
def _drawn_by(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    """Chances of half precision are made float32 (``DistributionTemplates.h``)."""
    chances = args[0] if func is _aten.bernoulli.default else args[1]
    return [chances.numel() * accumulator(chances.dtype).itemsize] if chances.dtype in HALF else []


@special(_aten.normal.Tensor_float, table=BESIDE)
def _drawn_around(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    """What is drawn is in a tensor of its own first (`normal_out_impl` in ``DistributionTemplates.h``)."""
    return [bytes_of(out)]


_MAKE_THEIR_RESULT = (_aten.normal.Tensor_Tensor, _aten.normal.float_Tensor)


@special(*overloads("normal.Tensor_Tensor normal.Tensor_Tensor_out normal.float_Tensor normal.float_Tensor_out"))
def _drawn_by_deviations(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """The lowest deviation is looked at (`CHECK_NORMAL_TENSOR_STD` in ``DistributionTemplates.h``), again after the result is
    made; then a mean that is a number becomes a tensor (`normal_out_impl`)."""
    _check_deviation(engine, args[1])
    out = engine.run(func, args, kwargs, device)
    if func in _MAKE_THEIR_RESULT:
        _check_deviation(engine, args[1])
    if not isinstance(args[0], torch.Tensor):
        with engine.scratch(device, out.element_size()):
            pass
    return out


def _check_deviation(engine: Engine, deviation: Any) -> None:
    if deviation.numel():
        with pushed(engine.mode):
            lowest = deviation.min()
            lowest.ge(0)
        del lowest
        engine.table.drain()


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


@special(*overloads("renorm renorm_ renorm.out"), table=BESIDE)
def _renormed(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    """The norms, and where they aren't of the result's type its factors (``Normalization.cpp``)."""
    source, kind = args[0], accumulator(args[0].dtype)
    rows = source.shape[args[2]]
    norms = rows * (kind.to_real() if kind.is_complex else kind).itemsize
    return [norms, rows * source.element_size()] if kind.is_complex or kind != source.dtype else [norms]


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
