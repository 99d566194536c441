"""Kernels that copy what they are given before they start.

After ATen/native/cuda: ``SoftMax.cu``, ``layer_norm_kernel.cu``, ``DilatedMaxPool2d.cu``, ``AveragePool2d.cu`` and their like,
``Im2Col.cu``, ``Col2Im.cu``, ``ReflectionPad.cu``, ``ReplicationPadding.cu``, ``UpSampleNearest2d.cu``,
``UpSampleNearest3d.cu``, ``Sorting.cpp`` and ``TensorModeKernel.cpp`` want plain layouts, ``Embedding.cpp`` one list of indices,
``TensorCompare.cpp`` numbers of its bounds' type; ``Copy.cu`` takes plain tensors between host and device; ``IndexKernel.cu``
counts the places of a `masked_scatter` in eight bytes for each element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine.calls import bytes_of, copies_of
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.half_precision import accumulator
from gpumem_magic.virtual.engine.modes import pushed
from gpumem_magic.virtual.engine.rules import BESIDE, special
from gpumem_magic.virtual.engine.strides import lies_in_one_row, like_channels_last
from gpumem_magic.virtual.operators import growing
from gpumem_magic.virtual.operators.cub import cub_of
from gpumem_magic.virtual.operators.sorting import is_dense
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
# Since when a group norm is given what it normalises as it lies, and copies it in the kernel and in its gradient's (the builds of
# 2.12 and 2.14).
GROUPS_AS_THEY_LIE_FROM = (2, 14)
_GROUP_NORM = _aten.native_group_norm.default
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


def _lies_plainly(places: Sequence[int]) -> Callable[..., bool]:
    """Whether none of these arguments is copied."""
    return lambda engine, args, kwargs: all(args[place].is_contiguous() for place in places)


def _laid_out(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    by_kernel = func is _GROUP_NORM and engine.memory.torch_version(device) >= GROUPS_AS_THEY_LIE_FROM
    return laid_out(engine, func, args, kwargs, device, () if by_kernel else _LAID_OUT[func])


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
    engine.settle_grown(out[::-1], device)
    with engine.scratch(device, *(copies_of(*args[:2]) if args[3] else ())):
        return out


@special(_aten.nll_loss2d_backward.default, table=BESIDE)
def _of_a_loss_of_images(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    return copies_of(*args[2:3]) if args[4] else []


@special(_aten.unfold_backward.default, table=BESIDE)
def _of_windows(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    """The numbers of those places of a dimension that lie in a window, unless each lies in one only (``UnfoldBackward.h``)."""
    gradient, sizes, dim, size, step = args
    if not out.dim() or step >= size:
        return []
    # (The gradient has a dimension more at its end, from which a negative number would count.)
    return [min(sizes[dim], (gradient.shape[dim % out.dim()] - 1) * step + size) * 8]


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


def staged_bytes(on_device: Any, on_host: Any, non_blocking: bool = False) -> int:
    """What a copy between host and device takes on the device beside its result (``Copy.cu``): a plain copy where the two do not
    lie densely in one order, and one in the source's type where a copy that is not waited for converts on the device."""
    if on_device.layout is not torch.strided or not on_device.numel():
        return 0
    if non_blocking and on_device.dtype != on_host.dtype:
        return int(on_device.numel() * on_host.element_size())
    alike = on_device.stride() == on_host.stride() and on_device.shape == on_host.shape and is_dense(on_device)
    return 0 if on_device.is_contiguous() or (alike and on_device.dtype == on_host.dtype) else bytes_of(on_device)


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


@special(*overloads("renorm renorm_ renorm.out"), table=BESIDE)
def _renormed(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    """The norms, and where they aren't of the result's type its factors (``Normalization.cpp``)."""
    source, kind = args[0], accumulator(args[0].dtype)
    rows = source.shape[args[2]]
    norms = rows * (kind.to_real() if kind.is_complex else kind).itemsize
    return [norms, rows * source.element_size()] if kind.is_complex or kind != source.dtype else [norms]
