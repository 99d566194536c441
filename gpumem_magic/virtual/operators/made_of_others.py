"""Operators that are no kernel on CUDA but are made of others, some of which take memory of their own for a moment.

`native_functions.yaml` has ``CompositeExplicitAutograd`` for them and nothing for CUDA: one function in C++ runs on every
device. So it is run here as well, and its parts come to the virtual device one by one. A shape rule alone would count the result
and nothing else: of a binary cross-entropy with logits one number, where a card holds two tensors of the input's size. Only those
are here that hold more than their results.

What writes to a part of a tensor and gives another (`slice_scatter`) copies all of the tensor's storage, and a tangent is made to
lie as its tensor does, with a storage as large (``TensorShape.cpp``, ``TensorFactories.cpp``).

The median of a whole tensor sorts it (``Sorting.cpp`` in ATen/native/cuda). What is not quantised is made float32 by `dequantize`
(``quantized/QTensor.cpp``). Operators with ``out=`` that are made of others are known by that (`calls.writes_by_others`).
"""

from __future__ import annotations

from typing import Any

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine.calls import giving, views_resolved
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.modes import pushed
from gpumem_magic.virtual.engine.rules import special
from gpumem_magic.virtual.engine.tensors import VirtualTensor
from gpumem_magic.virtual.operators.checks import find_nothing
from gpumem_magic.virtual.operators.written_gradients import writes_onto_its_diagonal

_OPERATORS = overloads(
    "binary_cross_entropy_with_logits soft_margin_loss soft_margin_loss_backward logsumexp logsumexp.out _euclidean_dist dist "
    "_trilinear _safe_softmax isinf mvlgamma mvlgamma_ ldexp.Tensor ldexp_ affine_grid_generator "
    "linalg_pinv.atol_rtol_tensor cholesky_solve masked_scatter_backward pixel_unshuffle _unsafe_masked_index "
    "_unsafe_masked_index_put_accumulate slice_scatter select_scatter diagonal_scatter as_strided_scatter "
    "_new_zeros_with_same_feature_meta"
)


def _function_for_all(func: Any) -> Any:
    """The key under which an operator has one function for all devices; None where this version has none.

    C++ would run whatever lies at the place of a key without a function.
    """
    for key in ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional"):
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key):
            return getattr(torch._C.DispatchKey, key)
    return None


_KEYS = {func: key for func in _OPERATORS if (key := _function_for_all(func)) is not None}


(_SAFE_SOFTMAX,) = overloads("_safe_softmax")
# Before, attention step by step took a plain softmax (``transformers/attention.cpp``): no row was looked at.
_SAFE_FROM = (2, 5)
# Since when rows that see nothing are filled in place; that of 2.5 chose between two numbers.
_FILLED_FROM = (2, 6)


