"""What a program learns when it checks values that do not exist: ``assert (boxes >= 0).all()``, ``if torch.isnan(x).any()``.

Such checks hold on a device, or the program would not be run there. So they hold here: `all` of elements that were compared by
size, or found finite, is true, and `any` is false (but nothing is said to equal a given value: a token is not the one that ends a
text). Of a single number, whatever is usual for the value zero is said: it is not negative, below a bound, and not within a
tolerance. Who reads the answer reads a stand-in, and its line is listed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from gpumem_magic.patching import Patches
from gpumem_magic.private import aten as _aten
from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine import guesses, tallies, values
from gpumem_magic.virtual.engine.calls import users_line
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.modes import STATE, ThreadFlag
from gpumem_magic.virtual.engine.rules import special
from gpumem_magic.virtual.engine.tensors import CHECKED, GUESS, VirtualTensor, all_attributes, engine_of
from gpumem_magic.virtual.operators.written_gradients import as_device_does

HOLDING = ThreadFlag()
"""Up where it is known what comes of a check, which need not be guessed: what is asked to be true of all elements is, unless the
values are known."""


def _below(left: Any, right: Any) -> bool:
    """Only a bound is meant by that (a number of classes), not a tolerance or a guard against zero."""
    return bool(right - left >= 1)


# What is said of a single number which is not known, by operator; the unknown side counts as zero.
_OF_ONE: dict[Any, Callable[[Any, Any], bool]] = {
    _aten.ge: lambda left, right: bool(left >= right),
    _aten.gt: lambda left, right: _below(right, left),
    _aten.le: _below,
    _aten.lt: _below,
    _aten.ne: lambda left, right: True,
    _aten.eq: lambda left, right: False,
}

_PLAIN: dict[Any, Callable[[Any, Any], Any]] = {
    getattr(_aten, name): getattr(operator, name) for name in ("ge", "gt", "le", "lt", "ne", "eq")
}
# Nothing follows from these for many elements: some may be equal.
_EQUAL = (_aten.eq, _aten.ne)


def _say(tensor: Any, answer: bool) -> None:
    """The values of a new, small tensor are taken to be this."""
    if isinstance(tensor, VirtualTensor):
        with torch._C._DisableTorchDispatch():
            host = _aten.full.default(tensor.shape, answer, dtype=torch.bool)
        engine_of(tensor).guess(tensor, host)


def _mark(tensor: Any) -> None:
    """These are answers to a check, until the tensor is written to."""
    if isinstance(tensor, VirtualTensor) and values.exact(tensor) is None:
        all_attributes(tensor)[CHECKED] = values.version(tensor)


def find_nothing(tensor: Any) -> None:
    """No element is taken to be true."""
    _find(tensor, 0.0)


def _find(tensor: Any, found: float) -> None:
    """All elements are taken to be this: 0 or 1."""
    if isinstance(tensor, VirtualTensor) and values.known(tensor) is None:
        all_attributes(tensor)[GUESS] = found


# What is found of two masks, or of one, in which it is known of all elements what was found.
_TOGETHER: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((_aten.logical_not, _aten.bitwise_not), operator.not_),
    **dict.fromkeys((_aten.logical_and, _aten.bitwise_and), min),
    **dict.fromkeys((_aten.logical_or, _aten.bitwise_or), max),
}


def _is_check(tensor: Any) -> bool:
    return (
        isinstance(tensor, VirtualTensor)
        and CHECKED in all_attributes(tensor)
        and all_attributes(tensor)[CHECKED] == values.version(tensor)
    )


def _number(engine: Engine, value: Any) -> Any:
    """The number that a side of a comparison counts as; None where it has values of its own."""
    if isinstance(value, VirtualTensor):
        return None if values.known(value) is not None or value.dtype == torch.bool else _taken(engine, value) or 0
    if isinstance(value, torch.Tensor):
        return value.item() if value.dim() == 0 else None
    return value


def _taken(engine: Engine, tensor: VirtualTensor) -> Any:
    """What a tensor's elements are taken to be; None where nothing says so."""
    found = guesses.of(tensor)
    return engine.bound(tensor) if found is None else found


