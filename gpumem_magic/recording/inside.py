"""Rows inside named functions: while a program is measured, each of their statements is reported; afterwards they are as before.

Only a function's code object is exchanged (``function.__code__``), so that every reference to it, imported ones and methods too,
sees the same; calls that run already keep the old code. Its source must be there.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, cast

import torch

from gpumem_magic.failures import swallows
from gpumem_magic.looks.objects import attribute, from_class, inherits, is_a, name_of_class
from gpumem_magic.looks.parsing import parsed
from gpumem_magic.recording.as_written import Definition, InCode, keep_for_compiler
from gpumem_magic.recording.hook import new_hook_name
from gpumem_magic.recording.instrument import Instrumenter, Site, with_constants
from gpumem_magic.recording.source import Source

# A statement is shown so often per function; a loop of thousands says no more.
MOST = 12
# Compound statements are told by what is in them, and a jump does nothing.
_UNTOLD = frozenset(
    {"for", "while", "if", "with", "try", "match", "except", "return", "break", "continue", "raise", "pass"}
)
_OUTER = "_gpumem_outer"
_FUTURES = 0
for _feature in __future__.all_feature_names:
    _FUTURES |= getattr(__future__, _feature).compiler_flag

Begins = Callable[[str], Callable[[bool], None]]


class InsideError(Exception):
    """A name is no function that can be looked into. The text is one line."""


class FunctionRewriter:
    """The functions that are looked into, from `install` to `remove`. begins: begins a range of a name, and returns its end."""

    def __init__(self, functions: Sequence[types.FunctionType], begins: Begins) -> None:
        self._functions = functions
        self._begins = begins
        self._before: list[tuple[types.FunctionType, types.CodeType]] = []
        self._tellers: list[_Teller] = []

    def notes(self) -> list[str]:
        """What is not shown, and why."""
        return [note for teller in self._tellers for note in teller.notes()]

    def install(self) -> None:
        """Raises InsideError, with everything put back, where a function can't be rewritten."""
        try:
            for function in self._functions:
                code, teller = rewritten(function, self._begins)
                self._tellers.append(teller)
                self._before.append((function, function.__code__))
                function.__code__ = code
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Puts every function back. May be called twice. A call that is under way ends with the code that it began with."""
        while self._before:
            function, code = self._before[-1]
            function.__code__ = code
            self._before.pop()


def find_function(text: str, namespace: Mapping[str, Any]) -> types.FunctionType:
    """The Python function of a name as the notebook writes it (``train_step``, ``utils.train``, ``Trainer.step``); a model's
    is its forward.

    Raises InsideError. Nothing of the user's runs: attributes are read from dictionaries.
    """
    first, *rest = text.split(".")
    if first not in namespace:
        raise InsideError(
            f"--into {text}: there is no {first!r} in the notebook (yet): define or import it in an earlier cell"
        )
    thing = namespace[first]
    for part in rest:
        try:
            thing = inspect.getattr_static(thing, part)
        except AttributeError:
            raise InsideError(f"--into {text}: {first} has no {part!r}") from None
    if inherits(thing, torch.nn.Module):
        # What a model does stands in its forward.
        thing = attribute(thing, "forward") or from_class(type(thing), "forward")
    if is_a(thing, (staticmethod, classmethod)):
        thing = thing.__func__
    if is_a(thing, types.MethodType):
        thing = thing.__func__
    found = behind_decorators(thing)[-1]
    if not is_a(found, types.FunctionType):
        what = f"a {name_of_class(type(thing))} is no Python function with statements to show"
        if is_a(thing, type):
            what = f"{text} is a class: name one of its functions, such as {text}.__init__"
        raise InsideError(f"--into {text}: {what}")
    return cast(types.FunctionType, found)


def behind_decorators(thing: Any) -> list[Any]:
    """What is called, and what stands behind its decorators, the function that was written last. Nothing of the user's runs."""
    found = [thing]
    while (inner := attribute(found[-1], "__wrapped__")) is not None and all(inner is not one for one in found):
        found.append(inner)
    return found


