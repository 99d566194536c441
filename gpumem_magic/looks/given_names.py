"""What a program's names hold, where all that they are given is seen: asked of source text alone.

Tensors and arrays, whose rows are all as long as one another; and objects of the file's own classes."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from gpumem_magic.looks.expressions import called

_Name = tuple[int, str]  # The first line of its scope (0 of a module), and the name.
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# What has an array as its result, whatever it is a method or a function of (a ragged list is none of NumPy's arrays).
_MAKING = frozenset((
    "numpy", "cpu", "cuda", "detach", "array", "asarray", "from_numpy", "tensor", "as_tensor", "zeros", "ones", "full", "rand",
    "randn", "randint", "softmax", "log_softmax", "sigmoid", "stack", "cat",
))  # fmt: skip
# What gives such an object where it is asked of one.
_KEEPING = frozenset(
    ("copy", "clone", "contiguous", "float", "half", "double", "int", "long", "abs", "to", "view", "reshape")
)
# What gives a tensor where it is asked of one, and none of the host.
_CARRYING = _KEEPING | {
    "cuda",
    "detach",
    "requires_grad_",
    "type_as",
    "t",
    "transpose",
    "permute",
    "squeeze",
    "unsqueeze",
    "pow",
    "exp",
}


class _Bound(NamedTuple):
    """An expression (nothing where nobody knows it), and the scopes that its names are looked up in."""

    value: ast.expr | None
    scopes: tuple[int, ...]


class GivenNames:
    """Asks of all that a name is given; of a parameter, of what each call hands it, where all calls are seen."""

    def __init__(self, tree: ast.Module) -> None:
        self._given: dict[_Name, list[_Bound]] = defaultdict(list)
        self._calls: dict[_Name, list[tuple[ast.Call, tuple[int, ...]]]] = defaultdict(list)
        self._mentions: dict[str, int] = defaultdict(int)
        self._parameters: list[tuple[_Name, _Name, int]] = []
        self._classes = _classes_in(tree)
        self._read(tree, (0,))
        for parameter, function, position in self._parameters:
            calls = self._calls[0, function[1]]
            if len(calls) != self._mentions[function[1]] or len(self._given[function]) != 1:
                calls = []
            found = [
                _Bound(None if any(isinstance(arg, ast.Starred) for arg in one.args) else one.args[position], scopes)
                for one, scopes in calls
                if len(one.args) > position
            ]
            self._given[parameter] += found if calls and len(found) == len(calls) else [_Bound(None, ())]

    def are_rows(self, name: _Name) -> bool:
        """Whether it is a tensor or an array."""
        return self._is_one(name, set())

    def may_be_made(self, name: _Name) -> bool:
        """Whether it may be a tensor that the program makes: one of the values that it is given is."""
        return self._is_made(name, set())

    def lists_made(self, name: _Name) -> bool:
        """Whether it may be a list of tensors that the program makes."""
        return any(
            self._is_new(element, one.scopes, set())
            for one in self._given.get(name, ())
            if isinstance(one.value, (ast.List, ast.ListComp))
            for element in (one.value.elts if isinstance(one.value, ast.List) else [one.value.elt])
        )

    def follows(self, name: _Name, method: str) -> bool:
        """Whether it is an object of the file's own class that has this method, with all its parameters named."""
        given = self._given.get(name, ())
        return bool(given) and all(
            isinstance(one.value, ast.Call)
            and isinstance(one.value.func, ast.Name)
            and method in self._classes.get(one.value.func.id, ())
            for one in given
        )

    def _is_made(self, name: _Name, seen: set[_Name]) -> bool:
        if name in seen:
            return False
        seen.add(name)
        given = self._given.get(name, ())
        return any(one.value is not None and self._is_new(one.value, one.scopes, seen) for one in given)

    def _is_new(self, node: ast.expr, scopes: Sequence[int], seen: set[_Name]) -> bool:
        """Whether an expression makes a tensor, as far as its text tells: what a model gives may be anything."""
        if isinstance(node, ast.Name):
            at = next((one for one in reversed(scopes) if (one, node.id) in self._given), None)
            return at is not None and self._is_made((at, node.id), seen)
        if isinstance(node, (ast.BinOp, ast.UnaryOp)):
            sides = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.operand]
            return any(self._is_new(one, scopes, seen) for one in sides)
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return False
        of_pytorch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
        return of_pytorch or (node.func.attr in _CARRYING and self._is_new(node.func.value, scopes, seen))

    def _is_one(self, name: _Name, seen: set[_Name]) -> bool:
        if name in seen:
            return True
        seen.add(name)
        given = self._given.get(name, ())
        return bool(given) and all(one.value is not None and self._makes(one.value, one.scopes, seen) for one in given)

    def _makes(self, node: ast.expr, scopes: Sequence[int], seen: set[_Name]) -> bool:
        if isinstance(node, ast.Name):
            at = next((one for one in reversed(scopes) if (one, node.id) in self._given), None)
            return at is not None and self._is_one((at, node.id), seen)
        if isinstance(node, ast.Subscript):
            return self._makes(node.value, scopes, seen)
        if not isinstance(node, ast.Call):
            return False
        kept = isinstance(node.func, ast.Attribute) and node.func.attr in _KEEPING
        return called(node) in _MAKING or (kept and self._makes(node.func.value, scopes, seen))  # type: ignore[attr-defined]

    def _read(self, node: ast.AST, scopes: tuple[int, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, _FUNCTIONS):
                self._enter(child, scopes, of_class=isinstance(node, ast.ClassDef))
            elif isinstance(child, ast.Assign) and len(child.targets) == 1 and isinstance(child.targets[0], ast.Name):
                self._given[scopes[-1], child.targets[0].id].append(_Bound(child.value, scopes))
                self._read(child.value, scopes)
                self._note(child.value, scopes)
            else:
                self._note(child, scopes)
                self._read(child, scopes)

    def _note(self, node: ast.AST, scopes: tuple[int, ...]) -> None:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            self._calls[0, node.func.id].append((node, scopes))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            self._given[scopes[-1], node.id].append(_Bound(None, scopes))
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            for at in scopes:
                for name in node.names:
                    self._given[at, name].append(_Bound(None, scopes))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            self._mentions[node.id] += 1

    def _enter(self, function: ast.FunctionDef | ast.AsyncFunctionDef, scopes: tuple[int, ...], of_class: bool) -> None:
        known = (scopes[-1], function.name)
        self._given[known].append(_Bound(None, scopes))
        inner = (*scopes, function.lineno)
        own = [*function.args.posonlyargs, *function.args.args]
        # (A module's function may be called from other files, and so may a method.)
        seen = len(scopes) > 1 and not of_class and not function.args.defaults and not function.decorator_list
        for position, one in enumerate(own):
            if seen:
                self._parameters.append(((function.lineno, one.arg), known, position))
            else:
                self._given[function.lineno, one.arg].append(_Bound(None, inner))
        for other in (*function.args.kwonlyargs, function.args.vararg, function.args.kwarg):
            if other is not None:
                self._given[function.lineno, other.arg].append(_Bound(None, inner))
        for part in function.body:
            self._read(ast.Module([part], []), inner)
        for outside in (*function.decorator_list, *function.args.defaults, *filter(None, function.args.kw_defaults)):
            self._note(outside, scopes)
            self._read(outside, scopes)


def _classes_in(tree: ast.Module) -> dict[str, frozenset[str]]:
    """By their names, the methods that they have of their own."""
    found: dict[str, list[frozenset[str]]] = defaultdict(list)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            methods = (one for one in node.body if isinstance(one, _FUNCTIONS) and not one.decorator_list)
            found[node.name].append(frozenset(one.name for one in methods if not (one.args.vararg or one.args.kwarg)))
    return {name: methods[0] for name, methods in found.items() if len(methods) == 1}
