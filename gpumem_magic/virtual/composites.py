"""Operators that C++ puts together differently for CUDA: the CUDA way, for virtual tensors.

Inside PyTorch these ask ``is_cuda`` and would take the host's way here, since C++ sees meta tensors. It matters for memory: the
host's dropout keeps a mask in the input's type where CUDA keeps one byte for each element, and the host's softmax with
``dtype=float32`` of float16 scores makes a float32 copy first. As in `Dropout.cpp` and `SoftMax.cpp` of PyTorch 2.9 to 2.13.

The gradients of SiLU and Mish are one kernel on CUDA (`native_functions.yaml`); a build for the host knows them for CUDA as seven
and eight smaller operators only, which would hold up to five tensors more for a moment.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from gpumem_magic.virtual.engine import Engine, special

_aten = torch.ops.aten


def dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Training: one kernel, which keeps a mask of one byte for each element."""
    if not train or p == 0 or not input.numel():
        return input
    if p == 1:
        return input.mul(torch.zeros((), dtype=input.dtype, device=input.device))
    return _aten.native_dropout.default(input, p, train)[0]  # type: ignore[no-any-return]


def softmax(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """float16 scores with a float32 result: converted by the kernel itself."""
    return _normalised(_aten._softmax.default, input, dim, dtype)


def log_softmax(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Likewise."""
    return _normalised(_aten._log_softmax.default, input, dim, dtype)


def _normalised(kernel: Any, input: torch.Tensor, dim: int, dtype: torch.dtype | None) -> torch.Tensor:
    if input.dtype == torch.float16 and dtype == torch.float32:
        return kernel(input, dim, True)  # type: ignore[no-any-return]
    return kernel(input if dtype is None else input.to(dtype), dim, False)  # type: ignore[no-any-return]


def silu_backward(grad_output: torch.Tensor, self: torch.Tensor) -> torch.Tensor:
    """One kernel. Where its own gradient is wanted, the smaller operators."""
    if torch.is_grad_enabled() and (grad_output.requires_grad or self.requires_grad):
        gate = torch.sigmoid(self)
        return grad_output * (gate * (1 + self * (1 - gate)))
    return _one_kernel(_aten.silu_backward.default, grad_output, self)


def mish_backward(grad_output: torch.Tensor, self: torch.Tensor) -> torch.Tensor:
    """Likewise."""
    if torch.is_grad_enabled() and (grad_output.requires_grad or self.requires_grad):
        inner = torch.tanh(F.softplus(self))
        return grad_output * (inner + self * torch.sigmoid(self) * (1 - inner * inner))
    return _one_kernel(_aten.mish_backward.default, grad_output, self)


def _one_kernel(kernel: Any, grad_output: torch.Tensor, self: torch.Tensor) -> torch.Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        return kernel(grad_output, self)  # type: ignore[no-any-return]


_WAYS: dict[Any, Callable[..., torch.Tensor]] = {
    _aten.dropout.default: dropout,
    _aten.softmax.int: softmax,
    _aten.log_softmax.int: log_softmax,
}
# Kernels of CUDA's own, which below autograd are the operator itself.
_KERNELS: dict[Any, Callable[..., torch.Tensor]] = {
    _aten.silu_backward.default: silu_backward,
    _aten.mish_backward.default: mish_backward,
}


class Composites:
    """Replaces the operators for tensors of the virtual devices while it is installed."""

    def __init__(self) -> None:
        self._library: torch.library.Library | None = None

    def install(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for operator, way in (_WAYS | _KERNELS).items():
                self._library.impl(operator, way, "AutogradCUDA")

    def remove(self) -> None:
        if self._library is not None:
            self._library._destroy()
            self._library = None


@special(*_WAYS)
def _without_autograd(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """In inference mode the operators come whole, below the key that they are registered for."""
    return _WAYS[func](*args, **kwargs)


@special(*_KERNELS)
def _whole(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    return engine.run(func, args, kwargs, device)