def _says_nothing(engine: Engine, args: Any, kwargs: Any) -> bool:
    """All values are known, and no gradient is worked out."""
    return engine.computes and not STATE.backward


def _compare(of_one: Callable[[Any, Any], bool]) -> Callable[..., Any]:
    def handler(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
        out = engine.run(func, args, kwargs, device)
        if func.overloadpacket in _EQUAL:
            if args[0] is args[1]:
                # Only a number that is none differs from itself.
                if func.overloadpacket is _aten.eq:
                    _mark(out)
                    if out.numel() == 1 and values.known(out) is None:
                        _say(out, True)
                else:
                    find_nothing(out)
                return out
        else:
            _mark(out)
        if out.numel() == 1 and values.known(out) is None:
            left, right = (_number(engine, side) for side in args[:2])
            if left is not None and right is not None and not isinstance(left, str) and not isinstance(right, str):
                unknown = [side for side in args[:2] if isinstance(side, VirtualTensor)]
                # (Of two unknown numbers none is known to be the other.)
                equal = func.overloadpacket in _EQUAL and len(unknown) > 1
                follows = not equal and any(_taken(engine, side) is not None for side in unknown)
                _say(out, bool(_PLAIN[func.overloadpacket](left, right)) if follows else of_one(left, right))
        return out

    return handler


for _packet, _rule in _OF_ONE.items():
    special(_packet.Tensor, _packet.Scalar, plain=_says_nothing, outside_backward=True)(_compare(_rule))


@special(
    *overloads("logical_not logical_and logical_or bitwise_not bitwise_and.Tensor bitwise_or.Tensor"),
    plain=_says_nothing,
    outside_backward=True,
)
def _combine(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    checks = all(_is_check(side) for side in args[:2])
    out = engine.run(as_device_does(engine, func, args), args, kwargs, device)
    if checks:
        _mark(out)
    found = [guesses.of(side) if isinstance(side, VirtualTensor) else None for side in args[:2]]
    if all(one in (0.0, 1.0) for one in found):
        _find(out, float(_TOGETHER[func.overloadpacket](*found)))
    return out


@special(*overloads("isnan"), plain=_says_nothing, outside_backward=True)
def _no_number(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    out = engine.run(func, args, kwargs, device)
    find_nothing(out)
    return out


_ALL = (_aten.all.default, _aten.all.dim, _aten.all.dims, _aten._is_all_true.default)


@special(
    *_ALL,
    _aten.any.default,
    _aten.any.dim,
    _aten.any.dims,
    _aten._is_any_true.default,
    plain=_says_nothing,
    outside_backward=True,
)
def _of_many(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    out = engine.run(func, args, kwargs, device)
    if HOLDING.is_up and func in _ALL and isinstance(out, VirtualTensor) and values.exact(out) is None:
        with torch._C._DisableTorchDispatch():
            engine.guess(out, torch.ones(out.shape, dtype=torch.bool), sure=True)
    elif _is_check(args[0]):
        _mark(out)
        if args[0].numel() > 1 and values.known(out) is None:
            _say(out, func in _ALL or tallies.selects_some(engine, func, args[0], users_line()))
    elif guesses.of(args[0]) in (0, 1) and values.known(out) is None:
        _say(out, bool(guesses.of(args[0])))
    return out


def install(patches: Patches) -> None:
    """PyTorch puts these together from operators that say nothing of their meaning."""
    for name in ("isfinite", "isclose"):
        asks = _says_yes(getattr(torch, name))
        patches.set(torch, name, asks)
        patches.set(torch.Tensor, name, asks)


def _says_yes(original: Any) -> Any:
    def ask(input: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(input, *args, **kwargs)
        sides = [side for side in (input, *args[:1]) if isinstance(side, VirtualTensor)]
        if sides and all(values.exact(side) is None for side in sides):
            _mark(out)
            _find(out, 1.0)
            if out.numel() == 1 and values.exact(out) is None:
                _say(out, True)
        return out

    return ask