def rewritten(function: types.FunctionType, begins: Begins) -> tuple[types.CodeType, _Teller]:
    """The function's code, telling its statements to what is returned with it. Raises InsideError."""
    hook_name = new_hook_name()
    sites: list[Site] = []

    def tell(node: Definition, source: str) -> None:
        written = deepcopy(node.body)
        instrumenter = Instrumenter(Source(source), hook_name, rests=False)
        body = instrumenter.module(node.body)
        sites.extend(instrumenter.sites)
        unchanged = 1 if body and body[0] is node.body[0] and ast.get_docstring(node, clean=False) is not None else 0
        began, left = (_call(hook_name, method, node) for method in ("began", "left"))
        guarded = ast.copy_location(
            ast.Try(body=body[unchanged:] or [ast.Pass()], handlers=[], orelse=[], finalbody=[left]), node.body[0]
        )
        node.body = [*body[:unchanged], began, guarded]
        keep_for_compiler(node, written)

    code = compiled_again(function, f"--into {function.__name__}", tell)
    teller = _Teller(function.__name__, sites, begins)
    return with_constants(code, {hook_name: teller}), teller


def compiled_again(
    function: types.FunctionType, words: str, change: Callable[[Definition, str], object]
) -> types.CodeType:
    """The function's code, after `change` had its definition and the source that its positions are of. words: for errors.

    Raises InsideError where its source is not there, or does not make the same function.
    """
    try:
        text = inspect.getsource(function.__code__)
    except (OSError, TypeError):
        raise InsideError(f"{words}: its source is not there") from None
    # Lines and columns, and so the indentation, stay as they are in the file.
    indented = text[:1].isspace()
    above = "\n" * (function.__code__.co_firstlineno - 1 - indented)
    source = f"{above}if 1:\n{text}" if indented else f"{above}{text}"
    code = compiled_from(function, source, words, change, function.__code__.co_filename)
    return code.replace(co_firstlineno=function.__code__.co_firstlineno)


def compiled_from(
    function: types.FunctionType, source: str, words: str, change: Callable[[Definition, str], object], filename: str
) -> types.CodeType:
    """Code for a function of what is written for it elsewhere: `source`, of the file of that name, which defines it.

    change, words: of `compiled_again`. Raises InsideError where it does not make the same function.
    """
    try:
        tree = parsed(source)
    except SyntaxError:
        raise InsideError(f"{words}: its source can't be read by itself") from None
    node = _definition(tree, function.__name__)
    if node is None:
        raise InsideError(f"{words}: its source holds no `def`")
    change(node, source)
    node.decorator_list = []
    module = _around(node, function)
    ast.fix_missing_locations(module)
    flags = function.__code__.co_flags & _FUTURES
    code = _code_of(compile(module, filename, "exec", flags=flags, dont_inherit=True), function.__name__)
    if code is None or code.co_freevars != function.__code__.co_freevars:
        raise InsideError(f"{words}: its surroundings can't be made again")
    return _renamed(code, function.__code__)


