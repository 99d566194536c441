"""Whether what methods of a name are told stays out of an object that they are handed and give back.

``self.control = handler.on_log(self.control, logs)`` hands `control` to everybody who listens, and gets it back. The logs are in
it then only where somebody who defines ``on_log`` puts them there, or keeps them for another of its methods that does. So all
classes that are alive and define it are asked, by the source of all their methods. Whether a method is another in a subclass is
asked of the same classes, and whether what has a class's name is a tuple.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import FunctionType
from typing import Any

from gpumem_magic.looks.expressions import arguments, called, dotted
from gpumem_magic.looks.objects import entries_of_class, is_a, is_exactly, module_of_class, mro, name_of_class
from gpumem_magic.looks.parsing import parsed

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_PLACES = (ast.Attribute, ast.Subscript)


@lru_cache(maxsize=64)
def give_back_unchanged(name: str, position: int) -> bool:
    """Whether all methods of this name that are alive give back what they are handed at a position (counted without ``self``),
    with nothing set in it but constants. False where there is none, or a source is not to be had.

    What is alive may change: `forget` has it asked anew.
    """
    if any(name in getattr(module, "__dict__", ()) for module in list(sys.modules.values())):
        # A function, of which nobody knows what else it sets.
        return False
    owners = [one for one in _subclasses(object) if name in entries_of_class(one)]
    return bool(owners) and all(_Listener(one, name).leaves(position) for one in owners)


@lru_cache(maxsize=64)
def is_nowhere_another(name: str, lines: frozenset[int]) -> bool:
    """Whether a method that a file defines at these lines is the same in all subclasses that are alive. False where no class has
    it."""
    # (By their addresses: a class may have a ``__hash__`` and an ``__eq__`` of its metaclass's.)
    owners = {id(one) for one in _subclasses(object) if _is_written_at(entries_of_class(one).get(name), lines)}
    return bool(owners) and not any(
        name in entries_of_class(one) and not owners.isdisjoint(map(id, mro(one)))
        for one in _subclasses(object)
        if id(one) not in owners
    )


@lru_cache(maxsize=64)
def only_hold(name: str) -> bool:
    """Whether all classes of this name that are alive hold what they are given, and make no tensors of a size: tuples, as named
    ones are, and tables of pandas."""
    owners = [one for one in _subclasses(object) if name_of_class(one) == name]
    return bool(owners) and all(_holds(one) for one in owners)


def _holds(owner: type) -> bool:
    return module_of_class(owner).partition(".")[0] == "pandas" or any(base is tuple for base in mro(owner))


def _is_written_at(method: object, lines: frozenset[int]) -> bool:
    function: Any = method
    if is_exactly(method, (property,)):
        function = function.fget
    elif is_exactly(method, (staticmethod, classmethod)):
        function = function.__func__
    return is_exactly(function, (FunctionType,)) and function.__code__.co_firstlineno in lines


def forget() -> bool:
    """Whether there was anything to forget."""
    asked = (give_back_unchanged, is_nowhere_another, only_hold)
    known = any(one.cache_info().currsize for one in asked)
    for one in asked:
        one.cache_clear()
    return known


def _subclasses(of: type) -> Iterator[type]:
    seen: set[int] = set()
    left = [of]
    one: type
    while left:
        for one in type.__subclasses__(left.pop()):
            if id(one) not in seen:
                seen.add(id(one))
                left.append(one)
                yield one


class _Listener:
    """A class that defines the method."""

    def __init__(self, owner: type, name: str) -> None:
        self._owner = owner
        self._name = name
        self._functions = _functions_of(owner)

    def leaves(self, position: int) -> bool:
        method, own = entries_of_class(self._owner)[self._name], self._functions.get(self._name)
        if own is None or not isinstance(method, FunctionType) or method.__code__.co_name != self._name:
            return False
        parameters = [one.arg for one in (*own.args.posonlyargs, *own.args.args)][1:]
        if position >= len(parameters):
            return False
        if all(isinstance(one, ast.Pass) or _is_text(one) for one in own.body):
            return True
        if any(isinstance(one, ast.Raise) or _sets_elsewhere(one, parameters) for one in ast.walk(own)):
            return False
        handed = parameters[position]
        heirs = [function for one in _subclasses(self._owner) for function in _functions_of(one).values()]
        kept = {place.attr for place in ast.walk(own) if isinstance(place, ast.Attribute) and _is_self(place.value)}
        return all(
            self._is_left_alone(handed, function) and not _raises_by(kept, function)
            for function in (*self._functions.values(), *heirs)
        )

    def _is_left_alone(self, handed: str, function: _Function) -> bool:
        """Whether a method sets nothing in what it is handed but constants, in any case, and hands it to no others than these
        methods, or what it calls of its own."""
        allowed: set[int] = set()
        for statement in function.body:
            if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
                allowed.update(map(id, statement.targets))
        results = {handed}
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute):
                allowed.add(id(node.value))
            elif isinstance(node, ast.Call) and self._is_dealt(node):
                allowed.update(map(id, arguments(node)))
            elif isinstance(node, ast.Compare) and any(isinstance(one, (ast.Is, ast.IsNot)) for one in node.ops):
                allowed.update(map(id, (node.left, *node.comparators)))
            elif isinstance(node, ast.Assign) and self._gives_it_back(node.value, handed):
                results.update(one.id for one in node.targets if isinstance(one, ast.Name))
        for node in ast.walk(function):
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Name) and node.value.id in results:
                allowed.add(id(node.value))
            elif isinstance(node, ast.Assign) and [dotted(one) for one in node.targets] == [handed]:
                if not (isinstance(node.value, ast.Name) and node.value.id in results):
                    return False
                allowed.update(map(id, (*node.targets, node.value)))
        for node in ast.walk(function):
            if isinstance(node, _PLACES) and not isinstance(node.ctx, ast.Load):
                if handed in _path(node) and id(node) not in allowed:
                    return False
            elif isinstance(node, ast.Name) and node.id == handed and id(node) not in allowed:
                return False
        return handed not in _names_of(function) or all(
            self._gives_back(one.value, results) for one in ast.walk(function) if isinstance(one, ast.Return)
        )

    def _gives_it_back(self, value: ast.expr, handed: str) -> bool:
        return (
            isinstance(value, ast.Call)
            and self._is_dealt(value)
            and any(isinstance(one, ast.Name) and one.id == handed for one in arguments(value))
        )

    def _is_dealt(self, call: ast.Call) -> bool:
        """Whether it calls a method of its own, one of the name, or one that it was told the name of."""
        function = call.func
        if isinstance(function, ast.Call):
            return called(function) == "getattr"
        if not isinstance(function, ast.Attribute):
            return False
        above = isinstance(function.value, ast.Call) and called(function.value) == "super"
        return function.attr == self._name or above or (_is_self(function.value) and function.attr in self._functions)

    def _gives_back(self, value: ast.expr | None, results: set[str]) -> bool:
        return (
            value is None
            or (isinstance(value, ast.Constant) and value.value is None)
            or (isinstance(value, ast.Name) and value.id in results)
            or (isinstance(value, ast.Call) and self._is_dealt(value))
        )


def _functions_of(owner: type) -> dict[str, _Function]:
    """The source of its own methods; empty where that is not to be had."""
    code = next((one.__code__ for one in entries_of_class(owner).values() if is_a(one, FunctionType)), None)
    if code is None:
        return {}
    line = code.co_firstlineno
    for node in _classes_in("".join(linecache.getlines(code.co_filename))):
        if node.name == name_of_class(owner) and node.lineno <= line <= (node.end_lineno or line):
            return {one.name: one for one in node.body if isinstance(one, _Function)}
    return {}


@lru_cache(maxsize=4)
def _classes_in(source: str) -> list[ast.ClassDef]:
    try:
        return [one for one in ast.walk(parsed(source)) if isinstance(one, ast.ClassDef)]
    except (SyntaxError, ValueError, RecursionError):
        return []


def _sets_elsewhere(node: ast.AST, parameters: Sequence[str]) -> bool:
    """Whether it is an attribute that is set by a value in what was handed, or in what the listener knows."""
    if not isinstance(node, (ast.Assign, ast.AugAssign)) or isinstance(node.value, ast.Constant):
        return False
    places = node.targets if isinstance(node, ast.Assign) else [node.target]
    set_in = [_path(one) for one in places if isinstance(one, ast.Attribute)]
    return any(path[0] in parameters or len(path) > 1 for path in set_in)


def _raises_by(kept: set[str], function: _Function) -> bool:
    """Whether an error comes by an attribute that may have been told."""
    return any(
        isinstance(one, ast.If)
        and any(isinstance(part, ast.Raise) for part in ast.walk(one))
        and any(isinstance(part, ast.Attribute) and part.attr in kept for part in ast.walk(one.test))
        for one in ast.walk(function)
    )


def _path(place: ast.Attribute | ast.Subscript) -> list[str]:
    """The names of what an attribute or an item is set in: of ``self.trainer.control.stop`` the first three."""
    before: ast.expr = place.value
    while isinstance(before, ast.Subscript):
        before = before.value
    return dotted(before).split(".")


def _names_of(function: _Function) -> set[str]:
    return {one.arg for one in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)}


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
