"""Whether what a branch calls only words something: functions of the same file that give a text or a number, made on the host.

An ``if`` that goes by a value takes the same memory either way where no more stands in it. Of a function that sets nothing but
its own names, calls nothing but what words and counts, and reckons with nothing but single numbers, that can be told by its
text. (Whether it is a single number is told by where it goes: NumPy takes no tensor of a device, and a test, ``int()`` and the
like only one of a single element.) A method may be another in a subclass: `Own` says which ones that rests on.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from gpumem_magic.looks.expressions import QUIET, arguments, called, dotted

_Function = ast.FunctionDef | ast.AsyncFunctionDef
# Modules that know nothing of devices.
_OF_THE_HOST = frozenset(("math", "cmath", "time", "datetime", "textwrap", "logging", "warnings"))
# Of NumPy, what makes nothing that is larger than what it is given.
_OF_NUMPY = frozenset((
    "abs", "absolute", "ceil", "clip", "exp", "floor", "isfinite", "isinf", "isnan", "log", "log10", "log2", "max", "maximum",
    "mean", "min", "minimum", "power", "rint", "round", "sign", "sqrt", "std", "sum", "var",
))  # fmt: skip
# Python's own that take a tensor of one element, if any, and make a number of it.
_NUMBERS = frozenset(("int", "float", "bool", "round"))
_TEXTS = frozenset(("str", "repr", "format", "len", "isinstance", "ascii", "hex", "chr"))
_METHODS_OF_TEXTS = frozenset((
    "format", "join", "ljust", "rjust", "center", "strip", "lstrip", "rstrip", "replace", "upper", "lower", "title", "capitalize",
    "startswith", "endswith", "zfill", "split", "item",
))  # fmt: skip
_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)
_TELLING = frozenset(("print", "log", "debug", "info", "warning", "warn", "error", "exception", "write", "flush"))


class Own(NamedTuple):
    """A method, by its name, and the lines at which the file defines methods of that name."""

    name: str
    lines: frozenset[int]


Relied = frozenset[Own]


class Wording:
    """What a file's own functions do. keyed: the names that are made as dictionaries or sets."""

    def __init__(self, tree: ast.Module, keyed: frozenset[str]) -> None:
        self._keyed = keyed
        self._modules = dict(_imported(tree))
        self._functions: dict[str, list[_Function]] = {}
        self._methods: dict[str, list[_Function]] = {}
        for node in tree.body:
            if isinstance(node, _Function):
                self._functions.setdefault(node.name, []).append(node)
        for owner in ast.walk(tree):
            for node in owner.body if isinstance(owner, ast.ClassDef) else ():
                if isinstance(node, _Function):
                    self._methods.setdefault(node.name, []).append(node)
        self._known: dict[_Function, Relied | None] = {}

    def works(self, branch: Iterable[ast.AST]) -> Relied | None:
        """None where something is called that may take memory, or matrices are multiplied; else the methods on which it rests
        that nothing is. What is raised takes none."""
        found: Relied = frozenset()
        for part in branch:
            if isinstance(part, ast.Raise):
                continue
            if isinstance(part, ast.MatMult):
                return None
            own: Relied | None = frozenset()
            if isinstance(part, ast.Call) and called(part) not in QUIET:
                own = self.called(part)
            below = None if own is None else self.works(ast.iter_child_nodes(part))
            if own is None or below is None:
                return None
            found |= own | below
        return found

    def called(self, call: ast.Call) -> Relied | None:
        """On which methods it rests that a call only words or counts; None where it may do more."""
        if self._of_the_host(call):
            return frozenset()
        function = call.func
        if isinstance(function, ast.Attribute):
            if dotted(function.value) in ("self", "cls"):
                return self._own_methods(function.attr)
            return frozenset() if function.attr == "format" and _is_text(function.value) else None
        found = self._functions.get(dotted(function), ())
        return self._all(found) if len(found) == 1 else None

    def _of_the_host(self, call: ast.Call) -> bool:
        module, _, name = dotted(call.func).rpartition(".")
        known = self._modules.get(module, "")
        return known in _OF_THE_HOST or (known == "numpy" and name in _OF_NUMPY)

    def _own_methods(self, name: str) -> Relied | None:
        found = self._methods.get(name, ())
        relied = self._all(found) if found else None
        if relied is None:
            return None
        lines = {one.lineno for one in found} | {mark.lineno for one in found for mark in one.decorator_list}
        return relied | {Own(name, frozenset(lines))}

    def _all(self, functions: Sequence[_Function]) -> Relied | None:
        relied: Relied = frozenset()
        for one in functions:
            if one not in self._known:
                # (One that calls itself does no more than the rest of it.)
                self._known[one] = frozenset()
                self._known[one] = _Body(self, one).relied()
            own = self._known[one]
            if own is None:
                return None
            relied |= own
        return relied

    # ---- what the body of a function is asked

    def call_within(self, call: ast.Call) -> Relied | None:
        name = called(call)
        if isinstance(call.func, ast.Name) and name in _NUMBERS | _TEXTS | {"abs", "min", "max", "range", "print"}:
            return frozenset()
        if isinstance(call.func, ast.Attribute) and name in _METHODS_OF_TEXTS | _TELLING:
            return frozenset()
        return self.called(call)

    def makes_a_number(self, call: ast.Call) -> bool:
        """Whether it takes numbers and arrays of the host, or a tensor of one element, and gives none of a device."""
        return self._of_the_host(call) or (isinstance(call.func, ast.Name) and call.func.id in _NUMBERS)

    def property_of(self, name: str) -> Relied | None:
        """As `called`, of an attribute: it may be a property of the file's own."""
        return self._own_methods(name) if name in self._methods else frozenset()

    def is_keyed(self, node: ast.expr) -> bool:
        return dotted(node) in self._keyed


