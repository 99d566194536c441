"""Where a program's text has a forward with its backward behind it, in one list of statements."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from gpumem_magic.advice.draft import CellDraft, call_of, called
from gpumem_magic.advice.evidence import Evidence

_NO_FORWARD = frozenset({"zero_grad", "step", "to", "cuda", "train", "eval", "print", "update", "append"})


@dataclass(frozen=True)
class Forward:
    """statements: those of the forward, in order; backward: the call behind them, in its statement; suite: all around them."""

    suite: list[ast.stmt]
    statements: list[ast.stmt]
    backward: ast.Call
    statement: ast.stmt


def forwards(draft: CellDraft, seen: Evidence) -> list[Forward]:
    """From the first statement that calls a module (or, where none has a name, that computes something) to the backward."""
    modules = {one.name for one in seen.modules}
    found = []
    for suite in draft.suites():
        for place, statement in enumerate(suite):
            call = call_of(statement)
            if call is None or called(call) != "backward" or not isinstance(call.func, ast.Attribute):
                continue
            before = suite[_behind_the_last_backward(suite, place) : place]
            first = next((at for at, one in enumerate(before) if _calls_one_of(one, modules)), None)
            if first is None:
                first = next((at for at, one in enumerate(before) if _computes(one)), None)
            if first is None:
                continue
            inside = before[first:]
            while inside and (last := call_of(inside[-1])) is not None and called(last) in _NO_FORWARD:
                inside = inside[:-1]
            if inside:
                found.append(Forward(suite, inside, call, statement))
    return found


def _behind_the_last_backward(suite: list[ast.stmt], place: int) -> int:
    for at in range(place - 1, -1, -1):
        call = call_of(suite[at])
        if call is not None and called(call) in ("backward", "step"):
            return at + 1
    return 0


def _calls_one_of(statement: ast.stmt, modules: set[str]) -> bool:
    for node in ast.walk(statement):
        if isinstance(node, ast.Call):
            root: ast.expr = node.func
            while isinstance(root, (ast.Attribute, ast.Subscript)):
                root = root.value
            if isinstance(root, ast.Name) and root.id in modules and called(node) not in _NO_FORWARD:
                return True
    return False


def _computes(statement: ast.stmt) -> bool:
    if not isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.For, ast.With)):
        return False
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return any(called(call) not in _NO_FORWARD for call in calls)
