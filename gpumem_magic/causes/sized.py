"""What was made as large as there was room: a size that follows from how much memory was free."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from gpumem_magic.causes.model import Scene
from gpumem_magic.causes.statements import each_target
from gpumem_magic.causes.written import Text, Written
from gpumem_magic.looks.code import cell_of
from gpumem_magic.snapshot.timeline import Allocation

# What tells how much is free, or how much there is.
_ASKS = frozenset(
    {"mem_get_info", "get_memory_info", "device_memory_used", "get_device_properties", "nvmlDeviceGetMemoryInfo"}
)
_FILE = re.compile(r"[/\\]")


def asked_for_room(scene: Scene, allocation: Allocation) -> Written | None:
    """The statement that asked how much memory there is, where the line that made an allocation goes by its answer: in the same
    function, or in one that it calls for a number."""
    birth = scene.recording.logs[scene.device].births.get(allocation.born)
    place = birth.place if birth is not None else None
    if place is None or not place.own_line:
        return None
    own = place.own_file == scene.recording.own_file
    where = "" if own else cell_of(place.own_file) or _FILE.split(place.own_file)[-1]
    for one in scene.program.texts:
        if one.where == where and any(name in one.source for name in _ASKS):
            found = _source(one, place.own_line - one.ahead)
            if found is not None:
                return one.place(found)
    return None


def _source(text: Text, line: int) -> ast.stmt | None:
    """Of the statement at a line, the one from whose answer it follows."""
    within: dict[Any, list[ast.stmt]] = defaultdict(list)
    for statement in text.everywhere:
        within[text.loops_around(statement.lineno)[0]].append(statement)
    answers: dict[str, ast.stmt] = {}
    for function, statements in within.items():
        asking = next((one for one in statements if _asks(one)), None)
        if isinstance(function, ast.FunctionDef) and asking is not None and any(map(_gives, statements)):
            answers[function.name] = asking
    known: dict[str, ast.stmt] = {}
    for statement in within[text.loops_around(line)[0]]:
        source = statement if _asks(statement) else _first(known, statement) or _called(answers, statement)
        if statement.lineno <= line <= (statement.end_lineno or statement.lineno):
            return source
        if source is not None:
            known.update(dict.fromkeys(_given(statement), source))
    return None


def _gives(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Return) and statement.value is not None


def _names(node: ast.AST) -> Iterator[str]:
    """Variables and attributes, each with all that leads to it: ``config``, ``config.blocks``."""
    return (ast.unparse(one) for one in ast.walk(node) if isinstance(one, (ast.Name, ast.Attribute)))


def _asks(statement: ast.stmt) -> bool:
    return any(name.rpartition(".")[2] in _ASKS for name in _names(statement))


def _first(known: dict[str, ast.stmt], statement: ast.stmt) -> ast.stmt | None:
    return next((known[name] for name in _names(statement) if name in known), None)


def _called(answers: dict[str, ast.stmt], statement: ast.stmt) -> ast.stmt | None:
    called = (ast.unparse(one.func).rpartition(".")[2] for one in ast.walk(statement) if isinstance(one, ast.Call))
    return next((answers[name] for name in called if name in answers), None)


def _given(statement: ast.stmt) -> Iterator[str]:
    """The variables and attributes that a statement assigns to."""
    whole = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    for one in (part for target in whole if target is not None for part in each_target(target)):
        if isinstance(one, (ast.Name, ast.Attribute)):
            yield ast.unparse(one)
