"""Whether a variable, or an attribute, may still be read from a line of a program on, before it gets another value."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gpumem_magic.causes.statements import FUNCTIONS, each_target
from gpumem_magic.causes.written import Text

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_WITHS = (ast.With, ast.AsyncWith)
_INNER = (*FUNCTIONS, ast.Lambda, ast.ClassDef)
# These read whatever there is.
_READS_ALL = frozenset({"locals", "vars", "eval", "exec"})


def is_read_from(cell: Text, name: str, line: int) -> bool:
    """Whether a variable of the notebook may be read in the statement at a line of the cell, or after it, before it gets another
    value."""
    loops = cell.nodes_around(line - cell.ahead, _LOOPS)
    # (A later cell may read it, where this one gives it no other value.)
    later = not any(_gets_another(loop, name, line - cell.ahead) for loop in loops)
    return later or is_read_again(cell, name, line)


def is_read_again(cell: Text, name: str, line: int) -> bool:
    """Whether the cell may read a variable in the statement at a line, or after it, before it gets another value."""
    line -= cell.ahead
    reads, within = _reads(cell.tree.body, name)
    return within or _comes_to_one(cell.tree.body, reads, cell.nodes_around(line, _LOOPS), name, line)


def is_read_at_all(cell: Text, name: str) -> bool:
    """Whether the cell reads a variable anywhere."""
    return any(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
        for node in ast.walk(cell.tree)
    )


def is_read_in(text: Text, function: Any, name: str, line: int) -> bool:
    """Whether a function may read a variable of its own at a line of the text, or after it, before that gets another value."""
    reads, within = _reads(function.body, name)
    calls = (node.func for node in ast.walk(function) if isinstance(node, ast.Call))
    if within or any(isinstance(called, ast.Name) and called.id in _READS_ALL for called in calls):
        return True
    loops = [loop for loop in text.nodes_around(line, _LOOPS) if loop.lineno > function.lineno]
    return _comes_to_one(function.body, reads, loops, name, line)


def reads_attribute(text: Text, name: str) -> bool:
    """Whether a text has an object's attribute read elsewhere than in the functions that give it its value, or names it."""
    giving = {
        id(part)
        for function in _functions(text)
        if any(_is_attribute(node, name, ast.Store) for node in ast.walk(function))
        for part in ast.walk(function)
    }
    return any(
        (_is_attribute(node, name, (ast.Load, ast.Del)) and id(node) not in giving)
        or (isinstance(node, ast.Constant) and node.value == name)
        for node in ast.walk(text.tree)
    )


def gives_attribute(text: Text, name: str) -> bool:
    """Whether a function of a text gives an object's attribute a value."""
    return any(_is_attribute(node, name, ast.Store) for function in _functions(text) for node in ast.walk(function))


def _functions(text: Text) -> list[ast.AST]:
    return [node for node in ast.walk(text.tree) if isinstance(node, FUNCTIONS)]


def _is_attribute(node: ast.AST, name: str, way: Any) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, way)


def _reads(body: Iterable[ast.AST], name: str) -> tuple[list[int], bool]:
    """The lines in which a variable is read; and whether a function or a class in there has it."""
    nodes = [node for top in body for node in ast.walk(top)]
    lines = [
        node.lineno
        for node in nodes
        if isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Store)
    ]
    inner = (node for top in nodes if isinstance(top, _INNER) for node in ast.walk(top))
    return lines, any(isinstance(node, ast.Name) and node.id == name for node in inner)


def _comes_to_one(body: Sequence[ast.stmt], reads: Iterable[int], loops: Sequence[Any], name: str, line: int) -> bool:
    """Whether a line leads to one of the reads without another value on the way."""
    for read in reads:
        if read >= line:
            if not _is_given_first(body, name, line, read):
                return True
            continue
        around = [loop for loop in loops if loop.lineno <= read <= (loop.end_lineno or read)]
        # The smallest loop that leads from the line to the read again.
        inner = max(around, key=lambda loop: loop.lineno, default=None)
        if inner is None or _gets_another(inner, name, read):
            continue
        if not _is_given_first(inner.body, name, 0, read):
            return True
    return False


def _is_given_first(body: Sequence[ast.stmt], name: str, line: int, read: int) -> bool:
    """Whether what leads to a read gives the variable another value behind a line, in the same block as the read or in one around
    it."""
    for node in body:
        given = isinstance(node, ast.Assign) and name in _given(node.targets)
        if given and line < node.lineno and (node.end_lineno or node.lineno) < read:
            return True
        if node.lineno <= read <= (node.end_lineno or node.lineno):
            blocks = [
                part for key in ("body", "orelse", "finalbody") if isinstance(part := getattr(node, key, None), list)
            ]
            return any(_is_given_first(part, name, line, read) for part in blocks)
    return False


def _gets_another(loop: Any, name: str, line: int) -> bool:
    """Whether each turn of a loop gives a variable another value before a line: in its head, or in a statement that always
    runs."""
    if isinstance(loop, ast.For) and name in _given([loop.target]):
        return True
    for node in _always(loop.body):
        if node.lineno >= line and not (isinstance(node, ast.Assign) and node.lineno == line):
            return False
        if isinstance(node, ast.Assign) and name in _given(node.targets):
            return not any(isinstance(one, ast.Name) and one.id == name for one in ast.walk(node.value))
    return False


def _always(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, _WITHS):
            yield from _always(node.body)


def _given(targets: Iterable[ast.expr]) -> set[str]:
    return {part.id for one in targets for part in each_target(one) if isinstance(part, ast.Name)}
