"""Which names a cell makes anew: what they held before is no part of its run."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from gpumem_magic.looks.parsing import parsed


def names_read(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}


def names_given(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}


def made_anew(code: str) -> set[str]:
    """The names that a cell gives a value before anything in it reads them, in loops and under ``with``, too."""
    reader = _Reader()
    reader.follow(parsed(code).body)
    return reader.made


class _Reader:
    """Follows statements in their order. What stands under a condition may not run: it reads, and makes nothing."""

    def __init__(self) -> None:
        self.made: set[str] = set()
        self._read: set[str] = set()

    def follow(self, statements: Iterable[ast.stmt]) -> None:
        for statement in statements:
            if isinstance(statement, (ast.Assign, ast.AnnAssign)):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                if statement.value is not None:
                    self._assign(statement.value, targets)
            elif isinstance(statement, ast.AugAssign):
                self._read |= (names_read(statement.value) | names_given(statement.target)) - self.made
            elif isinstance(statement, (ast.For, ast.AsyncFor)):
                self._assign(statement.iter, [statement.target])
                self.follow([*statement.body, *statement.orelse])
            elif isinstance(statement, ast.While):
                self._reads(statement.test)
                self.follow([*statement.body, *statement.orelse])
            elif isinstance(statement, (ast.With, ast.AsyncWith)):
                for item in statement.items:
                    self._assign(item.context_expr, [item.optional_vars] if item.optional_vars is not None else [])
                self.follow(statement.body)
            else:
                self._reads(statement)

    def _assign(self, value: ast.expr, targets: Iterable[ast.expr]) -> None:
        self._reads(value)
        for target in targets:
            self.made |= names_given(target) - self._read
            self._reads(target)

    def _reads(self, node: ast.AST) -> None:
        self._read |= names_read(node) - self.made


def only_deleted(source: str) -> frozenset[str]:
    """The names that a cell deletes and gives no value: what they had is of earlier cells."""
    try:
        tree = parsed(source)
    except (SyntaxError, ValueError):  # lines of IPython's
        return frozenset()
    names = [one for one in ast.walk(tree) if isinstance(one, ast.Name)]
    return frozenset(one.id for one in names if isinstance(one.ctx, ast.Del)) - names_given(tree)
