"""Where PyTorch's shape rules refuse what CUDA's kernels take: what they are asked in its place, which has the same result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpumem_magic.private import aten as _aten

Asked = tuple[Any, Any, Any]
ASKED_INSTEAD: dict[Any, Callable[[Any, Any, Any], Asked]] = {}
"""By operator: gives the operator, arguments and named arguments to be asked for."""


def _for(*functions: Any) -> Callable[[Callable[[Any, Any, Any], Asked]], Callable[[Any, Any, Any], Asked]]:
    def register(rule: Callable[[Any, Any, Any], Asked]) -> Callable[[Any, Any, Any], Asked]:
        ASKED_INSTEAD.update(dict.fromkeys(functions, rule))
        return rule

    return register


# The place of the classes among the arguments of what looks up one for each row.
_CLASSES = {_aten.nll_loss_forward.default: 1, _aten.nll_loss_backward.default: 2}


@_for(*_CLASSES)
def _with_long_classes(func: Any, args: Any, kwargs: Any) -> Asked:
    """They may be bytes (`AT_DISPATCH_NLL_LOSS_INDEX_TYPES` in ``Loss.cu``, since 1.10); the rules since 2.12 gather by them."""
    place = _CLASSES[func]
    classes = args[place]
    if classes.dtype == torch.uint8:
        args = (*args[:place], _aten._to_copy.default(classes, dtype=torch.int64), *args[place + 1 :])
    return func, args, kwargs


# The operators that ``<<`` and ``>>`` are, and those by name, which run the same kernels (``BinaryShiftOpsKernels.cu``).
_SHIFTS = {
    getattr(getattr(_aten, f"__{sign}__"), overload): getattr(getattr(_aten, name), by_name)
    for sign, name in {
        "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift",
        "ilshift": "bitwise_left_shift_", "irshift": "bitwise_right_shift_",
    }.items()
    for overload, by_name in {"Tensor": "Tensor", "Scalar": "Tensor_Scalar"}.items()
}  # fmt: skip


@_for(*_SHIFTS)
def _by_name(func: Any, args: Any, kwargs: Any) -> Asked:
    """What their rules say of flags holds before types are promoted, and kernels are chosen afterwards."""
    return _SHIFTS[func], args, kwargs