class _Body:
    """A function, asked whether it only words something."""

    def __init__(self, wording: Wording, function: _Function) -> None:
        self._wording = wording
        self._function = function
        self._relied: set[Own] = set()
        self._numbers = set(self._used_as_numbers())

    def relied(self) -> Relied | None:
        plain_marks = all(
            isinstance(one, ast.Name) and one.id in ("staticmethod", "classmethod", "property")
            for one in self._function.decorator_list
        )
        if isinstance(self._function, ast.AsyncFunctionDef) or not plain_marks:
            return None
        return frozenset(self._relied) if all(map(self._is_harmless, self._function.body)) else None

    def _used_as_numbers(self) -> Iterator[str]:
        for node in ast.walk(self._function):
            if isinstance(node, ast.Call) and self._wording.makes_a_number(node):
                yield from (one.id for one in arguments(node) if isinstance(one, ast.Name))
            elif isinstance(node, (ast.If, ast.IfExp, ast.Assert)):
                compared = node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]
                for one in compared:
                    if isinstance(one, ast.Compare) and all(isinstance(op, _ORDERS) for op in one.ops):
                        yield from (side.id for side in (one.left, *one.comparators) if isinstance(side, ast.Name))

    # ---- statements

    def _is_harmless(self, node: ast.stmt) -> bool:
        if isinstance(node, ast.Return):
            return node.value is None or (self._is_plain(node.value) and self._reckons(node.value, True))
        if isinstance(node, ast.Assign):
            own = all(isinstance(one, ast.Name) for one in node.targets)
            return own and self._reckons(node.value, all(one.id in self._numbers for one in node.targets))  # type: ignore[attr-defined]
        if isinstance(node, ast.AugAssign):
            own = isinstance(node.target, ast.Name) and self._is_plain(node.target)
            return own and self._reckons(node.value, True)
        if isinstance(node, ast.If):
            return self._reckons(node.test, True) and all(map(self._is_harmless, (*node.body, *node.orelse)))
        if isinstance(node, ast.For):
            own = isinstance(node.target, ast.Name)
            return own and self._reckons(node.iter, False) and all(map(self._is_harmless, (*node.body, *node.orelse)))
        if isinstance(node, ast.Assert):
            return self._reckons(node.test, True)
        if isinstance(node, ast.Expr):
            return self._reckons(node.value, False)
        return isinstance(node, (ast.Raise, ast.Pass, ast.Continue, ast.Break))

    # ---- expressions

    def _reckons(self, node: ast.expr, as_number: bool) -> bool:
        """Whether it reckons with single numbers and texts alone. as_number: what it gives can be nothing else."""
        if isinstance(node, ast.Call):
            relied = self._wording.call_within(node)
            if relied is None or any(isinstance(one, ast.Starred) for one in node.args):
                return False
            self._relied |= relied
            numbers = self._wording.makes_a_number(node) or (as_number and called(node) in ("abs", "min", "max"))
            receiver = not isinstance(node.func, ast.Attribute) or self._reckons(node.func.value, False)
            return receiver and all(self._reckons(one, numbers) for one in arguments(node))
        if isinstance(node, ast.Compare):
            sides = (node.left, *node.comparators)
            fits = all(
                isinstance(op, (ast.Is, ast.IsNot))
                or (self._wording.is_keyed(side) if isinstance(op, (ast.In, ast.NotIn)) else as_number)
                for op, side in zip(node.ops, node.comparators, strict=True)
            )
            return fits and all(self._reckons(one, as_number) for one in sides)
        if isinstance(node, (ast.BinOp, ast.UnaryOp)):
            number = as_number or self._is_plain(node)
            below = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.operand]
            return number and all(self._reckons(one, True) for one in below)
        if isinstance(node, ast.BoolOp):
            return all(self._reckons(one, as_number) for one in node.values)
        if isinstance(node, ast.IfExp):
            return self._reckons(node.test, True) and all(
                self._reckons(one, as_number) for one in (node.body, node.orelse)
            )
        if isinstance(node, ast.Subscript):
            fits = as_number or self._wording.is_keyed(node.value) or isinstance(node.slice, ast.Constant)
            return fits and self._reckons(node.value, False) and self._reckons(node.slice, False)
        if isinstance(node, ast.Attribute):
            return self._is_no_property_at_work(node.attr) and self._reckons(node.value, False)
        if isinstance(node, ast.JoinedStr):
            return all(self._reckons(one.value, False) for one in node.values if isinstance(one, ast.FormattedValue))
        if isinstance(node, (ast.Tuple, ast.List)):
            return all(self._reckons(one, as_number) for one in node.elts)
        return isinstance(node, (ast.Name, ast.Constant))

    def _is_no_property_at_work(self, name: str) -> bool:
        relied = self._wording.property_of(name)
        self._relied |= relied or frozenset()
        return relied is not None

    def _is_plain(self, node: ast.expr, asked: frozenset[str] = frozenset()) -> bool:
        """Whether it is a text or a number, as far as the function's own text tells."""
        if isinstance(node, ast.Name):
            if node.id in self._numbers:
                return True
            given = [
                one.value
                for one in ast.walk(self._function)
                if isinstance(one, ast.Assign)
                and any(isinstance(to, ast.Name) and to.id == node.id for to in one.targets)
            ]
            own = node.id not in asked and bool(given) and node.id not in _parameters(self._function)
            return own and all(self._is_plain(one, asked | {node.id}) for one in given)
        if isinstance(node, ast.BinOp):
            return _is_text(node) or (self._is_plain(node.left, asked) and self._is_plain(node.right, asked))
        if isinstance(node, ast.UnaryOp):
            return self._is_plain(node.operand, asked)
        if isinstance(node, ast.IfExp):
            return self._is_plain(node.body, asked) and self._is_plain(node.orelse, asked)
        if isinstance(node, ast.Call):
            makes = self._wording.makes_a_number(node) or called(node) in _METHODS_OF_TEXTS | _TEXTS
            return makes or self._wording.called(node) is not None
        return isinstance(node, (ast.Constant, ast.JoinedStr))


def _is_text(node: ast.expr) -> bool:
    """What a text is added to, or multiplied by, makes a text."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, (ast.Add, ast.Mult, ast.Mod)) and (_is_text(node.left) or _is_text(node.right))
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _parameters(function: _Function) -> set[str]:
    return {one.arg for one in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)}


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The names of modules, and which they are."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((one.asname or one.name, one.name) for one in node.names)
