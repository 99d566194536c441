"""Operators that are no kernel on CUDA but are made of others, some of which take memory of their own for a moment.

`native_functions.yaml` has ``CompositeExplicitAutograd`` for them and nothing for CUDA: one function in C++ runs on every
device. So it is run here as well, and its parts come to the virtual device one by one. A shape rule alone would count the result
and nothing else: of a binary cross-entropy with logits one number, where a card holds two tensors of the input's size. Only those
are here that hold more than their results.

The median of a whole tensor sorts it (``Sorting.cpp`` in ATen/native/cuda). What is not quantised is made float32 by `dequantize`
(``quantized/QTensor.cpp``). An ``out=`` that nobody wrote a kernel for (``autogen``) makes a result and copies it.
"""

from __future__ import annotations

from typing import Any

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine.engine import Engine, special
from gpumem_magic.virtual.engine.modes import pushed
from gpumem_magic.virtual.engine.tensors import VirtualTensor

_OPERATORS = overloads(
    "binary_cross_entropy_with_logits soft_margin_loss soft_margin_loss.out soft_margin_loss_backward "
    "soft_margin_loss_backward.grad_input logsumexp logsumexp.out _euclidean_dist dist _trilinear _safe_softmax isinf mvlgamma "
    "ldexp.Tensor affine_grid_generator linalg_pinv.atol_rtol_tensor cholesky_solve masked_scatter_backward "
    "pixel_unshuffle expand_copy.out as_strided_copy.out view_copy.out permute_copy.out unfold_copy.out squeeze_copy.out "
    "unsqueeze_copy.out transpose_copy.int_out t_copy.out alias_copy.out diagonal_copy.out slice_scatter.out"
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


@special(*_KEYS)
def _by_parts(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    with pushed(engine.mode), torch._C._AutoDispatchBelowAutograd():
        if func is _SAFE_SOFTMAX and engine.memory.torch_version(device) < _SAFE_FROM:
            return _aten.softmax.int(*args, **kwargs)
        return func._op_dk(_KEYS[func], *args, **kwargs)


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
        ordered = args[0].flatten().sort()[0]
        last = ordered.numel() - 1
        if func is _aten.nanmedian.default:
            return _aten.index.Tensor(ordered, [((last - ordered.isnan().sum()) / 2).to(torch.int64)])
        return torch.where(ordered[-1].isnan(), ordered[-1], ordered[last // 2])


@special(_aten.dequantize.self)
def _dequantize(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    with pushed(engine.mode):
        return args[0].to(torch.float32)
