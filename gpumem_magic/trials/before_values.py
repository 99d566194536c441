"""How much of a cell comes before the first statement that could see a name's value: trials with several values share it.

What is overlooked here (a method of an object that reads the name) finds no such name while the shared part runs, and fails:
then nothing is shared.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from gpumem_magic.looks.parsing import parsed
from gpumem_magic.trials.counting import with_functions

# Through them code sees all names, whatever it mentions.
_ALL_NAMES = frozenset(
    {"globals", "locals", "vars", "dir", "eval", "exec", "compile", "inspect", "get_ipython", "__main__"}
)
_OF_FRAMES = frozenset({"_getframe", "currentframe", "f_globals", "f_locals", "user_ns"})


def untouched(tree: ast.Module, names: Sequence[str], namespace: Mapping[str, Any]) -> int:
    """So many statements of a cell, from its first, can see no value of these names; 0 also where one of those behind them
    assigns one, or none seems to see any."""
    first = next((number for number, one in enumerate(tree.body) if _may_see(one, names, namespace)), 0)
    assigned_later = any(
        isinstance(node, ast.Name) and node.id in names and isinstance(node.ctx, ast.Store)
        for one in tree.body[first:]
        for node in ast.walk(one)
    )
    return 0 if assigned_later else first


def _may_see(statement: ast.stmt, names: Sequence[str], namespace: Mapping[str, Any]) -> bool:
    looked: list[ast.AST] = [statement]
    match statement:
        case ast.Assign(targets, value) if all(isinstance(one, ast.Name | ast.Tuple) for one in targets):
            # What assigns a name sees no value of it.
            looked = [value, *(one for target in targets for one in ast.walk(target) if not _is_plain(one))]
        case ast.AnnAssign(ast.Name(), annotation, ast.expr() as value):
            looked = [annotation, value]
    mentioned = [node.id for node in ast.walk(statement) if isinstance(node, ast.Name)]
    # (The first is the source that is given.)
    _, *functions = with_functions("", mentioned, namespace)
    return any(_mentions(one, names) for one in looked) or any(_mentions(_parsed(one), names) for one in functions)


def _is_plain(target: ast.AST) -> bool:
    return isinstance(target, ast.Name | ast.Tuple | ast.expr_context)


def _mentions(tree: ast.AST | None, names: Collection[str]) -> bool:
    return tree is None or any(_is_mention(node, names) for node in ast.walk(tree))


def _is_mention(node: ast.AST, names: Collection[str]) -> bool:
    match node:
        case ast.Name(name):
            return name in names or name in _ALL_NAMES
        case ast.Attribute(attr=name):
            return name in _OF_FRAMES
        case ast.alias(name, asname):
            return name in ("*", *_ALL_NAMES) or name in names or asname in names
        case ast.Constant(str(text)):
            return not _ALL_NAMES.union(names).isdisjoint(re.findall(r"\w+", text))
    return False


def _parsed(source: str) -> ast.Module | None:
    try:
        return parsed(source)
    except SyntaxError:
        return None
