"""Rewriting a program so that it reports each of its own statements as it reaches it.

What the program runs at module level is rewritten: bodies of ``for``, ``while``, ``if``, ``with``, ``try`` and ``match``, not of
classes; and of functions only those that are to be opened (`functions.opened_functions`). The calls that are put in go to a hook
(`hook.StatementHook`), which is a constant of the code, and return nothing that the program could see.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Container, Mapping
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from types import CodeType
from typing import Any, TypeVar

from gpumem_magic.recording.functions import Opened
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
    next item of a loop, entering or leaving a ``with``), not of its body. function: in which function of the program's, "" at
    module level. ended: what the end of a call did that was opened, such as letting go of its variables.
    """

    index: int
    line: int
    text: str
    kind: str
    depth: int
    header: bool = False
    function: str = ""
    ended: bool = False

    @cached_property
    def label(self) -> str:
        """Its first line, for a reader."""
        first = self.text.partition("\n")[0]
        first = f"end of {first}" if self.ended else first
        return f"{self.function}: {first}" if self.function else first


@dataclass(frozen=True)
class Site:
    """Where a statement stands: `loops` are the indexes of the program's loops around it, outermost first; `owner` is the
    index of the opened function's ``def``, None at module level."""

    statement: Statement
    loops: tuple[int, ...]
    start: Position
    end: Position
    owner: int | None = None

    @property
    def is_definition(self) -> bool:
        """Whether it is the head of a function or a class."""
        return self.statement.kind in ("def", "class")

    def covers(self, position: Position) -> bool:
        return self.start <= position <= self.end


