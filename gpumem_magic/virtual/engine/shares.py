"""Choices among so many, and draws by chance: nobody knows which, but what share to expect.

Which expert a token goes to is unknown, but among how many it was chosen is seen where it is chosen (`topk`, `argmax`). Choices
are taken to be spread evenly: of a mask ``chosen == expert`` that share is true, and so are counts of them. A mask
``torch.rand(n) < 0.15`` has its share by what draws it. What is taken from known integers at unknown places is one of them: of
the labels of what a detector found. Both belong to a storage (`among` and `share` of its `Placement`), so
all views have them; they end when something else is written there.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple, Protocol

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine.rule_book import RuleBook

# In place of a number of choices: numbers drawn evenly between zero and one.
UNIT = 0


class Drawn(Protocol):
    def among(self, tensor: Any) -> int | None:
        """Among how many each element was chosen, or `UNIT`; None where nothing is known of it."""

    def bound(self, tensor: Any) -> float | None:
        """The number nearest to zero that elements may be, where that is not zero; None where nothing says so."""


class Choices(Drawn, Protocol):
    def at_most(self, tensor: Any) -> int | None:
        """How many elements are not zero, at most; None where nothing is known of it."""

    def share(self, tensor: Any) -> Fraction | None:
        """Which share of a mask's elements is not zero; None where nothing says so."""

    def kinds(self, tensor: Any) -> int | None:
        """How many different integers a tensor may have, where they are known for sure and come again; None where they do not."""

    def chance(self, tensor: Any) -> float | None:
        """The mean of a tensor's elements, each between zero and one, where they are known for sure; None where they are not."""


class Spread(NamedTuple):
    """What an operator makes of choices. among, share, bound: of its result, or of the part of it at a place. total: what the
    counts that it makes add up to, and over how many of them that is spread (0: all)."""

    among: int | None = None
    share: Fraction | None = None
    total: tuple[int, int] | None = None
    place: int | None = None
    bound: float | None = None


# Rules ``rule(known, args, kwargs)``: what the result has; None where nothing follows.
Rule = Callable[[Choices, Any, Any], "Spread | None"]
_BOOK: RuleBook[Rule] = RuleBook()
_for, asked, RULES, BEGINNING = _BOOK.of, _BOOK.ask, _BOOK.rules, _BOOK.beginning


# ---- where choices begin


def _along(args: Any, kwargs: Any, place: int, otherwise: int | None) -> int | None:
    """How long the dimension is that an operator chooses along; None for all of several."""
    dim = args[place] if len(args) > place else kwargs.get("dim", otherwise)
    source = args[0]
    if not isinstance(source, torch.Tensor) or not source.dim():
        return None
    return source.shape[dim] if dim is not None else source.numel() if source.dim() == 1 else None


def _of_length(length: int | None, place: int | None = None) -> Spread | None:
    return Spread(among=length, place=place) if length is not None and length > 1 else None


@_for("topk", begins=True)
def _largest(known: Choices, args: Any, kwargs: Any) -> Spread | None:
    return _of_length(_along(args, kwargs, 2, -1), 1)


@_for("min", begins=True)
def _least_and_place(known: Choices, args: Any, kwargs: Any) -> Spread | None:
    # (Of all elements, or of two tensors, it gives numbers alone.)
    chooses = "dim" in kwargs or (len(args) > 1 and isinstance(args[1], int))
    return _of_length(_along(args, kwargs, 1, None), 1) if chooses else _of_bound(known.bound(args[0]))


@_for("max", begins=True)
def _largest_and_place(known: Choices, args: Any, kwargs: Any) -> Spread | None:
    highest = highest_of(known, args[0]) if len(args) == 1 and not kwargs else None
    return _of_bound(highest) or _least_and_place(known, args, kwargs)


@_for("amax")
def _largest_of_all(known: Choices, args: Any, kwargs: Any) -> Spread | None:
    return _of_bound(highest_of(known, args[0])) or _one_of_them(known, args, kwargs)


