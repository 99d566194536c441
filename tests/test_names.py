"""Tests, benchmarks and scripts take from the package only what it has.

A benchmark is run by hand, and a test beside thousands of others: a name that the package gave up is found here, by reading.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
OURS = "gpumem_magic"
FILES = sorted(path for folder in ("benchmarks", "docs", "tests") for path in (ROOT / folder).rglob("*.py"))
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def missing_names(tree: ast.Module) -> list[str]:
    """What a program imports from the package, or asks of a module of it, that isn't there: "line: module.name"."""
    modules: dict[str, ModuleType] = {}
    missing = []
    for node in ast.walk(tree):
        for line, name, called in _taken(node):
            found = _found(name)
            if found is None:
                missing.append(f"{line}: {name}")
            elif isinstance(found, ModuleType):
                modules[called] = found
    return missing + list(_asked(tree, modules))


def _taken(node: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Line, full name and the name in the program of what an import takes from the package."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.split(".")[0] == OURS:
                yield node.lineno, alias.name, alias.asname or alias.name
    elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == OURS:
        for alias in node.names:
            yield node.lineno, f"{node.module}.{alias.name}", alias.asname or alias.name


def _asked(node: ast.AST, modules: dict[str, ModuleType]) -> Iterator[str]:
    """What is asked of the modules and isn't there. A function's own variables may have a module's name."""
    if isinstance(node, FUNCTIONS):
        modules = {name: module for name, module in modules.items() if name not in set(_own(node))}
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and isinstance(node.value, ast.Name):
        module = modules.get(node.value.id)
        if module is not None and _found(f"{module.__name__}.{node.attr}") is None:
            yield f"{node.lineno}: {module.__name__}.{node.attr}"
    for child in ast.iter_child_nodes(node):
        yield from _asked(child, modules)


def _own(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, FUNCTIONS):
            yield from _own(child)


def _found(name: str) -> object:
    """A module, or what a module has under this name; None where there is none. What is None itself counts as found."""
    home, _, last = name.rpartition(".")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not str(error.name).startswith(OURS):
            pytest.skip(f"needs {error.name}")
    module = importlib.import_module(home) if home else None
    return (getattr(module, last) or True) if hasattr(module, last) else None


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_program_takes_from_the_package_is_there(path: Path) -> None:
    assert missing_names(ast.parse(path.read_text("utf-8"))) == []


def test_a_name_that_is_gone_is_found() -> None:
    program = """
from gpumem_magic.virtual.operators import attention, nothing
from gpumem_magic.units import MIB, no_unit
import gpumem_magic.no_room

def test(units):
    attention.fitting, attention.gone, MIB.bit_length
    def inner(attention):
        return attention.anything
"""
    assert missing_names(ast.parse(program)) == [
        "2: gpumem_magic.virtual.operators.nothing",
        "3: gpumem_magic.units.no_unit",
        "4: gpumem_magic.no_room",
        "7: gpumem_magic.virtual.operators.attention.gone",
    ]
