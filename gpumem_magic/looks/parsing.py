"""The user's program as a tree, read without a word."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from gpumem_magic.looks.warned import warnings_remembered


def parsed(source: str | bytes) -> ast.Module:
    """`ast.parse`, without what Python says of a text as it reads it (``invalid escape sequence``): it was said when the program
    was compiled, and where a filter makes errors of warnings it would be one. Raises the errors of `ast.parse` otherwise.
    """
    with _without_a_word():
        return ast.parse(source)


def parsed_expression(source: str) -> ast.expr:
    """The same of one expression."""
    with _without_a_word():
        return ast.parse(source, mode="eval").body


def expression_of(source: str) -> ast.expr | None:
    """The same, None where the text is no expression, or not all of one."""
    try:
        return parsed_expression(source)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def function_named(tree: ast.Module, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """A text's own function of that name, the first; None where it has none."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return next((one for one in tree.body if isinstance(one, kinds) and one.name == name), None)


def nodes_outside(scopes: tuple[type[ast.AST], ...], first: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """These and what is in them, but for what is in the scopes inside, such as other functions."""
    todo = list(first)
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, scopes):
            todo += ast.iter_child_nodes(node)


def begins_at(statement: ast.stmt) -> int:
    """The line of a statement, or of its first decorator."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(one.lineno for one in decorators)])


@contextmanager
def _without_a_word() -> Iterator[None]:
    with warnings_remembered(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
