"""Rewriting a program so that it says, at every statement of its own, that it is there.

Only what the program runs at module level is rewritten: bodies of ``for``, ``while``, ``if``, ``with``, ``try`` and ``match``,
not of functions and classes. The calls that are put in go to a hook (`hook.StatementHook`) found under a name that no one
would write, and return nothing that the program could see.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from typing import Any, TypeVar

from gpumem_magic.recording.source import Position, Source

Node = TypeVar("Node", bound=ast.AST)

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
if sys.version_info >= (3, 11):
    _TRIES: tuple[type[ast.stmt], ...] = (ast.Try, ast.TryStar)
else:
    _TRIES: tuple[type[ast.stmt], ...] = (ast.Try,)
COMPOUND: tuple[type[ast.stmt], ...] = (*_LOOPS, ast.If, ast.With, ast.AsyncWith, ast.Match, *_TRIES)
_JUMPS = (ast.Break, ast.Continue, ast.Raise, ast.Return)
_KINDS = {
    "AsyncFor": "for",
    "AsyncWith": "with",
    "ExceptHandler": "except",
    "FunctionDef": "def",
    "AsyncFunctionDef": "def",
    "ClassDef": "class",
    "Delete": "del",
    "AugAssign": "assign",
    "AnnAssign": "assign",
    "ImportFrom": "import",
    "TryStar": "try",
}


@dataclass(frozen=True)
class Statement:
    """A statement that the program itself wrote.

    line: as the author sees it, from 1; of a compound statement only its head. text: as it was written, without
    indentation before it. kind: "expr", "assign", "for", "while", "with", "if", "except", "match", "def", "import", and so on.
    depth: in how many compound statements it stands. header: this is the work of a compound statement's head (a test, the
    next item of a loop, entering or leaving a ``with``), not of its body.
    """

    index: int
    line: int
    text: str
    kind: str
    depth: int
    header: bool = False


@dataclass(frozen=True)
class Site:
    """Where a statement stands: `loops` are the indexes of the program's loops around it, outermost first."""

    statement: Statement
    loops: tuple[int, ...]
    start: Position
    end: Position

    def covers(self, position: Position) -> bool:
        return self.start <= position <= self.end


class Instrumenter:
    """Rewrites statements one after another, and numbers them in `sites`."""

    def __init__(self, source: Source, hook_name: str) -> None:
        self.sites: list[Site] = []
        self._source = source
        self._hook_name = hook_name
        self._loops: list[int] = []
        self._depth = 0

    def add(self, node: ast.stmt | ast.ExceptHandler) -> int:
        """Gives a statement its number."""
        start, end = self._source.span(node)
        kind = _KINDS.get(type(node).__name__, type(node).__name__.lower())
        index = len(self.sites)
        text = self._source.text(start, end)
        statement = Statement(index, start[0], text, kind, self._depth)
        self.sites.append(Site(statement, tuple(self._loops), start, end))
        return index

    def module(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """A whole file's statements. Its docstring and ``from __future__`` imports stay first, as Python wants them."""
        unchanged = 1 if body and _is_text(body[0]) else 0
        while unchanged < len(body) and _is_future_import(body[unchanged]):
            unchanged += 1
        return [*body[:unchanged], *self._block(body[unchanged:])]

    def rewrite(self, node: ast.stmt) -> list[ast.stmt]:
        """A statement and the calls around it and in it. The node itself is changed."""
        if isinstance(node, _LOOPS):
            return self._loop(node)
        if isinstance(node, ast.If):
            index = self.add(node)
            node.body = [self._tell("header", index, node), *self._inner(node.body)]
            # An `elif` stands beside its `if`, though the tree has it inside.
            chained = len(node.orelse) == 1 and self._source.is_elif(node.orelse[0])
            orelse = self._block(node.orelse) if chained else self._inner(node.orelse)
            node.orelse = [self._tell("header", index, node), *orelse]
            return [self._tell("before", index, node), node]
        if isinstance(node, ast.With | ast.AsyncWith):
            index = self.add(node)
            node.body = [self._tell("header", index, node), *self._inner(node.body)]
            return [self._tell("before", index, node), node, self._tell("header", index, node)]
        if isinstance(node, ast.Match):
            index = self.add(node)
            for case in node.cases:
                case.body = [self._tell("header", index, node), *self._inner(case.body)]
            return [self._tell("before", index, node), node, self._tell("header", index, node)]
        if isinstance(node, _TRIES):
            return self._try(node)
        index = self.add(node)
        around = self._tell("before", index, node), self._tell("after", index, node)
        # Nothing runs behind a jump in its own block, so its row is taken before it.
        return [*around, node] if isinstance(node, _JUMPS) else [around[0], node, around[1]]

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While) -> list[ast.stmt]:
        index = self.add(node)
        self._loops.append(index)
        body = self._inner(node.body)
        self._loops.pop()
        stop = ast.If(test=self._call("next_iteration", index, node), body=[_at(ast.Break(), node)], orelse=[])
        node.body = [_at(stop, node), *body]
        node.orelse = [self._tell("header", index, node), *self._inner(node.orelse)]
        return [self._tell("before", index, node), node]

    def _try(self, node: Any) -> list[ast.stmt]:
        # `try:` itself does nothing; by the time a handler begins, what the failing statement held has gone.
        node.body = self._inner(node.body)
        for handler in node.handlers:
            index = self.add(handler)
            handler.body = [self._tell("header", index, handler), *self._inner(handler.body)]
        node.orelse = self._inner(node.orelse)
        node.finalbody = self._inner(node.finalbody)
        return [node]

    def _inner(self, body: list[ast.stmt]) -> list[ast.stmt]:
        self._depth += 1
        rewritten = self._block(body)
        self._depth -= 1
        return rewritten

    def _block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        return [part for node in body for part in self.rewrite(node)]

    def _tell(self, method: str, index: int, at: ast.stmt | ast.ExceptHandler) -> ast.stmt:
        return _at(ast.Expr(self._call(method, index, at)), at)

    def _call(self, method: str, index: int, at: ast.stmt | ast.ExceptHandler) -> ast.expr:
        hook = ast.Name(self._hook_name, ast.Load())
        return _at(ast.Call(ast.Attribute(hook, method, ast.Load()), [ast.Constant(index)], []), at)


def _at(new: Node, old: ast.stmt | ast.ExceptHandler) -> Node:
    """Puts a new node and everything in it at the first character of the statement that it speaks of."""
    place = {
        "lineno": old.lineno,
        "end_lineno": old.lineno,
        "col_offset": old.col_offset,
        "end_col_offset": old.col_offset,
    }
    for part in ast.walk(new):
        if isinstance(part, ast.stmt | ast.expr):
            for name, value in place.items():
                setattr(part, name, value)
    return new


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_future_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"
