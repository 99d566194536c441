"""Importing a program's libraries before its trials part, so that it is done once.

Only what is installed: a file of the user's own may do at its import what a trial has to see.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from contextlib import suppress

from gpumem_magic.failures import swallowed
from gpumem_magic.looks.code import is_library_file


def import_ahead(program: ast.Module) -> None:
    """What the program imports at its top level. What fails here fails in the program, too, where it is told."""
    for node in program.body:
        names = list(_imported(node))
        if names and all(map(_is_installed, names)):
            alone = compile(ast.Module([node], []), "<gpumem imports>", "exec")
            try:
                exec(alone, {"__name__": "<gpumem imports>"})
            except (Exception, SystemExit) as error:
                swallowed(error)


def _imported(node: ast.stmt) -> Iterator[str]:
    """The packages of an import, by their first names."""
    if isinstance(node, ast.Import):
        yield from (alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and not node.level and node.module != "__future__":
        yield str(node.module).partition(".")[0]


def _is_installed(name: str) -> bool:
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(name)
        return spec is not None and spec.origin is not None and is_library_file(spec.origin)
    return False
