"""Whether what a loop had made when memory ran out was to go into a backward behind it, as the program's text says."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from gpumem_magic.causes.statements import FUNCTIONS
from gpumem_magic.causes.written import Text, Written
from gpumem_magic.looks.expressions import called, dotted, targets

_BACKWARD = re.compile(r"backward|^grad$")
# What puts its argument into the object that it is called on.
_PUTS = frozenset(("append", "extend", "add", "insert", "update", "setdefault", "put"))


def backward_behind(
    texts: Sequence[Text], way: Sequence[Written], names: Collection[str] = ()
) -> tuple[Written, Written] | None:
    """The head of the innermost loop that was left, and the backward that goes through what it made: one in the loop that comes
    in some turns only, or, where it has none, one behind it, in the same function, or in those that called it and were given it
    back.

    way: the lines of the program's functions that led to the failure, outermost first. names: of variables that keep it; where
    the loop gives values to some of these, the backward is one that goes through them.
    """
    known = {one.where: one for one in reversed(texts)}
    functions = _Functions(texts)
    for depth in reversed(range(len(way))):
        if (text := known.get(way[depth].where)) is None:
            continue
        function, loop = _around(text, way[depth].line - text.ahead)
        if loop is None:
            continue
        head = Written(text.where, loop.lineno + text.ahead, "")
        all_made = _made_in(loop)
        made = all_made.intersection(names) or all_made
        if any(map(_goes_back, ast.walk(loop))):
            found = _Reaching(made, text, functions).through(_in_some_turns(loop)).backward
            return None if found is None else (head, found)
        followed = _Reaching(made, text, functions).through(_statements(function, loop.end_lineno or loop.lineno))
        while followed.backward is None and followed.is_returned and depth:
            depth -= 1
            if (outer := known.get(way[depth].where)) is None:
                return None
            followed = _in_the_caller(outer, way[depth].line - outer.ahead, functions)
        return None if followed.backward is None else (head, followed.backward)
    return None


def _in_some_turns(loop: ast.For | ast.While) -> Iterator[ast.stmt]:
    """What an ``if`` keeps for turns that the loop itself tells from others (``if (i + 1) % 4 == 0:``)."""
    given = {node.id for node in ast.walk(loop) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in ast.walk(loop):
        if isinstance(node, ast.If) and not given.isdisjoint(
            one.id for one in ast.walk(node.test) if isinstance(one, ast.Name)
        ):
            yield from node.body


def _in_the_caller(text: Text, line: int, functions: _Functions) -> _Reaching:
    """Follows what the statement at a line, which called, made of what it was given back."""
    function, _ = _around(text, line)
    calling = [one for one in _statements(function, 0) if one.lineno <= line <= (one.end_lineno or one.lineno)]
    if not calling:
        return _Reaching((), text, functions)
    # The innermost: the loops around it hold the line, too.
    call = calling[-1]
    if isinstance(call, ast.Return):
        return _Reaching((_RETURNED,), text, functions).through([call])
    return _Reaching(_given(call), text, functions).through(_statements(function, call.end_lineno or call.lineno))


_RETURNED = "<what the call gives>"
# So many functions deep a value is followed as it is handed on.
_DEEPEST = 4


class _Functions:
    """The program's functions by their names, each with the text that it stands in; of two of a name none."""

    def __init__(self, texts: Sequence[Text]) -> None:
        self._found: dict[str, list[tuple[Text, ast.FunctionDef | ast.AsyncFunctionDef]]] = {}
        for text in texts:
            for node in ast.walk(text.tree):
                if isinstance(node, FUNCTIONS):
                    self._found.setdefault(node.name, []).append((text, node))

    def called(self, call: ast.Call) -> tuple[Text, ast.FunctionDef | ast.AsyncFunctionDef] | None:
        found = self._found.get(dotted(call.func).rpartition(".")[2], ())
        return found[0] if len(found) == 1 else None


