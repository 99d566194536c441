"""What a program learns when it checks values that there are not: ``assert (boxes >= 0).all()``, ``if torch.isnan(x).any()``.

An unknown value counts as zero, in comparisons of tensors of any size, too: so checks of what a program takes for granted
succeed, as they do on a device. Only that an unknown value equals a given one is never said: a token is not the one that ends a
text. Who reads the answer reads a stand-in, and its line is listed.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch

from gpumem_magic.patching import Patches
from gpumem_magic.virtual import values
from gpumem_magic.virtual.engine import Engine, special
from gpumem_magic.virtual.tensors import ANSWER, KNOWN, VirtualTensor

_aten = torch.ops.aten


def _never(left: Any, right: Any) -> bool:
    return False


def _always(left: Any, right: Any) -> bool:
    return True


_COMPARISONS: dict[Any, Callable[[Any, Any], bool]] = {
    _aten.ge: operator.ge,
    _aten.le: operator.le,
    _aten.gt: operator.gt,
    _aten.lt: operator.lt,
    _aten.eq: _never,
    _aten.ne: _always,
}
_COMBINED: dict[Any, Callable[[Any, Any], bool]] = {
    _aten.logical_and.default: operator.and_,
    _aten.logical_or.default: operator.or_,
    _aten.bitwise_and.Tensor: operator.and_,
    _aten.bitwise_or.Tensor: operator.or_,
}


def _remember(tensor: Any, answer: bool) -> None:
    """Every element of the result would be this."""
    if not isinstance(tensor, VirtualTensor) or KNOWN in tensor.__dict__:
        return
    if values.small(tensor):
        with torch._C._DisableTorchDispatch():
            host = torch.ops.aten.full.default(tensor.shape, answer, dtype=torch.bool)
        tensor.__dict__[KNOWN] = values.Known(host, False)
    else:
        # Not true any more once it has been written to.
        tensor.__dict__[ANSWER] = answer, tensor._version


def _answer(tensor: Any) -> bool | None:
    """The one answer that a tensor of booleans holds, if it is known to hold one."""
    found = values.known(tensor) if isinstance(tensor, VirtualTensor) else None
    if found is not None:
        if found.exact or tensor.dtype != torch.bool or not found.host.numel():
            return None
        first = bool(found.host.flatten()[0])
        return first if bool((found.host == first).all()) else None
    answer, version = tensor.__dict__.get(ANSWER, (None, 0)) if isinstance(tensor, VirtualTensor) else (None, 0)
    return answer if answer is not None and version == tensor._version else None


def _number(value: Any) -> Any:
    """The number that a side of a comparison counts as; None where it has values of its own."""
    if isinstance(value, VirtualTensor):
        return None if values.known(value) is not None or value.dtype == torch.bool else 0
    if isinstance(value, torch.Tensor):
        return value.item() if value.dim() == 0 else None
    return value


def _compare(ask: Callable[[Any, Any], bool]) -> Callable[..., Any]:
    def handler(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
        out = engine.run(func, args, kwargs, device)
        left, right = (_number(side) for side in args[:2])
        if args[0] is args[1] and left is not None:
            # How a program asks for values that are no numbers.
            _remember(out, bool(ask(0, 0)) if ask not in (_never, _always) else ask is _never)
        elif left is not None and right is not None and not isinstance(right, complex):
            _remember(out, bool(ask(left, right)))
        return out

    return handler


def _combine(join: Callable[[Any, Any], bool]) -> Callable[..., Any]:
    def handler(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
        left, right = (_answer(side) for side in args[:2])
        out = engine.run(func, args, kwargs, device)
        if left is not None and right is not None:
            _remember(out, bool(join(left, right)))
        return out

    return handler


for _packet, _ask in _COMPARISONS.items():
    special(_packet.Tensor, _packet.Scalar)(_compare(_ask))
for _function, _join in _COMBINED.items():
    special(_function)(_combine(_join))


@special(_aten.logical_not.default, _aten.bitwise_not.default)
def _not(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    answer = _answer(args[0])
    out = engine.run(func, args, kwargs, device)
    if answer is not None:
        _remember(out, not answer)
    return out


@special(
    _aten.all.default, _aten.all.dim, _aten.all.dims, _aten.any.default, _aten.any.dim, _aten.any.dims,
    _aten._is_all_true.default, _aten._is_any_true.default,
)  # fmt: skip
def _of_all(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    answer = _answer(args[0])
    out = engine.run(func, args, kwargs, device)
    if answer is not None:
        _remember(out, answer)
    return out


def install(patches: Patches) -> None:
    """PyTorch puts these together from operators that say nothing of their meaning."""
    for name in ("isfinite", "isclose"):
        asks = _says_yes(getattr(torch, name))
        patches.set(torch, name, asks)
        patches.set(torch.Tensor, name, asks)


def _says_yes(original: Any) -> Any:
    @functools.wraps(original)
    def ask(input: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(input, *args, **kwargs)
        sides = [side for side in (input, *args[:1]) if isinstance(side, VirtualTensor)]
        if sides and all(values.exact(side) is None for side in sides):
            if isinstance(out, VirtualTensor) and values.exact(out) is None:
                values.forget(out)
            _remember(out, True)
        return out

    return ask
