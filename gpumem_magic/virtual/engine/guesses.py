"""What unknown values are taken to be, by the operator that made them: one number for all elements, or places in their order.

So that programs stay on their way: probabilities are even ones, indices are valid, masks select all, losses and norms are
small, positive and fall, and what follows from such numbers follows. A guess is a stand-in all the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine.rule_book import RuleBook
from gpumem_magic.virtual.engine.tensors import GUESS, VirtualTensor, all_attributes

# Each element is its place along the last dimension.
IOTA = "iota"

# Numbers below that are tolerances, or guards against zero.
_TOLERANCE = 1e-4

Guess = float | str | None
_Rule = Callable[..., Any]

# Rules ``rule(fresh, out, args, kwargs)``: the guess for a result, or a tuple of them. fresh() gives a number, each time a
# smaller one.
_BOOK: RuleBook[_Rule] = RuleBook()
_for, RULES = _BOOK.of, _BOOK.rules


def of(value: Any) -> Any:
    """What a number, or a tensor's elements, are taken to be; None where nothing was guessed."""
    if isinstance(value, VirtualTensor):
        return all_attributes(value).get(GUESS)
    return value if isinstance(value, (int, float)) else None


def _number(value: Any, fresh: Callable[[], float]) -> Any:
    """The same, with a number for every floating tensor."""
    found = of(value)
    if found is None and isinstance(value, VirtualTensor) and value.is_floating_point():
        found = all_attributes(value)[GUESS] = fresh()
    return None if isinstance(found, str) else found


def _one_for_all(value: float) -> _Rule:
    return lambda fresh, out, args, kwargs: value


for _names, _value in {
    "sigmoid hardsigmoid": 0.5,
    "exp cosh": 1.0,
    "norm linalg_vector_norm linalg_matrix_norm var std dist cdist _cdist_forward": 1.0,
    "argmax argmin": 0.0,
    "gt ge lt le isfinite": 1.0,
    "isnan isinf eq": 0.0,
    "ne": 1.0,
}.items():
    _for(_names)(_one_for_all(_value))


@_for("_softmax softmax _safe_softmax")
def _even(fresh: Any, out: Any, args: Any, kwargs: Any) -> float:
    return 1.0 / max(1, out.shape[args[1]] if out.dim() else 1)


@_for("_log_softmax log_softmax")
def _log_of_even(fresh: Any, out: Any, args: Any, kwargs: Any) -> float:
    return -math.log(max(1, out.shape[args[1]] if out.dim() else 1))


@_for("sort topk kthvalue")
def _sorted(fresh: Any, out: Any, args: Any, kwargs: Any) -> tuple[Guess, Guess]:
    return of(args[0]), IOTA


@_for("argsort randperm multinomial")
def _places(fresh: Any, out: Any, args: Any, kwargs: Any) -> str:
    return IOTA


@_for(
    "clone _to_copy copy contiguous index index_select gather masked_select amax amin mean median take embedding flip roll"
)
def _same(fresh: Any, out: Any, args: Any, kwargs: Any) -> Any:
    found = of(args[0])
    if found is None and out.dim() == 0 and out.is_floating_point():
        return fresh()
    return found


@_for("max min")
def _same_and_place(fresh: Any, out: Any, args: Any, kwargs: Any) -> Any:
    return (of(args[0]), 0.0) if isinstance(out, (tuple, list)) else _same(fresh, out, args, kwargs)


@_for("clamp clamp_ clip clip_ clamp_min clamp_min_")
def _at_least(fresh: Any, out: Any, args: Any, kwargs: Any) -> Any:
    least = of(args[1] if len(args) > 1 else kwargs.get("min"))
    return _bounded(fresh, out, args, least, of(args[2] if len(args) > 2 else kwargs.get("max")))


@_for("clamp_max clamp_max_")
def _at_most(fresh: Any, out: Any, args: Any, kwargs: Any) -> Any:
    return _bounded(fresh, out, args, None, of(args[1] if len(args) > 1 else kwargs.get("max")))


def _bounded(fresh: Any, out: Any, args: Any, least: Any, most: Any) -> Any:
    found = _same(fresh, out, args, {})
    # (A bound may be a tensor, of numbers that nobody guessed.)
    bounds = [bound for bound in (least, most) if isinstance(bound, (int, float))]
    if isinstance(found, str) or not bounds:
        return found
    value = 0.0 if found is None else found
    value = max(value, least) if least in bounds else value
    value = min(value, most) if most in bounds else value
    return None if found is None and not value else value


@_for("copy_")
def _copied(fresh: Any, out: Any, args: Any, kwargs: Any) -> Guess:
    return of(args[1]) if isinstance(args[1], VirtualTensor) else None


@_for("cat stack")
def _first(fresh: Any, out: Any, args: Any, kwargs: Any) -> Guess:
    return _number(args[0][0], fresh) if args[0] else None


@_for("sum")
def _sum(fresh: Any, out: Any, args: Any, kwargs: Any) -> Any:
    found = of(args[0])
    if isinstance(found, (int, float)):
        return found * args[0].numel() / max(1, out.numel())
    return fresh() if out.dim() == 0 and out.is_floating_point() else None