class Instrumenter:
    """Rewrites statements one after another, and numbers them in `sites`.

    rests: loops have their body twice, as it is for iterations that need not be told (see `rest.Rest`), and with the calls.
    limited: the observer may end a loop; its variable then stays as `break` leaves it, and so no loop rests. opened: functions
    whose bodies are there twice, too, for calls that are told and for others.
    """

    def __init__(
        self, source: Source, hook_name: str, *, rests: bool = True, limited: bool = False, opened: Opened | None = None
    ) -> None:
        self.sites: list[Site] = []
        self._rests = rests and not limited
        self._limited = limited
        self._source = source
        self._hook_name = hook_name
        self._loops: list[int] = []
        self._depth = 0
        self._opened = opened or {}
        self._owner: int | None = None
        self._function = ""

    def add(self, node: ast.stmt | ast.ExceptHandler) -> int:
        """Gives a statement its number."""
        start, end = self._source.span(node)
        kind = _KINDS.get(type(node).__name__, type(node).__name__.lower())
        index = len(self.sites)
        text = self._source.text(start, end)
        statement = Statement(index, start[0], text, kind, self._depth, function=self._function)
        self.sites.append(Site(statement, tuple(self._loops), start, end, self._owner))
        return index

    def module(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """A whole file's statements. Its docstring and ``from __future__`` imports stay first, as Python wants them."""
        unchanged = 1 if body and _is_text(body[0]) else 0
        while unchanged < len(body) and _is_future_import(body[unchanged]):
            unchanged += 1
        return [*body[:unchanged], *self._block(body[unchanged:])]

    def rewrite(self, node: ast.stmt) -> list[ast.stmt]:
        """A statement and the calls around it and in it. The node itself stays as it is."""
        if isinstance(node, _LOOPS):
            return self._loop(node)
        if isinstance(node, ast.If):
            return self._if(node)
        if isinstance(node, ast.With | ast.AsyncWith):
            index = self.add(node)
            made = _copied(node, body=[self._tell("header", index, node), *self._inner(node.body)])
            return [self._tell("before", index, node), made, self._tell("header", index, node)]
        if isinstance(node, ast.Match):
            index = self.add(node)
            cases = [
                _copied(case, body=[self._tell("header", index, node), *self._inner(case.body)]) for case in node.cases
            ]
            return [
                self._tell("before", index, node),
                _copied(node, cases=cases),
                self._tell("header", index, node),
            ]
        if isinstance(node, _TRIES):
            return [self._try(node)]
        index = self.add(node)
        around = self._tell("before", index, node), self._tell("after", index, node)
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            return [around[0], self._definition(node, index), around[1]]
        if isinstance(node, ast.Global | ast.Nonlocal) and ((self._loops and self._rests) or self._owner is not None):
            # The copy of the body that is not told has said it already, and twice is an error.
            return [*around]
        if isinstance(node, ast.Return) and node.value is not None:
            value = ast.Call(self._method("returned", node), [_at(ast.Constant(index), node), node.value], [])
            return [around[0], _placed(ast.Return(_placed(value, node)), node)]
        # Nothing runs behind a jump in its own block, so its row is taken before it.
        return [*around, node] if isinstance(node, _JUMPS) else [around[0], node, around[1]]

    def _definition(self, node: ast.FunctionDef | ast.ClassDef, index: int) -> ast.stmt:
        """A function or class, with what is to be opened in it.

        def function():
            if hook.skips(index): body
            else:
                try: told body
                finally: hook.leaves()
        """
        if isinstance(node, ast.ClassDef):
            body = [
                self._definition(one, self.add(one)) if one in self._opened else one  # type: ignore[arg-type]
                for one in node.body
            ]
            return node if body == node.body else _copied(node, body=body)
        if node not in self._opened:
            return node
        outside = self._loops, self._depth, self._owner, self._function
        self._loops, self._depth, self._owner, self._function = [], 0, index, self._opened[node]
        start = 1 if _is_text(node.body[0]) else 0
        told = self._block(node.body[start:]) or [_at(ast.Pass(), node)]
        self._loops, self._depth, self._owner, self._function = outside
        leaves = _at(ast.Expr(ast.Call(self._method("leaves", node), [], [])), node)
        guarded = _placed(ast.Try(told, [], [], [leaves]), node)
        choice = ast.If(self._call("skips", index, node), node.body[start:] or [_at(ast.Pass(), node)], [guarded])
        return _copied(node, body=[*node.body[:start], _placed(choice, node)])

    def _if(self, node: ast.If) -> list[ast.stmt]:
        """With all of its ``elif``, one after another: there may be hundreds, each inside the one before."""
        index = self.add(node)
        first = [self._tell("before", index, node)]
        block = first
        while True:
            made = _copied(node, body=[self._tell("header", index, node), *self._inner(node.body)])
            block.append(made)
            block = made.orelse = [self._tell("header", index, node)]
            # An `elif` stands beside its `if`, though the tree has it inside.
            following = node.orelse[0] if len(node.orelse) == 1 else None
            if not isinstance(following, ast.If) or not self._source.is_elif(following):
                block += self._inner(node.orelse)
                return first
            node = following
            index = self.add(node)
            block.append(self._tell("before", index, node))

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While) -> list[ast.stmt]:
        index = self.add(node)
        self._loops.append(index)
        body = self._inner(node.body)
        self._loops.pop()
        stop = _placed(ast.If(self._call("next_iteration", index, node), [_at(ast.Break(), node)], []), node)
        told = [stop, *body]
        orelse = [self._tell("header", index, node), *self._inner(node.orelse)]
        if self._limited and not isinstance(node, ast.While):
            # The next item goes to the hook first, and to the loop's variable only if the loop goes on.
            hook = ast.Constant(self._hook_name)
            item = ast.Assign([node.target], self._call("take_item", index, node))
            slot = _at(ast.Attribute(hook, "item", ast.Store()), node)
            body = [stop, _placed(item, node), *body]
            loop: list[ast.stmt] = [_copied(node, target=slot, body=body, orelse=orelse)]
        elif not self._rests:
            loop = [_copied(node, body=told, orelse=orelse)]
        elif isinstance(node, ast.While):
            loop = self._resting_while(node, index, told, orelse)
        else:
            choice = ast.If(_at(_called(ast.Constant(turn_name(self._hook_name, index))), node), node.body, told)
            loop = [_copied(node, body=[_placed(choice, node)], orelse=orelse)]
        counted = [self._tell("counted", index, node)] if self._rests else []
        return [self._tell("before", index, node), *loop, *counted]

    def _resting_while(
        self, node: ast.While, index: int, told: list[ast.stmt], orelse: list[ast.stmt]
    ) -> list[ast.stmt]:
        """As much as a call at each iteration costs may be a third of what a short loop does, so that a ``for`` counts them.

        while True:
            for () in rest.turns:
                if test: body
                else: rest.end(); break
            else:
                hook.counted(index)
                if test: told body; continue
                rest.end()
            break
        if rest.ended(): orelse
        """
        end = _at(ast.Expr(self._rest("end", index, node, called=True)), node)
        untold = _placed(ast.If(node.test, node.body, [end, _at(ast.Break(), node)]), node)
        choice = _placed(ast.If(node.test, [*told, _at(ast.Continue(), node)], [end]), node)
        turns = ast.For(
            target=_at(ast.Tuple([], ast.Store()), node),
            iter=self._rest("turns", index, node),
            body=[untold],
            orelse=[self._tell("counted", index, node), choice],
        )
        forever = ast.While(_at(ast.Constant(True), node), [_placed(turns, node), _at(ast.Break(), node)], [])
        over = ast.If(self._rest("ended", index, node, called=True), orelse, [])
        return [_placed(forever, node), _placed(over, node)]

    def _try(self, node: Any) -> ast.stmt:
        # `try:` itself does nothing; by the time a handler begins, what the failing statement held has gone.
        body = self._inner(node.body)
        handlers = []
        for handler in node.handlers:
            index = self.add(handler)
            told = [self._tell("header", index, handler), *self._inner(handler.body)]
            handlers.append(_copied(handler, body=told))
        made: ast.stmt = _copied(
            node, body=body, handlers=handlers, orelse=self._inner(node.orelse), finalbody=self._inner(node.finalbody)
        )
        return made

    def _inner(self, body: list[ast.stmt]) -> list[ast.stmt]:
        self._depth += 1
        rewritten = self._block(body)
        self._depth -= 1
        return rewritten

    def _block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        return [part for node in body for part in self.rewrite(node)]

    def _tell(self, method: str, index: int, at: ast.stmt | ast.ExceptHandler) -> ast.stmt:
        return _at(ast.Expr(self._call(method, index, at)), at)

    def _rest(self, name: str, index: int, at: ast.stmt, *, called: bool = False) -> ast.expr:
        """An attribute of the loop's `rest.Rest`, or what it answers."""
        found: ast.expr = ast.Attribute(ast.Constant(rest_name(self._hook_name, index)), name, ast.Load())
        return _at(ast.Call(found, [], []) if called else found, at)

    def _call(self, method: str, index: int, at: ast.stmt | ast.ExceptHandler) -> ast.expr:
        return _at(ast.Call(self._method(method, at), [ast.Constant(index)], []), at)

    def _method(self, name: str, at: ast.stmt | ast.ExceptHandler) -> ast.expr:
        return _at(ast.Attribute(ast.Constant(self._hook_name), name, ast.Load()), at)


