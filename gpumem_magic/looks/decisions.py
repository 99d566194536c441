"""Whether a loop ends by what a line reads: asked of the source text alone.

A value counts where it stands in the test of a ``while``, or of an ``if`` that leaves a loop, and so does every name that is
assigned from it in the same function. Checks for numbers that are none (``isnan``) are no such tests: their answer is known.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator

_Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef
_LEAVES = (ast.Break, ast.Return, ast.Raise)
_CHECKS = ("isnan", "isinf", "isfinite")


def ends_a_loop(file: str, line: int) -> bool:
    """Whether a loop in that file may go on or end by what this line reads. False where the source is not to be had."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return False
    scope = _innermost(tree, line)
    names = _assigned_from(scope, line)
    return any(_covers(test, line) or bool(names & _names(test)) for test in _tests(scope, False) if not _checks(test))


def waits(file: str, line: int) -> bool:
    """Whether the line is the test of a ``while``."""
    return linecache.getline(file, line).lstrip().startswith("while ")


def _innermost(tree: ast.Module, line: int) -> _Scope:
    found: _Scope = tree
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and _covers(node, line):
            # (Walked from the outside in.)
            found = node
    return found


def _covers(node: ast.stmt | ast.expr, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _checks(test: ast.expr) -> bool:
    asked = {one.attr for one in ast.walk(test) if isinstance(one, ast.Attribute)} | _names(test)
    return any(name in asked for name in _CHECKS)


def _assigned_from(scope: _Scope, line: int) -> set[str]:
    """The names that hold what the line reads, or what is made of that."""
    found: set[str] = set()
    statements = [
        node for node in ast.walk(scope) if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr))
    ]
    while True:
        before = len(found)
        for node in statements:
            if node.value is not None and (_covers(node.value, line) or found & _names(node.value)):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    found |= _names(target)
        if len(found) == before:
            return found


def _tests(node: ast.AST, in_loop: bool) -> Iterator[ast.expr]:
    """The tests by which loops end."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        inside = in_loop or isinstance(child, (ast.While, ast.For, ast.AsyncFor))
        if isinstance(child, ast.While) or (
            isinstance(child, ast.If) and in_loop and any(isinstance(one, _LEAVES) for one in ast.walk(child))
        ):
            yield child.test
        yield from _tests(child, inside)
