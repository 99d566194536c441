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
        # A call's answer may be read before it is compared: `x.any().item() == False`.
        return None if any(isinstance(one, ast.Call) for one in (test.left, *test.comparators)) else True
    return True if isinstance(test, (ast.Call, ast.Name, ast.Attribute, ast.Subscript)) else None
