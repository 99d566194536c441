"""Which names a cell makes anew, so that what an earlier run left under them is no part of the next one."""

from __future__ import annotations

import ast

from gpumem_magic.advice.draft import names_given, names_read


def made_anew(code: str) -> set[str]:
    """The names that a cell's top-level statements give a value before anything in it reads them."""
    made: set[str] = set()
    read: set[str] = set()
    for statement in ast.parse(code).body:
        if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.For, ast.AsyncFor)):
            value = statement.iter if isinstance(statement, (ast.For, ast.AsyncFor)) else statement.value
            read |= names_read(value) - made if value is not None else set()
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for target in targets:
                made |= {name for name in names_given(target) if name not in read}
                read |= names_read(target) - made
        read |= names_read(statement) - made
    return made
