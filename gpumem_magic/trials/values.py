"""What is varied: a name and its values, as somebody types them (``batch_size=1..1024``, ``seq_len=512,1024,2048``)."""

from __future__ import annotations

import ast
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpumem_magic.devices.base import DeviceError
from gpumem_magic.trials.given_numbers import given_numbers

_MOST = 1 << 24


class VaryError(DeviceError, ValueError):
    """What is to be varied is not understood, or cannot be varied. The text is one line."""


@dataclass(frozen=True)
class Varied:
    """A name and its values in ascending order. listed: they were listed one by one, which makes rows of a table."""

    name: str
    values: Sequence[int]
    listed: bool = False


def varied(text: str) -> Varied:
    """From ``NAME=FROM..TO``, ``NAME=FROM..TO..STEP`` or ``NAME=A,B,C``. Raises VaryError."""
    name, equals, written = text.rpartition("=")
    name, written = name.strip(), written.strip()
    if not equals or not name:
        raise VaryError(f"{text!r}: write a name and its values, as batch_size=1..1024 or seq_len=512,1024,2048")
    try:
        if ".." not in written:
            return Varied(name, checked(name, [int(one) for one in written.split(",")]), listed=True)
        first, last, step = (int(one) for one in (*written.split(".."), "1")[:3])
        if written.count("..") > 2 or step < 1:
            raise ValueError
        return Varied(name, checked(name, range(first, last + 1, step)))
    except VaryError:
        raise
    except ValueError:
        raise VaryError(
            f"{written!r} are no values for {name}: write whole numbers, as 1..1024, 8..512..8 or 512,1024,2048"
        ) from None


def checked(name: str, values: Sequence[int]) -> Sequence[int]:
    """The values in ascending order. Raises VaryError where there are none, or what is no whole number among them."""
    if not values:
        raise VaryError(f"{name} has no values to try: write the smaller one first, as 1..1024")
    if isinstance(values, range):
        values = values if values.step > 0 else values[::-1]
        if len(values) > _MOST:
            raise VaryError(f"{name} has {len(values):,} values: at most {_MOST:,} can be searched")
        return values
    if any(type(one) is not int for one in values):
        raise VaryError(f"the values of {name} have to be whole numbers")
    return sorted(set(values))


def along_and_across(names: Sequence[Varied]) -> tuple[Varied, Varied | None]:
    """The one whose largest value is looked for, and the one that makes a table's rows. Raises VaryError."""
    if len(names) == 1:
        return names[0], None
    if len(names) != 2 or names[0].name == names[1].name:
        raise VaryError("one name is varied, or two: write each once, as --fit batch_size=1..64 --fit seq_len=512,1024")
    if names[1].listed:
        return names[0], names[1]
    if names[0].listed:
        return names[1], names[0]
    raise VaryError(
        f"of two names one makes the table's rows: list its values, as {names[1].name}="
        f"{names[1].values[0]},{names[1].values[-1]}"
    )


# ---- in a cell's own code


def with_values(tree: ast.Module, values: Mapping[str, int]) -> tuple[ast.Module, frozenset[str]]:
    """A copy of a cell in which what it assigns to one of these names is this value, and the names that it assigns so.

    Assignments inside functions and classes are theirs, and those that compute with the name itself stay. Raises VaryError for
    a name that a loop, an import or a definition gives its values.
    """
    change = _Change(values)
    changed = change.visit(copy.deepcopy(tree))
    return changed, frozenset(change.assigned)


def usual_value(tree: ast.Module, name: str, namespace: Mapping[str, Any]) -> int | None:
    """The whole number that the cell gives a name, or that it has already; None where that is none, or worked out."""
    for given in given_numbers(tree):
        if given.name == name:
            return given.value
    found = namespace.get(name)
    return found if type(found) is int else None


class _Change(ast.NodeTransformer):
    def __init__(self, values: Mapping[str, int]) -> None:
        self.values = values
        self.assigned: set[str] = set()

    def visit_Assign(self, node: ast.Assign) -> Any:
        if names := self._given(node.targets, node.value):
            if len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                node.value = self._constant(names[0], node.value)
            else:
                # `batch_size, length = 32, 128`: the others have their values from it.
                after = [ast.Assign([ast.Name(name, ast.Store())], self._constant(name, node)) for name in names]
                return [node, *(ast.fix_missing_locations(ast.copy_location(one, node)) for one in after)]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        if node.value is not None and (names := self._given([node.target], node.value)):
            node.value = self._constant(names[0], node.value)
        return node

    def visit_NamedExpr(self, node: ast.NamedExpr) -> Any:
        if names := self._given([node.target], node.value):
            node.value = self._constant(names[0], node.value)
        return node

    def visit_For(self, node: Any) -> Any:
        self._refuse(node.target, node.lineno)
        return self.generic_visit(node)

    visit_AsyncFor = visit_For

    def visit_withitem(self, node: ast.withitem) -> Any:
        if node.optional_vars is not None:
            self._refuse(node.optional_vars, node.optional_vars.lineno)
        return node

    def visit_FunctionDef(self, node: Any) -> Any:
        self._refuse(ast.Name(node.name, ast.Store()), node.lineno)
        return node

    visit_AsyncFunctionDef = visit_ClassDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> Any:
        return node

    def visit_Import(self, node: Any) -> Any:
        for alias in node.names:
            self._refuse(ast.Name(alias.asname or alias.name, ast.Store()), node.lineno)
        return node

    visit_ImportFrom = visit_Import

    def _given(self, targets: Sequence[ast.expr], value: ast.expr) -> list[str]:
        names = [name for target in targets for name in _stored(target) if name in self.values]
        found = [name for name in names if not any(_loads(one, name) for one in ast.walk(value))]
        self.assigned.update(found)
        return found

    def _constant(self, name: str, place: ast.AST) -> ast.expr:
        return ast.copy_location(ast.Constant(self.values[name]), place)

    def _refuse(self, target: ast.AST, line: int) -> None:
        for name in _stored(target):
            if name in self.values:
                raise VaryError(
                    f"`{name}` gets its values from line {line} of the cell, so that no other can be tried: vary a name that "
                    "the cell assigns a number, or only reads"
                )


def _stored(target: ast.AST) -> list[str]:
    return [node.id for node in ast.walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]


def _loads(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