@special(*(func for func in _KEYS if func.overloadpacket not in (_aten.ldexp, _aten.ldexp_, _aten.diagonal_scatter)))
def _by_parts(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    with pushed(engine.mode), views_resolved(), torch._C._AutoDispatchBelowAutograd():
        if func is _SAFE_SOFTMAX and engine.memory.torch_version(device) < _SAFE_FROM:
            return _aten.softmax.int(*args, **kwargs)
        if func is _SAFE_SOFTMAX and engine.memory.torch_version(device) < _FILLED_FROM:
            return _chosen_by_row(*args, **kwargs)
        if func is _CROSS_ENTROPY and engine.memory.torch_version(device) < _SIGMOID_FIRST_FROM:
            return _cross_entropy_as_before(*args, **kwargs, version=engine.memory.torch_version(device))
        out = func._op_dk(_KEYS[func], *args, **kwargs)
    if func is _ISINF:
        find_nothing(out)
    return out


@special(_aten.diagonal_scatter.default)
def _onto_a_diagonal(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    if not writes_onto_its_diagonal(engine, args):
        return _by_parts(engine, func, args, kwargs, device)
    whole, diagonal, *places = args
    with pushed(engine.mode):
        whole.diagonal(*places, **kwargs).copy_(diagonal)
    return whole


(_ISINF,) = overloads("isinf")
(_CROSS_ENTROPY,) = overloads("binary_cross_entropy_with_logits")
# Since when it begins with the logarithm of the sigmoid, which stays to the end; and since when it has one, and no exponentials.
# (The builds of 2.2 to 2.4.)
_SIGMOID_FIRST_FROM, _BY_SIGMOID_FROM = (2, 4), (2, 3)
_MEAN, _SUM = 1, 2


def _cross_entropy_as_before(
    scores: Any,
    target: Any,
    weight: Any = None,
    pos_weight: Any = None,
    reduction: int = _MEAN,
    *,
    version: tuple[int, int],
) -> Any:
    """`binary_cross_entropy_with_logits` of 2.3, and of older ones (``Loss.cpp``)."""
    highest = None if version >= _BY_SIGMOID_FROM else scores.neg().clamp_min_(0)
    of_positive = None
    if pos_weight is not None:
        one_less = pos_weight - 1
        of_positive = one_less.mul(target)
        del one_less
        of_positive.add_(1)
    loss = (1 - target).mul_(scores)
    if highest is None:
        logarithm = _aten.log_sigmoid.default(scores)
        loss.sub_(logarithm if of_positive is None else of_positive.mul_(logarithm))
        del logarithm
    else:
        first = highest.neg().exp_()
        negative = scores.neg()
        second = (negative - highest).exp_()
        first.add_(second).log_()
        loss.add_(highest).add_(first) if of_positive is None else loss.add_(of_positive.mul_(first.add_(highest)))
        del second, negative, first
    del of_positive
    if weight is not None:
        loss.mul_(weight)
    out = loss.mean() if reduction == _MEAN else loss.sum() if reduction == _SUM else loss
    del highest
    return out


def _chosen_by_row(scores: Any, dim: int, dtype: torch.dtype | None = None) -> Any:
    """`_safe_softmax` of 2.5 (``SoftMax.cpp``)."""
    out = _aten.softmax.int(scores, dim, dtype)
    lowest = torch.scalar_tensor(float("-inf"), dtype=out.dtype, device=out.device)
    hidden = scores.eq(lowest)
    rows = hidden.all(dim, keepdim=True)
    zero = torch.scalar_tensor(0.0, dtype=out.dtype, device=out.device)
    chosen = torch.where(rows, zero, out)
    del zero, rows, hidden, lowest, out
    return chosen


# Since when an exponent of integers has a kernel. (2.11 has it, 2.7 does not; between them it is not known.)
_BY_EXPONENT_FROM = (2, 8)


@special(*overloads("ldexp.Tensor ldexp_"))
def _by_exponent(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    wide = args[1].is_floating_point() or args[1].is_complex() or not args[0].is_floating_point()
    if wide or engine.memory.torch_version(device) < _BY_EXPONENT_FROM:
        return _by_parts(engine, func, args, kwargs, device)
    return engine.run(func, args, kwargs, device)


_BY_LIST = dict(
    zip(
        overloads("_foreach_addcdiv.Tensor _foreach_addcdiv_.Tensor _foreach_addcmul.Tensor _foreach_addcmul_.Tensor"),
        overloads(
            "_foreach_addcdiv.ScalarList _foreach_addcdiv_.ScalarList _foreach_addcmul.ScalarList _foreach_addcmul_.ScalarList"
        ),
        strict=True,
    )
)


@special(*_BY_LIST)
def _with_numbers(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """A host tensor of numbers, one for each tensor of the lists, is read (``ForeachOpsKernels.cpp``)."""
    *lists, numbers = args
    if isinstance(numbers, VirtualTensor):
        raise RuntimeError("Expected scalars to be on CPU, got cuda instead.")
    return engine.run(_BY_LIST[func], (*lists, numbers.tolist()), kwargs, device)


@special(_aten.median.default, _aten.nanmedian.default)
def _median(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    if not args[0].numel():
        return engine.run(func, args, kwargs, device)
    with pushed(engine.mode):
        flat = args[0].flatten()
        ordered, places = flat.sort()
        # (C++ lets go of the last first.)
        del places, flat
        last = ordered.numel() - 1
        if func is _aten.nanmedian.default:
            unknown = ordered.isnan()
            count = unknown.sum()
            numbers = last - count
            half = numbers / 2
            middle = half.to(torch.int64)
            del half, numbers, count, unknown
            out = _aten.index.Tensor(ordered, [middle])
            del middle
            return out
        return torch.where(ordered[-1].isnan(), ordered[-1], ordered[last // 2])


_COPIED = overloads("_fft_c2c.out _fft_c2r.out mvlgamma.out cholesky.out histc.out")


@special(*_COPIED)
def _made_and_copied(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """Kernels of CUDA's that make a result, and copy it (``SpectralOps.cpp``, ``SummaryOps.cu``, ...)."""
    others = {name: value for name, value in kwargs.items() if name != "out"}
    with pushed(engine.mode):
        result, out = giving(func)(*args, **others), kwargs["out"]
        return out.resize_(result.shape).copy_(result) if out.shape != result.shape else out.copy_(result)


def _is_real(engine: Engine, args: Any, kwargs: Any) -> bool:
    return not args[0].is_complex()


@special(
    *overloads("var.correction std.correction var.correction_out std.correction_out"), plain=_is_real, by_looks=True
)
def _variance(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """Of complex numbers: those of their real and imaginary parts, added up (``ReduceOps.cpp``)."""
    if _is_real(engine, args, kwargs):
        return engine.run(func, args, kwargs, device)
    given = {name: value for name, value in kwargs.items() if name != "out"}
    with pushed(engine.mode):
        real, imaginary = (_aten.var.correction(part, *args[1:], **given) for part in (args[0].real, args[0].imag))
        out = torch.add(real, imaginary, out=kwargs.get("out"))
        del imaginary, real
        return out.sqrt_() if func._schema.name == "aten::std" else out


@special(*overloads("var_mean.correction std_mean.correction"), plain=_is_real, by_looks=True)
def _variance_and_mean(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """Likewise."""
    if _is_real(engine, args, kwargs):
        return engine.run(func, args, kwargs, device)
    with pushed(engine.mode):
        real, real_mean = _aten.var_mean.correction(args[0].real, *args[1:], **kwargs)
        imaginary, imaginary_mean = _aten.var_mean.correction(args[0].imag, *args[1:], **kwargs)
        out = real + imaginary
        if func is _aten.std_mean.correction:
            out.sqrt_()
        mean = torch.complex(real_mean, imaginary_mean)
        del imaginary_mean, imaginary, real_mean, real
        return out, mean


def _stays(engine: Engine, args: Any, kwargs: Any) -> bool:
    return bool(args[0].is_floating_point() and not isinstance(args[1], complex))


@special(_aten.pow.Tensor_Scalar, plain=_stays, by_looks=True)
def _power(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """A tensor of the result's type first (``Pow.cpp``)."""
    kind = torch.result_type(*args[:2])
    if isinstance(args[1], bool) or kind == args[0].dtype:
        return engine.run(func, args, kwargs, device)
    with engine.scratch(device, args[0].numel() * kind.itemsize):
        return engine.run(func, args, kwargs, device)


@special(_aten.trace.default)
def _trace(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """The sum of the diagonal (`trace_cuda` in ``TriangularOps.cu``)."""
    engine.fake_call(func, args, kwargs)
    with pushed(engine.mode):
        return args[0].diagonal().sum()


@special(_aten.addbmm_.default)
def _added_to(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """What is added to is made as large as the product (`addbmm_impl_` in ``LinearAlgebra.cpp``)."""
    target, left, right = args[:3]
    shape = (left.shape[1], right.shape[2])
    if left.dim() == right.dim() == 3 and target.shape != shape:
        with pushed(engine.mode):
            # (Which refuses what can't be.)
            target.expand(shape)
            target.resize_(shape)
    return engine.run(func, args, kwargs, device)


@special(_aten.dequantize.self)
def _dequantize(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    with pushed(engine.mode):
        return args[0].to(torch.float32)