def _of_bound(bound: float | None) -> Spread | None:
    return Spread(bound=bound) if bound else None


@_for("clamp clamp_ clip clip_ clamp_min clamp_min_", begins=True)
def _clamped(known: Choices, args: Any, kwargs: Any) -> Spread | None:
    low = args[1] if len(args) > 1 else kwargs.get("min")
    return _within(known, args[0], low, args[2] if len(args) > 2 else kwargs.get("max"))


@_for("clamp_max clamp_max_", begins=True)
def _clamped_from_above(known: Choices, args: Any, kwargs: Any) -> Spread | None:
    return _within(known, args[0], None, args[1] if len(args) > 1 else kwargs.get("max"))


def _within(known: Choices, tensor: Any, low: Any, high: Any) -> Spread | None:
    found = known.bound(tensor) or 0.0
    found = max(found, low) if isinstance(low, (int, float)) else found
    return _of_bound(min(found, high) if isinstance(high, (int, float)) else found)


@_for("argmax argmin", begins=True)
def _place_of_largest(known: Choices, args: Any, kwargs: Any) -> Spread | None:
    return _of_length(_along(args, kwargs, 1, None))


@_for("multinomial", begins=True)
def _drawn(known: Choices, args: Any, kwargs: Any) -> Spread | None:
    return _of_length(_along(args[:1], {}, 1, -1))


@_for("rand_like", begins=True)
def _evenly_drawn(known: Choices, args: Any, kwargs: Any) -> Spread | None:
    return Spread(among=UNIT)


@_for("uniform_", begins=True)
def _drawn_between(known: Choices, args: Any, kwargs: Any) -> Spread | None:
    low, high = (*args[1:3], 0.0, 1.0)[:2] if len(args) != 2 else (args[1], 1.0)
    is_unit = (kwargs.get("from", low), kwargs.get("to", high)) == (0.0, 1.0)
    return Spread(among=UNIT) if is_unit else None


@_for("bernoulli", begins=True)
def _tossed(known: Choices, args: Any, kwargs: Any) -> Spread | None:
    """With the chances of an argument; without one the elements are them."""
    return _with_chance(known, args[1] if len(args) > 1 else kwargs.get("p", args[0]))


@_for("bernoulli_", begins=True)
def _tossed_in_place(known: Choices, args: Any, kwargs: Any) -> Spread | None:
    return _with_chance(known, args[1] if len(args) > 1 else kwargs.get("p", 0.5))


def _with_chance(known: Choices, chance: Any) -> Spread | None:
    """What comes true with a chance, or each element with its own."""
    if isinstance(chance, torch.Tensor):
        # (Chances that are drawn evenly themselves come to a half.)
        chance = 0.5 if known.among(chance) == UNIT else known.chance(chance)
    return None if chance is None else Spread(share=_chance(chance))


def of_factory(name: str, low: int, high: int | None) -> int | None:
    """Among how many a factory's numbers are drawn, by its name. low, high: the bounds of `randint`."""
    if name in ("rand", "rand_like"):
        return UNIT
    drawn = name in ("randint", "randint_like") and high is not None and low >= 0
    return high - low if drawn and high is not None and high - low > 1 else None


def lowest_drawn(among: int, low: int, high: int | None) -> float | None:
    """Of what `of_factory` found to be drawn among so many; None for zero."""
    return float(low) or None if among != UNIT else None


def drawn_evenly(like: torch.Tensor, low: int, high: int | None) -> torch.Tensor:
    """Whole numbers from `low` to below `high` in a tensor's shape on the host; of a single one the lowest."""
    steps = max(0, (high or 0) - low - 1)
    places = _aten.arange.default(like.numel())
    numbers: torch.Tensor = low + places * steps // max(1, like.numel() - 1)
    return numbers.reshape(like.shape).to(like.dtype)


def highest_of(known: Drawn, tensor: Any) -> float | None:
    """The highest of those that may be chosen, or drawn, which some element is likely to be; None where that is not known."""
    among = known.among(tensor)
    return (known.bound(tensor) or 0.0) + among - 1 if among else None


