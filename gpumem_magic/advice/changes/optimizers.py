"""Other ways to run the same optimizer, and smaller states."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from gpumem_magic.advice.draft import CellDraft, Unchangeable, called
from gpumem_magic.advice.proposal import DIFFERENT, ROUNDING, Proposal
from gpumem_magic.looks.optimizers import FUSED, OPTIMIZERS

if TYPE_CHECKING:
    from gpumem_magic.advice.evidence import Evidence

_WAYS = ("foreach", "fused")
_EIGHT_BIT = {
    "Adam": "Adam8bit",
    "AdamW": "AdamW8bit",
    "SGD": "SGD8bit",
    "RMSprop": "RMSprop8bit",
    "Adagrad": "Adagrad8bit",
}
# What bitsandbytes' have no argument for.
_UNKNOWN = frozenset({"foreach", "fused", "maximize", "capturable", "differentiable"})
_LEAST = 0.05


def ways(seen: Evidence, draft: CellDraft) -> Iterator[Proposal]:
    """``fused``, ``foreach``: how many temporaries a step has."""
    for way, value, names in (
        ("fused", "True", FUSED),
        ("foreach", "True", OPTIMIZERS),
        ("foreach", "False", OPTIMIZERS),
    ):
        calls = [call for call in draft.calls(names) if _would_change(call, way, value)]
        if calls:
            yield Proposal(f"{way}={value}", ROUNDING, partial(_run_in_way, way, value, names))


def _run_in_way(way: str, value: str, names: frozenset[str], draft: CellDraft) -> None:
    calls = [call for call in draft.calls(names) if _would_change(call, way, value)]
    for call in calls:
        draft.argument(call, way, value, _WAYS)
    if not calls:
        raise Unchangeable("no optimizer is made here")


def _would_change(call: ast.Call, way: str, value: str) -> bool:
    given = {word.arg: word.value for word in call.keywords if word.arg in _WAYS}
    is_on = {name: isinstance(node, ast.Constant) and node.value is True for name, node in given.items()}
    if not given:
        # PyTorch chooses foreach where nothing is said.
        return (way, value) != ("foreach", "True")
    if way == "fused":
        return not is_on.get("fused", False)
    return "fused" not in given and is_on.get("foreach", False) is not (value == "True")


def eight_bit(seen: Evidence, draft: CellDraft) -> Iterator[Proposal]:
    if seen.share("optimizer_state") < _LEAST or importlib.util.find_spec("bitsandbytes") is None:
        return

    def edit(draft: CellDraft) -> None:
        calls = [call for call in draft.calls(_EIGHT_BIT) if "torch" in draft.text(call.func)]
        for call in calls:
            draft.replace(call.func, f"bitsandbytes.optim.{_EIGHT_BIT[called(call)]}")
            for word in call.keywords:
                if word.arg in _UNKNOWN:
                    draft.without(call, word)
        if not calls:
            raise Unchangeable("no optimizer of PyTorch's is made here")
        draft.at_top("import bitsandbytes")

    yield Proposal("optimizer with 8-bit states (bitsandbytes)", DIFFERENT, edit)
