"""What an `assert` says of the flag that it reads: it holds on a device, or the program would not be run there."""

from __future__ import annotations

import ast
import linecache
from functools import lru_cache

from gpumem_magic.looks.parsing import parsed


def asserted(file: str, line: int) -> bool | None:
    """What a flag that this line reads has to be; None where the line asserts nothing, or not plainly that."""
    return next((holds for first, last, holds in _asserts(file) if first <= line <= last), None)


@lru_cache(maxsize=64)
def _asserts(file: str) -> tuple[tuple[int, int, bool | None], ...]:
    source = "".join(linecache.getlines(file))
    if "assert" not in source:
        return ()
    try:
        tree = parsed(source)
    except (SyntaxError, ValueError, RecursionError):
        return ()
    return tuple(
        (one.lineno, one.test.end_lineno or one.lineno, _has_to_be(one.test))
        for one in ast.walk(tree)
        if isinstance(one, ast.Assert)
    )


def _has_to_be(test: ast.expr) -> bool | None:
    """What every flag in a test is where it holds; None where they are not the same, or nothing follows."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _has_to_be(test.operand)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp):
        parts = {_has_to_be(one) for one in test.values}
        return parts.pop() if len(parts) == 1 else None
    if isinstance(test, ast.Compare):
        return None if any(map(_may_read, (test.left, *test.comparators))) else True
    return True if isinstance(test, (ast.Call, ast.Name, ast.Attribute, ast.Subscript)) else None


# What reads flags, or numbers of a tensor, or asks such a thing itself: what is compared then is no flag of a tensor any more.
_READING = frozenset(
    (
        "item",
        "tolist",
        "numpy",
        "equal",
        "allclose",
        "is_nonzero",
        "bool",
        "any",
        "all",
        "max",
        "min",
        "sorted",
        "filter",
    )
)
# Of these, methods that give tensors.
_GIVING = frozenset(("any", "all", "max", "min"))


def _may_read(side: ast.expr) -> bool:
    """Whether a side of a comparison may read a flag by itself: `x.any().item() == False`, but not `x.isnan().sum() == 0`."""
    for one in ast.walk(side):
        if isinstance(one, (ast.BoolOp, ast.IfExp, ast.comprehension, ast.Compare)):
            return True
        if isinstance(one, ast.Call):
            function = one.func
            if isinstance(function, ast.Attribute) and (function.attr not in _READING or function.attr in _GIVING):
                continue
            if not isinstance(function, ast.Name) or function.id in _READING:
                return True
    return False
