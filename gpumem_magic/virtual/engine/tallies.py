"""Masks that a program counts and selects by: nobody knows how many elements are true, but both say the same.

``n = keep.sum()``, ``x[keep].view(n, -1)``: a count is as large as what was selected by its mask, also where that comes after it.
Where the function that counts a mask, or asks whether any element is true, goes on to select by it, the answer is what the
selection will take. Elsewhere a count is a number like others, so that nobody is told that all answers were right.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Protocol

import torch

from gpumem_magic.looks.parsing import nodes_outside, parsed
from gpumem_magic.private import aten as _aten
from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine import guesses, shares, values
from gpumem_magic.virtual.engine.few import Exactly
from gpumem_magic.virtual.engine.tensors import COUNT, KNOWN, VirtualTensor, all_attributes

COUNTING = frozenset(overloads("sum count_nonzero"))
_ASKING = ("sum", "count_nonzero", "any")
_SELECTING = ("masked_select", "nonzero", "argwhere")
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class Masks(Protocol):
    """What an engine knows of masks."""

    def at_most(self, tensor: Any) -> int | None: ...
    def share(self, tensor: Any) -> Any: ...


def taken(masks: Masks, mask: Any) -> tuple[int, int | None]:
    """How many elements of a mask can be true at most, and how many are likely, if those are fewer."""
    found, share = masks.at_most(mask), masks.share(mask)
    most = mask.numel() if found is None else found
    likely = None if share is None or isinstance(most, Exactly) else shares.expected(share, mask)
    return most, likely if likely is not None and likely < most else None


def all_or_none(mask: Any, number: Any) -> int | None:
    """What each number of a count is, where a check found the same of all the mask's elements: none are nan, all are finite."""
    found = guesses.of(mask) if isinstance(mask, VirtualTensor) and mask.dtype == torch.bool else None
    if found not in (0.0, 1.0) or not isinstance(number, VirtualTensor) or KNOWN in all_attributes(number):
        return None
    count: int = mask.numel() // max(1, number.numel())
    return count if found else 0


def is_count(mask: Any, number: Any) -> bool:
    """Whether an operator of `COUNTING` has counted all of a mask, and the number is not known."""
    return (
        isinstance(mask, VirtualTensor)
        and mask.dtype == torch.bool
        and mask.layout is torch.strided
        and isinstance(number, VirtualTensor)
        and number.numel() == 1 != mask.numel()
        and KNOWN not in all_attributes(number)
    )


def note(masks: Masks, mask: Any, number: Any, line: tuple[str, int]) -> int | None:
    """What a mask's count is taken to be at a line of the program; None where only what is selected later will say it."""
    tally = values.tally_of(mask)
    all_attributes(number)[COUNT] = tally, values.version(number)
    if tally.count is not None:
        return tally.count
    if guesses.of(mask) == 0 or not selects_too(*line):
        return None
    most, likely = taken(masks, mask)
    return most if likely is None else likely


def selects_some(masks: Masks, func: Any, mask: Any, line: tuple[str, int]) -> bool:
    """Whether some element of a mask is taken to be true where a line asks for `any`: what is selected by it is not nothing."""
    return func is _aten.any.default and guesses.of(mask) != 0 and selects_too(*line) and taken(masks, mask)[0] > 0


def selects_too(file: str, line: int) -> bool:
    """Whether the line asks of a mask by which its function selects."""
    return any(first <= line <= last for first, last in _lines(file))


@lru_cache(maxsize=64)
def _lines(file: str) -> tuple[tuple[int, int], ...]:
    source = "".join(linecache.getlines(file))
    if not any(f"{name}(" in source for name in _ASKING):
        return ()
    try:
        tree = parsed(source)
    except (SyntaxError, ValueError, RecursionError):
        return ()
    scopes = [tree, *(node for node in ast.walk(tree) if isinstance(node, _SCOPES))]
    return tuple(line for scope in scopes for line in _asked_and_selected(scope))


def _asked_and_selected(scope: ast.AST) -> Iterator[tuple[int, int]]:
    asked: dict[str, list[tuple[int, int]]] = {}
    selected: set[str] = set()
    for node in nodes_outside(_SCOPES, ast.iter_child_nodes(scope)):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            selected.update(ast.dump(part) for part in parts if not isinstance(part, (ast.Constant, ast.Slice)))
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", None)
            subjects = [*node.args, *([node.func.value] if isinstance(node.func, ast.Attribute) else [])]
            if name in _ASKING:
                for one in subjects:
                    asked.setdefault(ast.dump(one), []).append((node.lineno, node.end_lineno or node.lineno))
            elif name in _SELECTING:
                selected.update(map(ast.dump, subjects))
    for mask in selected & asked.keys():
        yield from asked[mask]
