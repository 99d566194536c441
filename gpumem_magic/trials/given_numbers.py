"""Numbers that a program gives to a name that is no variable of its own: an argument (``DataLoader(data, batch_size=64)``), a
parameter's default, a field of a class, an entry of a configuration, a variable of a function.

To vary them, each is made to read one variable of the program, which a trial sets.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Collection, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class GivenNumber:
    """A place where a name is given a whole number. line: the cell's."""

    name: str
    value: int
    line: int


def given_numbers(tree: ast.AST) -> list[GivenNumber]:
    """All of them, in the order of their lines."""
    return sorted(
        (GivenNumber(name, value, node.lineno) for name, value, node in _places(tree)), key=lambda one: one.line
    )


def with_variables(tree: ast.Module, names: Collection[str]) -> ast.Module:
    """A copy of a program that reads `variable_of` a name wherever it gives one of these names a number."""
    changed = copy.deepcopy(tree)
    _Reading({id(node): name for name, _, node in _places(changed) if name in names}).visit(changed)
    return changed


def variable_of(name: str) -> str:
    """What stands for the numbers that are given to a name: a name that no program has."""
    return f"_gpumem_value_of_{name}"


class _Reading(ast.NodeTransformer):
    def __init__(self, readers: dict[int, str]) -> None:
        self._readers = readers

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if id(node) not in self._readers:
            return node
        return ast.copy_location(ast.Name(variable_of(self._readers[id(node)]), ast.Load()), node)


def _places(tree: ast.AST) -> Iterator[tuple[str, int, ast.Constant]]:
    for node in ast.walk(tree):
        for name, given in _pairs(node):
            match given:
                # (True and False are numbers to Python only.)
                case ast.Constant(int() as value) if type(value) is int:
                    yield name, value, given


def _pairs(node: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """What a node gives values to, under the last part of its name (``config.batch_size``, ``config["batch_size"]``)."""
    match node:
        case ast.Call(keywords=keywords):
            yield from ((one.arg, one.value) for one in keywords if one.arg is not None)
        case ast.arguments(posonlyargs=first, args=usual, defaults=defaults, kwonlyargs=keywords, kw_defaults=others):
            positional = [*first, *usual]
            yield from zip([one.arg for one in positional[len(positional) - len(defaults) :]], defaults, strict=True)
            yield from zip([one.arg for one in keywords], others, strict=True)
        case ast.Assign(targets, value):
            yield from ((name, value) for target in targets for name in _name_of(target))
        case ast.AnnAssign(target, _, value):
            yield from ((name, value) for name in _name_of(target))
        case ast.Dict(keys, values):
            yield from (
                (key.value, value)
                for key, value in zip(keys, values, strict=True)
                if isinstance(key, ast.Constant) and isinstance(key.value, str)
            )


def _name_of(target: ast.expr) -> Iterator[str]:
    match target:
        case ast.Name(name) | ast.Attribute(attr=name) | ast.Subscript(slice=ast.Constant(str(name))):
            yield name
