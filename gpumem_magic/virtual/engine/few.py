"""Masks in which a program marks places: nobody knows which, but no more than it wrote.

After ``mask = torch.zeros(n)`` and ``mask[places] = 1`` at most as many elements are not zero as there are places, and what is
made of such masks is bounded, too: so detectors sample boxes, and masked autoencoders shuffle what they keep. A bound belongs
to a storage (`few` of its `Placement`), so all views have it; it ends when something else is written there. So does that a list
of indices has each number once (`once`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine.rule_book import RuleBook


class Exactly(int):
    """A bound that is reached, as far as what nobody knows was counted so before."""


class Surely(Exactly):
    """The same whatever it is that nobody knows."""


class HowMany(Protocol):
    def at_most(self, tensor: Any) -> int | None:
        """How many elements are not zero, at most (or `Exactly`); None where nothing is known of it."""

    def at_most_around(self, view: Any) -> int | None:
        """How many elements of all that a view is a part of are not zero, at most; None for what is no part."""

    def has_each_once(self, indices: Any, dim: int) -> bool:
        """Whether no number is twice in any row along a dimension."""


# Rules ``rule(known, args, kwargs)``: how many elements of the result are not zero, at most; None where nothing says so.
Rule = Callable[[HowMany, Any, Any], "int | None"]
_BOOK: RuleBook[Rule] = RuleBook()
_for, asked, RULES, BEGINNING = _BOOK.of, _BOOK.ask, _BOOK.rules, _BOOK.beginning


@_for("index_put_ index_put", begins=True)
def _marked(known: HowMany, args: Any, kwargs: Any) -> int | None:
    into, indices = args[:2]
    tensors = [index for index in indices if index is not None]
    if not all(isinstance(index, torch.Tensor) and index.dtype in (torch.int32, torch.int64) for index in tensors):
        return None
    left = [size for place, size in enumerate(into.shape) if place >= len(indices) or indices[place] is None]
    written = torch.broadcast_shapes(*(index.shape for index in tensors)).numel() * torch.Size(left).numel()
    return _added([known.at_most(into), written])


@_for("fill_ copy_", begins=True)
def _written(known: HowMany, args: Any, kwargs: Any) -> int | None:
    """(As `fill_diagonal_` writes, too: into a view.)"""
    view, number = args[:2]
    around, count = known.at_most_around(view), view.numel()
    if isinstance(number, (int, float)) and isinstance(around, Exactly) and apart(view) == count:
        if around == 0:
            return type(around)(count) if number else around
        if not number and around * view.element_size() == view.untyped_storage().nbytes():
            return type(around)(around - count)
    return _added([around, count])


@_for("scatter_ scatter scatter_add_ scatter_add", begins=True)
def _scattered(known: HowMany, args: Any, kwargs: Any) -> int | None:
    into, _, index = args[:3]
    return _added([known.at_most(into), index.numel()])


@_for("index_fill_ index_fill", begins=True)
def _filled(known: HowMany, args: Any, kwargs: Any) -> int | None:
    into, dim, index = args[:3]
    along = into.shape[dim] if into.dim() else 1
    return _added([known.at_most(into), index.numel() * into.numel() // along if into.numel() else 0])


def _added(bounds: list[int | None]) -> int | None:
    said = [bound for bound in bounds if bound is not None]
    return sum(said) if bounds and len(said) == len(bounds) else None


@_for("clone")
def _same(known: HowMany, args: Any, kwargs: Any) -> int | None:
    return known.at_most(args[0])


@_for("_to_copy")
def _converted(known: HowMany, args: Any, kwargs: Any) -> int | None:
    """(A half is no zero, but that of integers.)"""
    bound = known.at_most(args[0])
    return bound if bound is None or kwargs.get("dtype") in (None, torch.bool, args[0].dtype) else int(bound)


@_for("logical_not bitwise_not")
def _inverted(known: HowMany, args: Any, kwargs: Any) -> int | None:
    return _the_others(known, args[0]) if args[0].dtype == torch.bool else None


def _the_others(known: HowMany, tensor: Any) -> int | None:
    """How many of its elements are zero."""
    bound = known.at_most(tensor)
    return type(bound)(tensor.numel() - bound) if isinstance(bound, Exactly) else None


@_for("bitwise_or bitwise_or_ logical_or logical_or_ bitwise_xor logical_xor __or__ __ior__ add add_ maximum")
def _either(known: HowMany, args: Any, kwargs: Any) -> int | None:
    return _added(_of_both(known, args))


@_for("bitwise_and bitwise_and_ logical_and logical_and_ __and__ __iand__ mul mul_ minimum")
def _both(known: HowMany, args: Any, kwargs: Any) -> int | None:
    return min((int(bound) for bound in _of_both(known, args) if bound is not None), default=None)


def _of_both(known: HowMany, args: Any) -> list[int | None]:
    """Of two tensors of one shape; of a number and others nothing is said."""
    first, second = args[:2]
    alike = isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor) and first.shape == second.shape
    return [known.at_most(first), known.at_most(second)] if alike else []


@_for("cat stack")
def _together(known: HowMany, args: Any, kwargs: Any) -> int | None:
    bounds = [known.at_most(tensor) for tensor in args[0]]
    most = _added(bounds)
    if most is None:
        return None
    kind = next(one for one in (Surely, Exactly, int) if all(isinstance(bound, one) for bound in bounds))
    return kind(most)


def _compared(of_numbers: Callable[[Any], bool]) -> Rule:
    """A comparison with a number: where zero does not pass, no more elements do than are not zero."""

    def rule(known: HowMany, args: Any, kwargs: Any) -> int | None:
        number = args[1]
        bound = known.at_most(args[0]) if isinstance(number, (int, float)) and of_numbers(number) else None
        return None if bound is None else int(bound)

    return rule


_at = _compared(lambda number: number > 0)
_for("ge")(_at)
_for("gt")(_compared(lambda number: number == 0))


@_for("ne")
def _unlike(known: HowMany, args: Any, kwargs: Any) -> int | None:
    """(What is no number is not zero, as it is counted.)"""
    is_zero = isinstance(args[1], (int, float)) and args[1] == 0
    return known.at_most(args[0]) if is_zero else None


@_for("eq")
def _like(known: HowMany, args: Any, kwargs: Any) -> int | None:
    if not isinstance(args[1], (int, float)) or args[1] != 0:
        return _at(known, args, kwargs)
    return _the_others(known, args[0])


@_for("gather", begins=True)
def _gathered(known: HowMany, args: Any, kwargs: Any) -> int | None:
    source, dim, index = args[:3]
    return _taken(known, source, index.shape == source.shape) if known.has_each_once(index, dim) else None


def _taken(known: HowMany, source: Any, is_all: bool) -> int | None:
    """Of elements that are taken once, if all are."""
    bound = known.at_most(source)
    return bound if bound is None or is_all else int(bound)


@_for("index_select", begins=True)
def _selected(known: HowMany, args: Any, kwargs: Any) -> int | None:
    source, dim, index = args[:3]
    return _taken(known, source, len(index) == source.shape[dim]) if known.has_each_once(index, 0) else None


@_for("index", begins=True)
def _looked_up(known: HowMany, args: Any, kwargs: Any) -> int | None:
    source, (index, *others) = args[0], args[1]
    alone = not others and index is not None and index.dim() == 1
    return _taken(known, source, len(index) == len(source)) if alone and known.has_each_once(index, 0) else None


@_for("repeat")
def _repeated(known: HowMany, args: Any, kwargs: Any) -> int | None:
    bound = known.at_most(args[0])
    return None if bound is None else type(bound)(bound * torch.Size(args[1]).numel())


def look_of(view: Any) -> tuple[Any, ...]:
    """What tells the views of a storage apart."""
    return view.storage_offset(), tuple(view.shape), tuple(view.stride())


def apart(view: Any) -> int:
    """How many elements it has that lie at different places."""
    sizes = [size for size, stride in zip(view.shape, view.stride(), strict=True) if stride or size < 1]
    return torch.Size(sizes).numel()


class Once(NamedTuple):
    """Of a list of indices: along which stride each row has every number once, how long a row is, and how often the list had been
    written to then."""

    stride: int
    length: int
    version: int


# What puts things in an order, and says which.
ORDERING = {_aten.sort.default, _aten.sort.stable, _aten.topk.default}


def dim_of_order(func: Any, args: Any, kwargs: Any) -> int:
    """Along which dimension such an operator gives no index twice."""
    place = [argument.name for argument in func._schema.arguments].index("dim")
    return int(args[place] if len(args) > place else kwargs.get("dim", -1))