def rest_name(hook_name: str, index: int) -> str:
    """What stands in the code for the `rest.Rest` of the loop `index`, until `with_constants`."""
    return f"{hook_name} {index}"


def turn_name(hook_name: str, index: int) -> str:
    """The same for `rest.ForRest.turn`."""
    return f"{hook_name} turn {index}"


def _called(what: ast.Constant) -> ast.expr:
    """A call of a constant, and no method: the quickest there is. Python would warn of a text that is called as such."""
    return ast.Call(ast.IfExp(ast.Constant(True), what, what), [], [])


def with_constants(code: CodeType, objects: Mapping[str, object], inner: Container[int] = ()) -> CodeType:
    """The code with objects in the place of the strings that stood for them: no name is needed where the code finds them.

    inner: the first lines of what is in it, classes and functions, and has such strings, too.
    """
    constants = [
        objects.get(one, one)
        if type(one) is str
        else with_constants(one, objects, inner)
        if type(one) is CodeType and one.co_firstlineno in inner
        else one
        for one in code.co_consts
    ]
    changed = any(one is not other for one, other in zip(constants, code.co_consts, strict=True))
    return code.replace(co_consts=tuple(constants)) if changed else code


def _copied(node: Node, **fields: Any) -> Node:
    """A node with other fields, of which it shares the rest."""
    made = copy(node)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def _placed(new: Node, old: ast.stmt) -> Node:
    """As `_at`, for the node alone."""
    new.lineno = new.end_lineno = old.lineno  # type: ignore[attr-defined]
    new.col_offset = new.end_col_offset = old.col_offset  # type: ignore[attr-defined]
    return new


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
