"""Whether a program's loops do other things later: those that read how far they have come may, however alike their turns are."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from types import CodeType, FunctionType, ModuleType
from typing import Any

from gpumem_magic.looks.code import OWN, whose
from gpumem_magic.looks.parsing import parsed
from gpumem_magic.recording.inside import behind_decorators

AT_LEAST = 20
"""So many iterations of such a program are run before that they repeat says anything."""
CHEAP_EVENTS = 10_000
"""And while the allocator has done no more than this: a few seconds' work."""

_COUNTING = frozenset({"range", "trange", "count"})
_SHOWING = frozenset({"print", "set_description", "set_postfix", "write", "info", "debug", "log"})


def goes_by_its_count(source: str) -> bool:
    """Whether the body of a loop reads the loop's number, or a counter, for more than to show it."""
    try:
        tree = parsed(source)
    except SyntaxError:
        return False
    return any(
        isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in _counters(loop)
        for loop in ast.walk(tree)
        if isinstance(loop, (ast.For, ast.AsyncFor, ast.While))
        for statement in loop.body
        for node in _used(statement)
    )


def with_functions(source: str, names: Iterable[str], namespace: Mapping[str, Any]) -> Iterator[str]:
    """A program's source, and those of the functions of the user's own files and cells that it can reach by these names."""
    yield source
    for function in own_functions(names, namespace, methods=False):
        with suppress(OSError, TypeError):
            yield textwrap.dedent(inspect.getsource(function.__code__))


def own_functions(names: Iterable[str], namespace: Mapping[str, Any], methods: bool = True) -> Iterator[FunctionType]:
    """The functions of the user's own files and cells that a program can reach by these names. methods: those of classes and
    modules, too."""
    todo, seen = [(frozenset(names), namespace)], set[CodeType]()
    while todo:
        mentioned, found_in = todo.pop()
        for thing in map(found_in.get, mentioned):
            for function in _functions_of(thing) if methods else [thing]:
                if type(function) is not FunctionType or function.__code__ in seen:
                    continue
                code = function.__code__
                seen.add(code)
                if whose(code.co_filename) == OWN:
                    # Before its code is changed.
                    todo.append((frozenset(_names_in(code)), function.__globals__))
                    yield function


def _names_in(code: CodeType) -> Iterator[str]:
    """The names that a function mentions, those of the functions and comprehensions in it among them."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_in(inner)


def _functions_of(thing: object) -> Iterable[object]:
    if type(thing) in (staticmethod, classmethod):
        thing = thing.__func__  # type: ignore[attr-defined]
    if type(thing) is FunctionType:
        return behind_decorators(thing)
    if type(thing) is ModuleType:
        return list(vars(thing).values())
    kind = thing if isinstance(thing, type) else type(thing)
    return [one for base in kind.__mro__ for each in vars(base).values() for one in _in_a_class(each)]


def _in_a_class(thing: object) -> Iterable[object]:
    return _functions_of(thing) if type(thing) in (FunctionType, staticmethod, classmethod) else ()


def _counters(loop: ast.For | ast.AsyncFor | ast.While) -> set[str]:
    """The names that say how far it has come: ``step`` in ``for step in range(9)``, ``n`` where its body says ``n += 1``."""
    found = {
        node.target.id
        for statement in loop.body
        for node in ast.walk(statement)
        if isinstance(node, ast.AugAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    if not isinstance(loop, ast.While):
        calls = {_name(node) for node in ast.walk(loop.iter) if isinstance(node, ast.Call)}
        target: ast.expr | None = loop.target if calls & _COUNTING else None
        if "enumerate" in calls:
            target = loop.target.elts[0] if isinstance(loop.target, ast.Tuple) else loop.target
        if any(isinstance(node, ast.List | ast.Tuple | ast.ListComp) for node in ast.walk(loop.iter)):
            # Sizes that are written out, as `[256] * 8 + [1024] * 4`: later ones may be others.
            target = loop.target
        if target is not None:
            found |= {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}
    return found


def _used(node: ast.AST) -> Iterator[ast.AST]:
    """A node and what is in it, without what is only shown."""
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Call) and _name(node) in _SHOWING):
        return
    if isinstance(node, ast.If) and all(_shows(one) for one in [*node.body, *node.orelse]):
        return
    yield node
    for inner in ast.iter_child_nodes(node):
        yield from _used(inner)


def _shows(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) and _name(statement.value) in _SHOWING
    )


def _name(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