class _Reaching:
    """Names that reach what the loop made, statement by statement as the text has them, and in functions that they are given."""

    def __init__(self, names: Iterable[str], text: Text, functions: _Functions, deep: int = 0) -> None:
        self._names = set(names)
        self._text = text
        self._functions = functions
        self._deep = deep
        self.backward: Written | None = None
        self.is_returned = False

    def through(self, statements: Iterable[ast.stmt]) -> _Reaching:
        for one in statements:
            if isinstance(one, ast.Return):
                self.is_returned = self.is_returned or _RETURNED in self._names or self._mentioned(one)
                if self.is_returned:
                    return self
            for call in _calls(one):
                if _goes_back(call) and self._mentioned(call):
                    self.backward = Written(self._text.where, call.lineno + self._text.ahead, "")
                    return self
                if self._deep < _DEEPEST and (found := self._in_called(call)) is not None:
                    self.backward = found
                    return self
                if self._mentioned(*call.args):
                    self._names.update(_put_into(call))
            self._assigned(one)
        return self

    def _in_called(self, call: ast.Call) -> Written | None:
        """The backward in a function of the program's that is given one of the names."""
        if (known := self._functions.called(call)) is None:
            return None
        text, function = known
        names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
        # (Of a method that is called on its object the first is that.)
        names = names[1:] if names[:1] == ["self"] else names
        given = {name for name, one in zip(names, call.args, strict=False) if self._mentioned(one)}
        given |= {one.arg for one in call.keywords if one.arg and self._mentioned(one.value)}
        if not given:
            return None
        return _Reaching(given, text, self._functions, self._deep + 1).through(_statements(function, 0)).backward

    def _assigned(self, one: ast.stmt) -> None:
        value = one.iter if isinstance(one, (ast.For, ast.AsyncFor)) else getattr(one, "value", None)
        given = set(_given(one))
        if not given or not isinstance(value, ast.expr):
            return
        if self._mentioned(value):
            self._names |= given
        elif isinstance(one, (ast.Assign, ast.AnnAssign, ast.For, ast.AsyncFor)):
            self._names -= given

    def _mentioned(self, *nodes: ast.AST) -> bool:
        return any(
            dotted(inner) in self._names
            for node in nodes
            for inner in ast.walk(node)
            if isinstance(inner, (ast.Name, ast.Attribute))
        )


def _goes_back(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _BACKWARD.search(called(node)) is not None


def _around(text: Text, line: int) -> tuple[ast.AST, ast.For | ast.While | None]:
    """The function around a line (or all of the text), and the innermost loop in it."""
    function, loops = text.loops_around(line)
    return (text.tree if function is None else function), (loops[-1] if loops else None)


def _made_in(loop: ast.For | ast.While) -> set[str]:
    """What the loop gives values to, but for the variable that it counts by."""
    found: set[str] = set()
    for one in _statements(loop, 0):
        found.update(_given(one))
        for call in _calls(one):
            found.update(_put_into(call))
    return found - set(_given(loop))


def _given(one: ast.AST) -> Iterator[str]:
    """The names that a statement gives a value; of a part (``self.best``, ``outs[0]``) that of the whole, too."""
    into = one.targets if isinstance(one, ast.Assign) else [one.target] if hasattr(one, "target") else []
    for target in into:
        yield from (name.removesuffix("[]") for name in targets(target))


def _statements(inside: ast.AST, behind: int) -> Iterator[ast.stmt]:
    """Those behind a line, in the order of the text, without what other functions hold."""
    for one in ast.iter_child_nodes(inside):
        if isinstance(one, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
            continue
        if isinstance(one, ast.stmt) and one.lineno > behind:
            yield one
        if not isinstance(one, ast.expr):
            yield from _statements(one, behind)


def _put_into(call: ast.Call) -> Iterator[str]:
    """The object that a call puts its arguments into: ``outs`` of ``outs.append(y)``."""
    if isinstance(call.func, ast.Attribute) and call.func.attr in _PUTS:
        yield from targets(call.func.value)


def _calls(one: ast.stmt) -> Iterator[ast.Call]:
    """Those of a statement's own expressions, without the statements in it."""
    todo: list[ast.AST] = [one]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Call):
            yield node
        todo += [inner for inner in ast.iter_child_nodes(node) if not isinstance(inner, (ast.stmt, ast.excepthandler))]
