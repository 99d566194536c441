"""Quotients of integers that end a process on the host, or raise there, and do neither on CUDA (``BinaryDiv*Kernel.cu``).

The least integer divided by -1 has no quotient in its type: the processor stops the process (``idiv``), where CUDA wraps around.
By zero CUDA divides without a word, and says nothing of what comes out; here that is all ones, and nothing remains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine.host_calls import equivalent

_DIVISIONS = overloads(
    "div.Tensor_mode div.Scalar_mode div.out_mode div.Scalar_mode_out div_.Tensor_mode div_.Scalar_mode "
    "floor_divide floor_divide.Scalar floor_divide.out floor_divide.Scalar_out floor_divide_.Tensor floor_divide_.Scalar "
    "remainder.Tensor remainder.Scalar remainder.Scalar_Tensor remainder.Tensor_out remainder.Scalar_out "
    "remainder.Scalar_Tensor_out remainder_.Tensor remainder_.Scalar "
    "fmod.Tensor fmod.Scalar fmod.Tensor_out fmod.Scalar_out fmod_.Tensor fmod_.Scalar"
)


def _dividing(func: Any) -> Callable[..., Any]:
    written = func._schema.name.endswith("_")
    packet = getattr(torch.ops.aten, func.overloadpacket.__name__.removesuffix("_"))

    def divide(left: Any, right: Any, **named: Any) -> Any:
        if named.get("rounding_mode", "") is None or not (_is_whole(left) and _is_whole(right)):
            return func(left, right, **named)
        dtype = torch.result_type(left, right)
        by = torch.as_tensor(right).to(dtype)
        backward = by == -1 if dtype.is_signed else torch.zeros_like(by, dtype=torch.bool)
        special = backward | (by == 0)
        if dtype == torch.bool or not special.any():
            return func(left, right, **named)
        # In its place divides 1.
        of = torch.as_tensor(left).to(dtype)
        of = torch.where(backward, -of, torch.where(special, ~torch.zeros_like(of), of))
        quotient = packet(of, torch.where(special, torch.ones_like(by), by), **named)
        return left.copy_(quotient) if written else quotient

    return divide


def _is_whole(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not (value.is_floating_point() or value.is_complex())
    return isinstance(value, int)


for _func in _DIVISIONS:
    equivalent(_func, always=True)(_dividing(_func))
