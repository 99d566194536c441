"""Operators that C++ puts together differently for CUDA: the CUDA way, for virtual tensors.

Inside PyTorch these ask ``is_cuda`` and would take the host's way here, since C++ sees meta tensors. It matters for memory: the
host's dropout keeps a mask in the input's type where CUDA keeps one byte for each element, and the host's softmax with
``dtype=float32`` of float16 scores makes a float32 copy first. As in `Dropout.cpp` and `SoftMax.cpp` of PyTorch 2.9 to 2.13.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

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


_WAYS: dict[Any, Callable[..., torch.Tensor]] = {
    _aten.dropout.default: dropout,
    _aten.softmax.int: softmax,
    _aten.log_softmax.int: log_softmax,
}


class Composites:
    """Replaces the operators for tensors of the virtual devices while it is installed."""

    def __init__(self) -> None:
        self._library: torch.library.Library | None = None

    def install(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for operator, way in _WAYS.items():
                self._library.impl(operator, way, "AutogradCUDA")

    def remove(self) -> None:
        if self._library is not None:
            self._library._destroy()
            self._library = None


@special(*_WAYS)
def _without_autograd(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """In inference mode the operators come whole, below the key that they are registered for."""
    return _WAYS[func](*args, **kwargs)
