"""Masks in which a program marks places: nobody knows which, but no more than it wrote.

After ``mask = torch.zeros(n)`` and ``mask[places] = 1`` at most as many elements are not zero as there are places, and what is
made of such masks is bounded, too: so detectors sample boxes. A bound belongs to a storage (`few` of its `Placement`), so all
views have it; it ends when something else is written there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpumem_magic.private import aten as _aten

AtMost = Callable[[Any], "int | None"]
# Rules ``rule(at_most, args, kwargs)``: how many elements of the result are not zero, at most; None where nothing says so.
Rule = Callable[[AtMost, Any, Any], "int | None"]
RULES: dict[Any, Rule] = {}
# Those with which a bound may begin. The others are asked where there is one.
BEGINNING: set[Any] = set()


def asked(rule: Rule | None, at_most: AtMost, args: Any, kwargs: Any) -> int | None:
    """The bound of an operator that is to run; None where nothing is said of it."""
    if rule is None:
        return None
    try:
        return rule(at_most, args, kwargs)
    except (IndexError, RuntimeError):
        # (A call that is wrong: the operator says so itself.)
        return None


def _for(names: str, begins: bool = False) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        for name in names.split():
            packet = getattr(_aten, name)
            for overload in packet.overloads():
                RULES[getattr(packet, overload)] = rule
                if begins:
                    BEGINNING.add(getattr(packet, overload))
        return rule

    return register


@_for("index_put_ index_put", begins=True)
def _marked(at_most: AtMost, args: Any, kwargs: Any) -> int | None:
    into, indices = args[:2]
    tensors = [index for index in indices if index is not None]
    if not all(isinstance(index, torch.Tensor) and index.dtype in (torch.int32, torch.int64) for index in tensors):
        return None
    left = [size for place, size in enumerate(into.shape) if place >= len(indices) or indices[place] is None]
    written = torch.broadcast_shapes(*(index.shape for index in tensors)).numel() * torch.Size(left).numel()
    return _added([at_most(into), written])


@_for("scatter_ scatter scatter_add_ scatter_add", begins=True)
def _scattered(at_most: AtMost, args: Any, kwargs: Any) -> int | None:
    into, _, index = args[:3]
    return _added([at_most(into), index.numel()])


@_for("index_fill_ index_fill", begins=True)
def _filled(at_most: AtMost, args: Any, kwargs: Any) -> int | None:
    into, dim, index = args[:3]
    along = into.shape[dim] if into.dim() else 1
    return _added([at_most(into), index.numel() * into.numel() // along if into.numel() else 0])


def _added(bounds: list[int | None]) -> int | None:
    known = [bound for bound in bounds if bound is not None]
    return sum(known) if bounds and len(known) == len(bounds) else None


@_for("_to_copy clone")
def _same(at_most: AtMost, args: Any, kwargs: Any) -> int | None:
    return at_most(args[0])


@_for("bitwise_or bitwise_or_ logical_or logical_or_ bitwise_xor logical_xor __or__ __ior__ add add_ maximum")
def _either(at_most: AtMost, args: Any, kwargs: Any) -> int | None:
    return _added(_of_both(at_most, args))


@_for("bitwise_and bitwise_and_ logical_and logical_and_ __and__ __iand__ mul mul_ minimum")
def _both(at_most: AtMost, args: Any, kwargs: Any) -> int | None:
    return min((bound for bound in _of_both(at_most, args) if bound is not None), default=None)


def _of_both(at_most: AtMost, args: Any) -> list[int | None]:
    """Of two tensors of one shape; of a number and others nothing is said."""
    first, second = args[:2]
    alike = isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor) and first.shape == second.shape
    return [at_most(first), at_most(second)] if alike else []


@_for("cat stack")
def _together(at_most: AtMost, args: Any, kwargs: Any) -> int | None:
    return _added([at_most(tensor) for tensor in args[0]])


def _compared(of_numbers: Callable[[Any], bool]) -> Rule:
    """A comparison with a number: where zero does not pass, no more elements do than are not zero."""

    def rule(at_most: AtMost, args: Any, kwargs: Any) -> int | None:
        number = args[1]
        return at_most(args[0]) if isinstance(number, (int, float)) and of_numbers(number) else None

    return rule


_for("ne gt")(_compared(lambda number: number == 0))
_for("eq ge")(_compared(lambda number: number > 0))
