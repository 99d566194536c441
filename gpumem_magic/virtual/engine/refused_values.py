"""Values that a kernel refuses: indices behind the end, labels of no class, chances above one.

On a card most of them stop the kernel (``CUDA_KERNEL_ASSERT``), and a later line fails with "CUDA error: device-side assert
triggered"; the others are looked at before. Where the values are known, the line that hands them over raises what the host says
of them, as with ``values=real``. Only those values are asked for, whatever else is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gpumem_magic.virtual.engine.arguments import refused_range
from gpumem_magic.virtual.engine.rule_book import RuleBook

# The values of an argument on the host where they are known for sure and not too many to look at; None where they are not.
Values = Callable[[Any], "torch.Tensor | None"]
# Rules ``rule(values, given)``: the error of a call whose values are refused. given: the operator's arguments by their names.
Rule = Callable[[Values, Mapping[str, Any]], "Exception | None"]
_BOOK: RuleBook[Rule] = RuleBook()
_for, RULES = _BOOK.of, _BOOK.rules


def refusal(func: Any, rule: Rule, values: Values, args: Any, kwargs: Any) -> Exception | None:
    """The error of an operator's call whose values are refused; None where none is known to be."""
    given = {argument.name: argument.default_value for argument in func._schema.arguments}
    given.update(zip(given, args, strict=False))
    given.update(kwargs)
    error: Exception | None = _BOOK.ask(rule, values, given)
    return error


def _first_outside(values: torch.Tensor | None, low: float, end: float) -> int | None:
    """The first number that is below `low`, or not below `end`."""
    if values is None or not values.numel() or values.is_floating_point():
        return None
    lowest, highest = values.aminmax()
    if lowest >= low and highest < end:
        return None
    return int(values[(values < low) | (values >= end)][0])


def _any(wrong: torch.Tensor) -> bool:
    return bool(wrong.any())


# ---- indices


def _along(wraps: bool, kind: type[Exception], words: str) -> Rule:
    """Indices along a dimension. wraps: whether they may count from the end."""

    def rule(values: Values, given: Mapping[str, Any]) -> Exception | None:
        source = given["self"]
        dim = given["dim"] % max(source.dim(), 1)
        size = source.shape[dim] if source.dim() else 1
        wrong = _first_outside(values(given["index"]), -size if wraps else 0, size)
        return None if wrong is None else kind(words.format(index=wrong, dim=dim, size=size))

    return rule


_OUT_OF_BOUNDS = "index {index} is out of bounds for dimension {dim} with size {size}"
_for("gather scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_ index_add index_add_")(
    _along(False, RuntimeError, _OUT_OF_BOUNDS)
)
_for("index_copy index_copy_")(_along(False, IndexError, f"index_copy_(): {_OUT_OF_BOUNDS}"))
_for("index_fill index_fill_")(_along(True, IndexError, _OUT_OF_BOUNDS))
_for("index_select index_reduce index_reduce_")(_along(False, IndexError, "index out of range in self"))


@_for("index index_put index_put_")
def _lists(values: Values, given: Mapping[str, Any]) -> Exception | None:
    source, dim = given["self"], 0
    for index in given["indices"]:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            dim += index.dim()
            continue
        size = source.shape[dim]
        wrong = None if index is None else _first_outside(values(index), -size, size)
        if wrong is not None:
            return IndexError(_OUT_OF_BOUNDS.format(index=wrong, dim=dim, size=size))
        dim += 1
    return None


@_for("take put put_")
def _places(values: Values, given: Mapping[str, Any]) -> Exception | None:
    count = given["self"].numel()
    wrong = _first_outside(values(given["index"]), -count, count)
    if wrong is None:
        return None
    return IndexError(f"out of range: tried to access index {wrong} on a tensor of {count} elements.")


@_for("embedding")
def _rows(values: Values, given: Mapping[str, Any]) -> Exception | None:
    wrong = _first_outside(values(given["indices"]), 0, len(given["weight"]))
    return None if wrong is None else IndexError("index out of range in self")


@_for("_embedding_bag _embedding_bag_forward_only")
def _rows_of_bags(values: Values, given: Mapping[str, Any]) -> Exception | None:
    rows = len(given["weight"])
    wrong = _first_outside(values(given["indices"]), 0, rows)
    if wrong is None:
        return None
    return RuntimeError(f"An index of input takes value {wrong} which is not in the valid range [0, {rows})")


@_for("nll_loss_forward nll_loss2d_forward")
def _labels(values: Values, given: Mapping[str, Any]) -> Exception | None:
    scores, target = given["self"], values(given["target"])
    if target is None:
        return None
    classes = scores.shape[1 if scores.dim() > 1 else 0]
    wrong = _first_outside(target[target != given["ignore_index"]], 0, classes)
    return None if wrong is None else IndexError(f"Target {wrong} is out of bounds.")


