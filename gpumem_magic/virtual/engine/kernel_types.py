"""Operators whose CUDA kernels take fewer types than PyTorch's shape rules do, which pool integers and sort complex numbers.

A kernel's name and its types are those of the ``AT_DISPATCH_...`` at its beginning, in ATen/native/cuda. Without elements none is
run.
"""

from __future__ import annotations

from typing import Any

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine.mismatch import scalar_name

_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_REAL_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_FLOATS = _REAL_FLOATS | {torch.complex64, torch.complex128}
_REALS = _INTEGERS | _REAL_FLOATS
_REALS_AND_FLAGS = _REALS | {torch.bool}
# Of others (unsigned ones of 16 bits and more, 8-bit floats) newer versions take some.
_JUDGED = _REALS_AND_FLAGS | _FLOATS

# What a kernel is called in the error for other types, and the operators that run it.
_KERNELS: dict[frozenset[torch.dtype], dict[str, str]] = {
    _FLOATS: {
        # Matrix products, which take no integers and no flags.
        "addmm_cuda": "mm addmm", "baddbmm_cuda": "bmm baddbmm", "addmv_impl_cuda": "mv addmv", "dot": "dot vdot",
    },
    _REAL_FLOATS: {
        # ``AdaptiveAveragePooling*.cu``, ``AdaptiveMaxPooling*.cu``, ``AveragePool3d.cu``, ``DilatedMaxPool3d.cu``
        "adaptive_avg_pool2d_cuda": "_adaptive_avg_pool2d", "adaptive_avg_pool3d_cuda": "_adaptive_avg_pool3d",
        "adaptive_max_pool2d_cuda": "adaptive_max_pool2d", "adaptive_max_pool3d_cuda": "adaptive_max_pool3d",
        "avg_pool3d_out_cuda": "avg_pool3d", "max_pool3d_with_indices_out_frame": "max_pool3d_with_indices",
        # ``DilatedMaxPool2d.cu``, ``AveragePool2d.cu``, ``FractionalMaxPool*.cu``, ``MaxUnpooling.cu``
        "max_pool2d_with_indices_out_cuda_frame": "max_pool2d_with_indices", "avg_pool2d_out_cuda_frame": "avg_pool2d",
        "fractional_max_pool2d_out_cuda_frame": "fractional_max_pool2d",
        "max_unpooling2d_forward_kernel": "max_unpool2d", "max_unpooling3d_forward_kernel": "max_unpool3d",
        # ``SoftMax.cu``, ``ActivationGluKernel.cu``, ``ActivationHardswishKernel.cu``
        "host_softmax": "_softmax _log_softmax", "glu_cuda": "glu", "hardswish_cuda": "hardswish",
        # ``UpSample*.cu``
        "upsample_linear1d_out_frame": "upsample_linear1d", "upsample_bilinear2d_out_frame": "upsample_bilinear2d",
        "upsample_bicubic2d_out_frame": "upsample_bicubic2d", "upsample_trilinear3d_out_frame": "upsample_trilinear3d",
        # ``ActivationLogSigmoidKernel.cu``
        "log_sigmoid_forward_cuda": "log_sigmoid_forward",
    },
    _REAL_FLOATS | {torch.uint8}: {
        # ``UpSampleNearest*.cu``
        "upsample_nearest1d_out_frame": "upsample_nearest1d _upsample_nearest_exact1d",
        "upsample_nearest2d_out_frame": "upsample_nearest2d _upsample_nearest_exact2d",
        "upsample_nearest3d_out_frame": "upsample_nearest3d _upsample_nearest_exact3d",
    },
    _FLOATS | {torch.bool}: {"im2col_out_cuda": "im2col"},
    # ``LossCTC.cu``
    frozenset({torch.float32, torch.float64}): {"ctc_loss_cuda": "_ctc_loss _ctc_loss.Tensor"},
    _INTEGERS: {"bincount_cuda": "bincount"},
    _REALS - {torch.float16, torch.bfloat16}: {"histc": "histc"},
    _REALS: {
        # ``TensorTopK.cu``, ``Sorting.cpp``, ``Bucketization.cu``
        "topk_out_cuda": "topk", "kthvalue_cuda": "kthvalue", "median_out_impl": "median.dim nanmedian.dim",
        "searchsorted_out_cuda": "searchsorted.Tensor bucketize.Tensor",
    },
    _REALS_AND_FLAGS: {
        # ``ReduceMaxValuesKernel.cu``, ``ReduceMinValuesKernel.cu``, ``Unique.cu``
        "max_values_cuda": "amax", "min_values_cuda": "amin", "max_all": "max", "min_all": "min", "unique": "_unique2",
        # ``ReduceAMinMaxKernel.cu``
        "aminmax_all_cuda": "aminmax",
        # ``ScanKernels.cpp``, ``TensorModeKernel.cu``
        "cummax_cuda": "cummax", "cummin_cuda": "cummin", "cuda_mode": "mode",
    },
}  # fmt: skip


_TAKEN = {
    func: (kernel, types)
    for types, kernels in _KERNELS.items()
    for kernel, names in kernels.items()
    for func in overloads(names)
}
_SORTING = set(overloads("sort sort.stable median nanmedian"))
# Of a number alone these give a copy.
_COPIES_ONE = set(overloads("sort sort.stable kthvalue cummax cummin mode"))


def may_refuse(func: Any) -> bool:
    return func in _TAKEN or func in _SORTING


def _runs_none(func: Any, tensor: torch.Tensor, first: int) -> bool:
    """Whether there is nothing to find for a kernel. first: what is given after the tensor, or -1."""
    if func is _aten.topk.default:
        return first == 0
    if func is _aten.mode.default and tensor.dim():
        # (``TensorModeKernel.cpp``)
        return tensor.shape[first] == 1
    return func in _COPIES_ONE and not tensor.dim()


def refuse_types(func: Any, args: Any, kwargs: Any) -> None:
    """Raises CUDA's error where an operator's kernel does not take the first argument's type."""
    if _runs_none(func, args[0], args[1] if len(args) > 1 else -1):
        return
    if func in _SORTING and args[0].is_complex() and args[0].numel():
        # (``Sort.cpp``, for the median as well.)
        raise RuntimeError("Sort currently does not support complex dtypes on CUDA.")
    found = _TAKEN.get(func)
    if found is None or args[0].dtype in found[1]:
        return
    if (found[1] is _FLOATS or args[0].dtype in _JUDGED) and all(
        arg.numel() for arg in args[:2] if isinstance(arg, torch.Tensor)
    ):
        if func is _aten.histc.default and args[0].dtype == torch.float16:
            raise RuntimeError("HalfTensor is not supported")
        kernel = found[0]
        if func is _aten.aminmax.default and kwargs.get("dim") is not None:
            kernel = "aminmax_cuda"
        raise NotImplementedError(f"\"{kernel}\" not implemented for '{scalar_name(args[0].dtype)}'")