def _chance(number: float) -> Fraction:
    return Fraction(min(max(number, 0.0), 1.0)).limit_denominator(1 << 20)


# ---- masks


def _complement(rule: Rule) -> Rule:
    def other(known: Choices, args: Any, kwargs: Any) -> Spread | None:
        found = rule(known, args, kwargs)
        return None if found is None or found.share is None else Spread(share=1 - found.share)

    return other


def _equal(known: Choices, args: Any, kwargs: Any) -> Spread | None:
    """Choices beside one of those to choose among, or beside each."""
    for one, other in ((args[0], args[1]), (args[1], args[0])):
        among = known.among(one) if isinstance(one, torch.Tensor) else None
        if not among:
            continue
        # (A number for each choice says what was right, and not who goes where.)
        each = isinstance(other, torch.Tensor) and other.shape == torch.broadcast_shapes(one.shape, other.shape)
        return None if each and other.numel() > 1 else Spread(share=Fraction(1, among))
    share = known.share(args[0])
    if share is None or isinstance(args[1], torch.Tensor):
        return None
    return Spread(share=share if args[1] else 1 - share)


def _below(known: Choices, args: Any, kwargs: Any) -> Spread | None:
    """Draws between zero and one that are lower than a number, or higher than it; zeros and ones that are lower."""
    drawn, number = args[:2]
    if known.among(drawn) == UNIT:
        return _with_chance(known, number)
    if isinstance(number, torch.Tensor):
        lowest = known.chance(drawn) if known.among(number) == UNIT else None
        return None if lowest is None else Spread(share=1 - _chance(lowest))
    share = known.share(drawn)
    return Spread(share=1 - share) if share is not None and 0 <= number <= 1 else None


_for("eq")(_equal)
_for("ne")(_complement(_equal))
_for("lt le")(_below)
_for("gt ge")(_complement(_below))


