"""Tensors of which PyTorch knows that they are zero: a device has no memory for them (``ZeroTensorAllocator`` in ATen).

The gradient of `sgn`, the second derivative of `abs` and the tangents of constants in forward derivatives are made so, by
`_efficientzerotensor`. What becomes of them is C++'s own here, too: a sum with one is a copy of the other, a product
is another of them, and what wants values gets a single zero, expanded (``ZeroTensorFallback.cpp``). Only three views have kernels
of their own for them, which would look past the class of a virtual tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpumem_magic.patching import Patches
from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.rules import special


@special(_aten._efficientzerotensor.default)
def _without_memory(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    engine.alike.zeros = True
    out = engine.fake_call(func, args, kwargs)
    engine.settle(out, allocates=False)
    engine.table.borrow(out.untyped_storage(), device, None)
    return out


def _as_other_tensors(view: Any) -> Callable[..., Any]:
    def viewed(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.ZeroTensor)):
            return view(*args, **kwargs)

    return viewed


def install(patches: Patches) -> None:
    views = (_aten.as_strided.default, _aten.view.default, _aten._reshape_alias.default)
    patches.kernels("ZeroTensor", [(view, _as_other_tensors(view)) for view in views])