@_for("multi_margin_loss")
def _classes(values: Values, given: Mapping[str, Any]) -> Exception | None:
    wrong = _first_outside(values(given["target"]), 0, given["self"].shape[-1])
    return None if wrong is None else RuntimeError("target out of range")


@_for("masked_scatter masked_scatter_")
def _as_many(values: Values, given: Mapping[str, Any]) -> Exception | None:
    into, mask = given["self"], values(given["mask"])
    if mask is None:
        return None
    asked = int(mask.expand(torch.broadcast_shapes(mask.shape, into.shape)).sum())
    if asked <= given["source"].numel():
        return None
    return RuntimeError("Number of elements of source < number of ones in mask")


# ---- counts and lengths


@_for("bincount")
def _counted(values: Values, given: Mapping[str, Any]) -> Exception | None:
    wrong = _first_outside(values(given["self"]), 0, math.inf)
    return None if wrong is None else RuntimeError("bincount only supports 1-d non-negative integral inputs.")


@_for("histc")
def _ends(values: Values, given: Mapping[str, Any]) -> Exception | None:
    """Without ends of its own a histogram's are those of the values."""
    known = None if given["min"] != given["max"] else values(given["self"])
    if known is None or not known.numel() or not known.is_floating_point():
        return None
    lowest, highest = known.aminmax()
    return refused_range(float(lowest), float(highest))


@_for("segment_reduce")
def _segments(values: Values, given: Mapping[str, Any]) -> Exception | None:
    lengths = None if given["unsafe"] or given["lengths"] is None else values(given["lengths"])
    if lengths is None:
        return None
    if _any(lengths < 0):
        return RuntimeError("lengths contains negative value!")
    if not _any(lengths.sum(-1) != given["data"].shape[lengths.dim() - 1]):
        return None
    return RuntimeError(
        "segment_reduce(): Expected all rows of lengths along axis to sum to data.size(lengths.dim()-1) when !unsafe."
    )


@_for("repeat_interleave")
def _repeated(values: Values, given: Mapping[str, Any]) -> Exception | None:
    wrong = _first_outside(values(given["repeats"]), 0, math.inf)
    return None if wrong is None else RuntimeError("repeats can not be negative")


@_for("_assert_async")
def _asserted(values: Values, given: Mapping[str, Any]) -> Exception | None:
    value = values(given["self"])
    if value is None or value.numel() != 1 or bool(value):
        return None
    return RuntimeError(given.get("assert_msg") or "Expected Tensor with single nonzero value, but got zero")


@_for("searchsorted")
def _sorter(values: Values, given: Mapping[str, Any]) -> Exception | None:
    sorter = given["sorter"]
    wrong = None if sorter is None else _first_outside(values(sorter), 0, sorter.shape[-1])
    return None if wrong is None else RuntimeError("torch.searchsorted(): sorter index out of range")


@_for("max_unpool2d max_unpool3d")
def _from_places(values: Values, given: Mapping[str, Any]) -> Exception | None:
    size = given["output_size"]
    wrong = _first_outside(values(given["indices"]), 0, math.prod(size))
    if wrong is None:
        return None
    volumes = "x".join(map(str, size))
    return RuntimeError(f"Found an invalid max index: {wrong} (output volumes are of size {volumes})")


# ---- chances


@_for("multinomial")
def _weights(values: Values, given: Mapping[str, Any]) -> Exception | None:
    weights = values(given["self"])
    if weights is None or not weights.numel():
        return None
    if _any(~weights.isfinite() | (weights < 0)):
        return RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
    if _any(weights.sum(-1) == 0):
        return RuntimeError("invalid multinomial distribution (sum of probabilities <= 0)")
    return None


def _is_no_chance(values: torch.Tensor | None) -> bool:
    return values is not None and _any(~((values >= 0) & (values <= 1)))


@_for("bernoulli bernoulli_")
def _tossed(values: Values, given: Mapping[str, Any]) -> Exception | None:
    # (Without chances of their own the elements are them.)
    chances = given.get("p", given["self"])
    if not isinstance(chances, torch.Tensor) or not _is_no_chance(values(chances)):
        return None
    return RuntimeError("Expected p_in >= 0 && p_in <= 1 to be true, but got false.")


@_for("normal")
def _deviation(values: Values, given: Mapping[str, Any]) -> Exception | None:
    deviation = given["std"]
    known = values(deviation) if isinstance(deviation, torch.Tensor) else None
    if known is None or not _any(known < 0):
        return None
    return RuntimeError("normal expects all elements of std >= 0.0")


@_for("poisson")
def _rate(values: Values, given: Mapping[str, Any]) -> Exception | None:
    rate = values(given["self"])
    if rate is None or not _any(rate < 0):
        return None
    return RuntimeError("invalid Poisson rate, expected rate to be non-negative")


@_for("binary_cross_entropy")
def _likely(values: Values, given: Mapping[str, Any]) -> Exception | None:
    for name, called in (("self", "input"), ("target", "target")):
        if _is_no_chance(values(given[name])):
            return RuntimeError(f"all elements of {called} should be between 0 and 1")
    return None