@_for("count_nonzero")
def _count(fresh: Any, out: Any, args: Any, kwargs: Any) -> Any:
    return 0.0 if of(args[0]) == 0 else args[0].numel() / max(1, out.numel())


@_for("any all")
def _as_its_elements(fresh: Any, out: Any, args: Any, kwargs: Any) -> Guess:
    found = of(args[0])
    return None if found is None or isinstance(found, str) else float(bool(found))


@_for("dot vdot")
def _product(fresh: Any, out: Any, args: Any, kwargs: Any) -> Guess:
    left, right = _number(args[0], fresh), _number(args[1], fresh)
    return None if left is None or right is None else left * right * args[0].numel()


@_for(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy nll_loss_forward nll_loss2d_forward kl_div _ctc_loss"
)
@_for("soft_margin_loss binary_cross_entropy_with_logits multi_margin_loss margin_ranking_loss")
def _loss(fresh: Any, out: Any, args: Any, kwargs: Any) -> Any:
    return (fresh(), None) if isinstance(out, (tuple, list)) else fresh()


@_for("logical_not bitwise_not")
def _not(fresh: Any, out: Any, args: Any, kwargs: Any) -> Guess:
    found = of(args[0])
    return None if found is None or out.dtype != torch.bool else float(not found)


def _arithmetic(function: Any) -> _Rule:
    def rule(fresh: Any, out: Any, args: Any, kwargs: Any) -> Guess:
        if not isinstance(out, VirtualTensor) or not (out.is_floating_point() or out.dtype == torch.bool):
            return None
        numbers = [_number(arg, fresh) for arg in args[:2] if arg is not None]
        if None in numbers:
            return None
        try:
            found = function(*numbers, **kwargs)
        except (ArithmeticError, ValueError, TypeError):
            return None
        return found if isinstance(found, (int, float)) and math.isfinite(found) else None

    return rule


def _alpha(value: Any) -> float:
    found = of(value)
    return 1.0 if found is None or isinstance(found, str) else float(found)


def _ratio(left: float, right: float) -> float | None:
    """None where an error is measured by a tolerance: that they are about as large is a better guess than any quotient."""
    return left / right if abs(right) >= _TOLERANCE or not left else None


for _names, _function in {
    "add add_": lambda left, right, alpha=1: left + right * _alpha(alpha),
    "sub sub_": lambda left, right, alpha=1: left - right * _alpha(alpha),
    "rsub": lambda left, right, alpha=1: right - left * _alpha(alpha),
    "mul mul_": lambda left, right: left * right,
    "div div_": lambda left, right, rounding_mode=None: _ratio(left, right),
    "neg neg_": lambda value: -value,
    "abs abs_": abs,
    "sqrt sqrt_": math.sqrt,
    "rsqrt": lambda value: 1 / math.sqrt(value),
    "reciprocal": lambda value: _ratio(1, value),
    "square": lambda value: value * value,
    "pow": lambda value, power: value**power,
    "log": math.log,
    "log2": math.log2,
    "log10": math.log10,
    "log1p": math.log1p,
    "relu relu_": lambda value: max(value, 0.0),
    "maximum": max,
    "minimum": min,
    "logical_and bitwise_and": lambda left, right: float(bool(left) and bool(right)),
    "logical_or bitwise_or": lambda left, right: float(bool(left) or bool(right)),
}.items():
    _for(_names)(_arithmetic(_function))


def of_factory(name: str) -> Guess:
    """For what a factory draws, by its name."""
    if name in ("rand", "rand_like"):
        return 0.5
    return IOTA if name == "randperm" else None


def note(rule: _Rule, fresh: Callable[[], float], out: Any, args: Any, kwargs: Any) -> None:
    """Puts the guess beside a result, or none where nothing follows."""
    found = rule(fresh, out, args, kwargs)
    outs = out if isinstance(out, (tuple, list)) else (out,)
    for leaf, guess in zip(outs, found if isinstance(found, tuple) else (found,) * len(outs), strict=False):
        if isinstance(leaf, VirtualTensor):
            if guess is None:
                all_attributes(leaf).pop(GUESS, None)
            else:
                all_attributes(leaf)[GUESS] = guess if guess == IOTA else _within(leaf.dtype, guess)


def _within(dtype: torch.dtype, guess: float) -> float:
    """Numbers that would grow without end stay within their type, and so do their sums; a number of elements is exact."""
    if dtype.is_floating_point or dtype.is_complex:
        most: float = float(torch.finfo(dtype).max) ** 0.75
    else:
        most = 1.0 if dtype == torch.bool else float(min(torch.iinfo(dtype).max, 1 << 53))
    return float(max(-most, min(most, guess)))


def fill(host: torch.Tensor, guess: Guess) -> torch.Tensor:
    """Writes a guess into a host tensor; zeros where there is none."""
    if guess == IOTA:
        return host.copy_(_aten.arange.default(host.shape[-1])) if host.dim() else host.zero_()
    if guess is None:
        return host.zero_()
    if not host.is_floating_point() and not host.is_complex() and host.dtype != torch.bool:
        guess = int(guess)
    return host.fill_(float(guess) if host.is_floating_point() else int(guess))