@_for("scatter scatter_")
def _marked(known: Choices, args: Any, kwargs: Any) -> Spread | None:
    """Of zeros, those that rows choose; Transformers' masks have one place more, which nobody does."""
    into, dim, index = args[:3]
    among = known.among(index)
    if not among or among > into.shape[dim] or known.at_most(into) != 0:
        return None
    return Spread(share=Fraction(index.numel(), into.numel() // into.shape[dim] * among))


@_for("logical_not bitwise_not")
def _inverted(known: Choices, args: Any, kwargs: Any) -> Spread | None:
    share = known.share(args[0]) if args[0].dtype == torch.bool else None
    return None if share is None else Spread(share=1 - share)


def _of_both(known: Choices, args: Any) -> list[Fraction]:
    shares = [known.share(arg) for arg in args[:2] if isinstance(arg, torch.Tensor)]
    return [share for share in shares if share is not None]


@_for("logical_and bitwise_and __and__ logical_and_ bitwise_and_ __iand__ mul mul_")
def _and(known: Choices, args: Any, kwargs: Any) -> Spread | None:
    """(Who is turned away besides is not known.)"""
    found = _of_both(known, args)
    if not found and isinstance(args[1], (int, float)):
        return _of_bound(args[1] * (known.bound(args[0]) or 0.0))
    return Spread(share=math.prod(found, start=Fraction(1))) if found else None


@_for("logical_or bitwise_or __or__ logical_or_ bitwise_or_ __ior__")
def _or(known: Choices, args: Any, kwargs: Any) -> Spread | None:
    found = _of_both(known, args)
    return Spread(share=1 - (1 - found[0]) * (1 - found[1])) if len(found) == 2 else None


@_for("any")
def _any(known: Choices, args: Any, kwargs: Any) -> Spread | None:
    """(No row chooses the same twice.)"""
    share = known.share(args[0])
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if share is None or not isinstance(dim, int):
        return None
    return Spread(share=min(Fraction(1), share * args[0].shape[dim]))


# ---- what is only moved


@_for("clone _to_copy repeat")
def _same(known: Choices, args: Any, kwargs: Any) -> Spread | None:
    found = Spread(known.among(args[0]), known.share(args[0]), bound=known.bound(args[0]))
    return None if found == Spread() else found


@_for("index index_select gather masked_select", begins=True)
def _taken(known: Choices, args: Any, kwargs: Any) -> Spread | None:
    return _same(known, args, kwargs) or _of_length(known.kinds(args[0]))


@_for("cat stack")
def _together(known: Choices, args: Any, kwargs: Any) -> Spread | None:
    parts = {_same(known, (tensor,), {}) for tensor in args[0]}
    return parts.pop() if len(parts) == 1 else None


# ---- what was clamped


@_for("amin mean median")
def _one_of_them(known: Choices, args: Any, kwargs: Any) -> Spread | None:
    return _of_bound(known.bound(args[0]))


def _by(function: Callable[[float], float]) -> Rule:
    def rule(known: Choices, args: Any, kwargs: Any) -> Spread | None:
        bound = known.bound(args[0])
        return None if bound is None or len(args) > 1 or kwargs else _of_bound(function(bound))

    return rule


_FUNCTIONS: dict[str, Callable[[float], float]] = {
    "ceil": math.ceil,
    "floor": math.floor,
    "round": round,
    "trunc": math.trunc,
    "neg": operator.neg,
}
for _name, _function in _FUNCTIONS.items():
    _for(_name)(_by(_function))


@_for("div")
def _divided(known: Choices, args: Any, kwargs: Any) -> Spread | None:
    bound = known.bound(args[0])
    return (
        None
        if bound is None or kwargs or not isinstance(args[1], (int, float)) or not args[1]
        else _of_bound(bound / args[1])
    )


# ---- counts


def is_counted(tensor: torch.Tensor) -> bool:
    """Whether it has integers or flags."""
    return not (tensor.is_floating_point() or tensor.is_complex())


@_for("sum count_nonzero")
def _counted(known: Choices, args: Any, kwargs: Any) -> Spread | None:
    share = known.share(args[0]) if is_counted(args[0]) else None
    if share is None:
        return _of_bound((known.bound(args[0]) or 0.0) * args[0].numel()) if len(args) == 1 and not kwargs else None
    total, most = expected(share, args[0]), known.at_most(args[0])
    return Spread(total=(total if most is None else min(total, most), 0))


@_for("bincount")
def _counts(known: Choices, args: Any, kwargs: Any) -> Spread | None:
    among = known.among(args[0])
    weighted = kwargs.get("weights", args[1] if len(args) > 1 else None) is not None
    return Spread(total=(args[0].numel(), among)) if among and not weighted else None


@_for("histc")
def _histogram(known: Choices, args: Any, kwargs: Any) -> Spread | None:
    """A bin for each choice: with as many as there are, and none besides."""
    among = known.among(args[0])
    bins = kwargs.get("bins", args[1] if len(args) > 1 else 100)
    return Spread(total=(args[0].numel(), among)) if among and among == bins else None


def spread_evenly(total: int, among: int, like: torch.Tensor) -> torch.Tensor:
    """Counts in a tensor's shape on the host that add up to `total`, over its first ones (0: all)."""
    places = _aten.arange.default(like.numel())
    over = max(1, min(among or like.numel(), like.numel()))
    counts = (total // over + (places < total % over).long()) * (places < over)
    shaped: torch.Tensor = counts.reshape(like.shape).to(like.dtype)
    return shaped


def fill(host: torch.Tensor, share: Fraction) -> torch.Tensor:
    """Writes a mask into a host tensor that has its share of ones, evenly apart."""
    part = share.limit_denominator(1 << 20)
    ends = (_aten.arange.default(host.numel() + 1) * part.numerator + part.denominator - 1) // part.denominator
    return host.copy_(ends.diff().reshape(host.shape))


def expected(share: Fraction, mask: torch.Tensor) -> int:
    """How many elements of a mask are taken to be true."""
    return math.ceil(share * mask.numel())