class _Teller(InCode):
    """What a rewritten function calls. It tells the first runs of each plain statement, and never raises."""

    def __init__(self, function: str, sites: Sequence[Site], begins: Begins) -> None:
        self._function = function
        self._sites = sites
        self._begins: Begins | None = begins
        self._failure: str | None = None
        self._told = Counter[int]()
        self._has_begun = False
        self._local = threading.local()

    def began(self) -> None:
        self._has_begun = True
        self._stack().append([])

    def left(self) -> None:
        stack = self._stack()
        for ended in reversed(stack.pop() if stack else []):
            self._end(ended, failed=True)

    def before(self, index: int) -> None:
        statement = self._sites[index].statement
        stack = self._stack()
        if self._begins is None or not stack or statement.kind in _UNTOLD:
            return
        self._told[index] += 1
        if self._told[index] > MOST:
            return
        text = statement.text.partition("\n")[0]
        try:
            stack[-1].append((index, self._begins(f"{self._function}: {text}")))
        except BaseException as error:
            if not swallows(error):
                raise
            self._failed(error)

    def after(self, index: int) -> None:
        stack = self._stack()
        if stack and stack[-1] and stack[-1][-1][0] == index:
            self._end(stack[-1].pop(), failed=False)

    def returned(self, index: int, value: object) -> object:
        """What a ``return`` hands back has no row of its own."""
        return value

    def notes(self) -> list[str]:
        """What is not shown, and why."""
        found = [] if self._failure is None else [f"--into {self._function} stopped partway ({self._failure})"]
        if not self._has_begun:
            found.append(
                f"--into {self._function}: it was not called, or only as compiled code, whose statements have no rows"
            )
        most = max(self._told.values(), default=0)
        if most > MOST:
            found.append(f"--into {self._function}: of {most:,} runs of a statement the first {MOST} are shown")
        return found

    def _failed(self, error: Exception) -> None:
        self._begins = None
        self._failure = f"{type(error).__name__}: {error}".splitlines()[0]

    def header(self, index: int) -> None:
        """A compound statement's head has no row of its own."""

    def next_iteration(self, index: int) -> bool:
        """Loops of the function are never ended."""
        return False

    def _stack(self) -> list[list[tuple[int, Callable[[bool], None]]]]:
        found: list[list[tuple[int, Callable[[bool], None]]]] | None = getattr(self._local, "calls", None)
        if found is None:
            found = self._local.calls = []
        return found

    def _end(self, told: tuple[int, Callable[[bool], None]], *, failed: bool) -> None:
        try:
            told[1](failed)
        except BaseException as error:
            if not swallows(error):
                raise
            self._failed(error)


def _renamed(code: types.CodeType, like: types.CodeType) -> types.CodeType:
    """With the names by which tracebacks and profilers (from Python 3.11 on) call a function, and those inside it."""
    if sys.version_info < (3, 11):
        return code
    made, named = code.co_qualname, like.co_qualname

    def rename(one: types.CodeType) -> types.CodeType:
        inner = tuple(rename(each) if isinstance(each, types.CodeType) else each for each in one.co_consts)
        return one.replace(co_consts=inner, co_qualname=named + one.co_qualname.removeprefix(made))

    return rename(code)


def _definition(tree: ast.Module, name: str) -> Definition | None:
    return next(
        (
            node
            for node in ast.walk(tree)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name
        ),
        None,
    )


def _call(hook_name: str, method: str, at: ast.stmt) -> ast.stmt:
    hook = ast.Attribute(ast.Constant(hook_name), method, ast.Load())
    return ast.copy_location(ast.Expr(ast.Call(hook, [], [])), at)


def _around(node: Definition, function: types.FunctionType) -> ast.Module:
    """A module that defines the function with the same free variables, and in a class of the same name, for private names."""
    inner: Definition | ast.ClassDef = node
    *outside, _ = function.__qualname__.split(".")
    if outside and outside[-1] != "<locals>":
        owner = ast.parse(f"class {outside[-1]}: pass").body[0]
        assert isinstance(owner, ast.ClassDef)
        owner.body = [inner]
        inner = owner
    outer = ast.parse(f"def {_OUTER}(): pass").body[0]
    assert isinstance(outer, ast.FunctionDef)
    free = [name for name in function.__code__.co_freevars if name != "__class__" or inner is node]
    # What it calls by its own name, or its class's, is the module's, unless it is a variable of a function around it.
    own = [] if inner.name in function.__code__.co_freevars else [ast.Global([inner.name])]
    outer.body = [*own, *ast.parse("\n".join(f"{name} = None" for name in free)).body, inner]
    return ast.Module([outer], [])


def _code_of(code: types.CodeType, name: str) -> types.CodeType | None:
    todo = [code]
    while todo:
        one = todo.pop(0)
        for constant in one.co_consts:
            if isinstance(constant, types.CodeType):
                if constant.co_name == name:
                    return constant
                todo.append(constant)
    return None
