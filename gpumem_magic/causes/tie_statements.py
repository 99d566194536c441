"""Layers that the program's text gives another's weight, in a constructor or in the cell. Nothing of it is run."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from gpumem_magic.causes.program import ProgramText
from gpumem_magic.causes.statements import last_name, path_of
from gpumem_magic.causes.written import Text, Written, nodes_in


class Tie(NamedTuple):
    """A statement that gives one layer another's weight (``self.head.weight = self.emb.weight``), in the constructor of a class,
    or outside of functions. of: the class, whose object the two paths start from; "" outside: then they have the variable.
    is_of_data: whether it gives the numbers alone, so that the two stay two.
    """

    of: str
    to: tuple[str, ...]
    given: tuple[str, ...]
    is_of_data: bool
    place: Written


def ties_in(program: ProgramText) -> list[Tie]:
    """Those of all classes' constructors, and of the cell outside of functions, that nothing is a condition of, and where
    nothing else gives either layer a weight (a head that is made anew, to be trained by itself)."""
    found: list[Tie] = []
    for one in program.mentioning("weight"):
        for kind in nodes_in(one, ast.ClassDef):
            said: list[Tie] = []
            for method in kind.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__" and method.args.args:
                    said += _ties_in(one, kind.name, method.args.args[0].arg, method.body)
            # (A class that was written again is as it was written last.)
            if said and kind is _written_last(program, kind.name):
                found += said
        if one.whole:
            found += _ties_in(one, "", "", one.tree.body)
    return [one for one in found if not _is_given_anew(program, one)] if found else []


def _written_last(program: ProgramText, name: str) -> ast.ClassDef | None:
    kinds = (kind for one in program.mentioning(name) for kind in nodes_in(one, ast.ClassDef) if kind.name == name)
    return next(kinds, None)


def _is_given_anew(program: ProgramText, tie: Tie) -> bool:
    """Whether one of the two layers, or its weight, is assigned anywhere but before the tie."""
    for path in (tie.to, tie.given):
        for one in program.mentioning(path[-2]):
            makers = {
                id(node): kind
                for kind in nodes_in(one, ast.ClassDef)
                for method in kind.body
                if isinstance(method, ast.FunctionDef) and method.name == "__init__"
                for node in ast.walk(method)
            }
            for node in nodes_in(one, ast.Assign):
                found = [path_of(to) for to in node.targets if isinstance(to, (ast.Attribute, ast.Subscript))]
                if not any(len(to) > 1 and path[-2] in (to[-1], to[-2] if to[-1] == path[-1] else "") for to in found):
                    continue
                if isinstance(node.value, ast.Attribute) and node.value.attr in (path[-1], "data"):
                    continue
                place, kind = one.place(node), makers.get(id(node))
                is_later = place.where == tie.place.where and place.line > tie.place.line
                if kind is not None:
                    if is_later if kind.name == tie.of else tie.of in map(last_name, kind.bases):
                        return True
                elif tie.of or is_later:
                    return True
    return False


def _ties_in(one: Text, kind: str, owner: str, body: Iterable[ast.stmt]) -> Iterator[Tie]:
    for node in body:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Attribute):
            continue
        paths = [path_of(part) for part in (*node.targets, node.value)]
        paths = [path[1:] if kind and path[:1] == (owner,) else path for path in paths]
        # (A path of one name is a variable, or an attribute that is no layer's.)
        if min(map(len, paths)) > 1 and len({path[-1] for path in paths}) == 1:
            for path in paths[:-1]:
                yield Tie(kind, path, paths[-1], node.value.attr == "data", one.place(node))
