"""The program's own functions that a cell runs: their texts, which can be changed, and what the process runs once they are."""

from __future__ import annotations

import ast
import inspect
import linecache
import os
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from gpumem_magic.looks.code import cell_of
from gpumem_magic.looks.parsing import begins_at, function_named, parsed
from gpumem_magic.recording.inside import InsideError, compiled_from
from gpumem_magic.trials.counting import own_functions

# What changes write above a program, by the name that it gives, and whose it is.
_IMPORTS = {"import torch": ("torch", "torch"), "import torch.nn.functional as F": ("F", "torch.nn.functional")}


@dataclass(frozen=True)
class WrittenFunction:
    """A function as it is written, in another cell or a file of the program's own.

    line: of the file, from 1. name: with its class. text: from its first decorator on, without the margin before its lines.
    imports: those of `_IMPORTS` that its file has.
    """

    file: str
    line: int
    name: str
    text: str
    margin: str
    imports: frozenset[str]

    @property
    def own_name(self) -> str:
        """Without its class."""
        return self.name.rpartition(".")[2]

    @property
    def where(self) -> str:
        """As somebody would say it: ``In [3]: train``, ``train.py:12: train``."""
        return f"{cell_of(self.file) or f'{os.path.basename(self.file)}:{self.line}'}: {self.name}"

    def shown(self, text: str) -> list[str]:
        """The lines of its text, or of a changed one, where they stand in the file."""
        return [f"{self.margin}{line}" if line else line for line in text.splitlines()]

    def apart(self, text: str) -> tuple[str, str]:
        """A changed text as what stands above the function, and the function."""
        function = function_named(parsed(text), self.own_name)
        assert function is not None
        above = begins_at(function) - 1
        lines = text.splitlines(keepends=True)
        return "".join(lines[:above]), "".join(lines[above:])


def written_functions(
    names: Iterable[str], namespace: Mapping[str, Any]
) -> Iterator[tuple[FunctionType, WrittenFunction]]:
    """Of the functions that a cell can reach by these names."""
    for function in own_functions(names, namespace):
        found = _definition_of(function)
        if found is not None:
            yield function, found


def put_in_force(changed: Mapping[WrittenFunction, str], names: Iterable[str], namespace: Mapping[str, Any]) -> None:
    """Has the functions run changed texts of theirs from now on. Nothing is put back: the process has to be a trial's own."""
    if not changed:
        return
    for number, (function, found) in enumerate(list(written_functions(names, namespace))):
        if found in changed:
            _run_as(function, found, changed[found], f"{found.file} changed {number}")


def _definition_of(function: FunctionType) -> WrittenFunction | None:
    code = function.__code__
    try:
        written = inspect.getsource(code)
    except (OSError, TypeError):
        return None
    text = textwrap.dedent(written)
    margin = written[: len(written) - len(written.lstrip(" \t"))]
    name = function.__qualname__.replace("<locals>.", "")
    has = function.__globals__
    imports = frozenset(
        line for line, (given, module) in _IMPORTS.items() if getattr(has.get(given), "__name__", "") == module
    )
    found = WrittenFunction(code.co_filename, code.co_firstlineno, name, text, margin, imports)
    with suppress(SyntaxError, ValueError, InsideError):
        if function_named(parsed(text), found.own_name) is not None:
            compiled_from(function, text, name, _unchanged, code.co_filename)
            return found
    return None


def _run_as(function: FunctionType, found: WrittenFunction, text: str, file: str) -> None:
    above, _ = found.apart(text)
    exec(compile(above, file, "exec", dont_inherit=True), function.__globals__)
    # Whoever looks for the function's source finds this.
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    code = compiled_from(function, text, found.name, _unchanged, file)
    function.__code__ = code.replace(co_firstlineno=above.count("\n") + 1)


def _unchanged(node: ast.AST, source: str) -> None:
    """As it is written."""
