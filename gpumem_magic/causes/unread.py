"""Results that a variable still keeps at the peak, though nothing reads them any more."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpumem_magic.causes.model import Scene
from gpumem_magic.causes.places import quoted
from gpumem_magic.causes.program import FUNCTIONS, Text, each_target
from gpumem_magic.owners.model import size_of
from gpumem_magic.recording.model import Checkpoint
from gpumem_magic.report.model import Cause
from gpumem_magic.snapshot.timeline import Allocation
from gpumem_magic.units import human, listed

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_WITHS = (ast.With, ast.AsyncWith)
# Bytes that are computed; a model's and an optimizer's are kept for what they are.
_RESULTS = frozenset({"activations", "temporaries"})
# So many of them in a sentence.
_MANY = 3


@dataclass(frozen=True)
class NoLongerRead:
    """names: of the variables that keep these results, together. line: of the cell, that made the first. highest: the peak, if
    they were let go of before the statement at it."""

    names: tuple[str, ...]
    held: tuple[Allocation, ...]
    line: int
    point: Checkpoint
    highest: int

    @property
    def advice(self) -> str:
        """What to type where, and what the peak would be."""
        statement = self.point.statement.strip().partition("\n")[0]
        return (
            f"`del {', '.join(self.names)}` before `{statement}` (line {self.point.line}) lets go of what nothing reads any "
            f"more: the peak would be {human(self.highest)}"
        )


def unread_results(scene: Scene) -> Iterator[Cause]:
    """Logits that their loss no longer needs, while backward runs, say."""
    if (found := unread(scene)) is None:
        return
    keep = "still keeps its result" if len(found.names) == 1 else "still keep their results"
    yield Cause(
        "unread_results",
        f"{listed(list(map(quoted, found.names)))} (line {found.line}) {keep} at the peak: {human(size_of(found.held))}.",
        f"{found.advice}.",
        size_of(found.held),
        describes=True,
    )


def unread(scene: Scene) -> NoLongerRead | None:
    """What variables of the cell alone keep at the peak, neither a graph nor another name, where the statement at the peak and
    what runs after it read none of them before they get other values."""
    tensors, cells = scene.tensors, scene.program.cells
    point = tensors.statement_at(scene.moment - 1) if tensors is not None else None
    if tensors is None or point is None or not cells or scene.report.error is not None:
        return None
    begin = scene.start_of_row(scene.moment - 1)
    names = tensors.variables
    by_name: dict[tuple[str, ...], list[Allocation]] = defaultdict(list)
    for one in scene.timeline.live_at(scene.moment):
        made = scene.labels[one.index].category in _RESULTS and tensors.birth_of(one) is not None
        its = names.get(one.index)
        if made and its and one.born < begin and not tensors.is_saved(one) and size_of([one]) >= scene.part_of_peak(20):
            by_name[its].append(one)
    chosen: list[str] = []
    held: list[Allocation] = []
    for its, kept in by_name.items():
        if not any(is_read_from(cells[0], name, point.line) for name in its):
            chosen += [name for name in its if name not in chosen]
            held += kept
    if not held or len(chosen) > _MANY or size_of(held) < scene.part_of_peak(10):
        return None
    highest, _ = scene.highest_without(_let_go_in_time(scene, chosen, names, point))
    saved = scene.report.peak.allocated - highest
    if saved < scene.part_of_peak(20):
        return None
    line = tensors.facts(max(held, key=lambda one: one.size)).line
    return NoLongerRead(tuple(chosen), tuple(held), line, point, highest)


def _let_go_in_time(
    scene: Scene, chosen: Sequence[str], names: Mapping[int, tuple[str, ...]], point: Checkpoint
) -> Iterator[Allocation]:
    """What these variables alone keep, from where each run of the statement begins."""
    starts = [begin for row, begin, _ in scene.statements if row.line == point.line]
    assert scene.tensors is not None
    for one in scene.timeline.allocations:
        its = names.get(one.index)
        if its and set(its) <= set(chosen) and not scene.tensors.is_saved(one):
            start = next((begin for begin in starts if begin > one.born), None)
            if start is not None and (one.freed is None or one.freed > start):
                yield replace(one, born=start)


def is_read_from(cell: Text, name: str, line: int) -> bool:
    """Whether a variable may be read in the statement at a line of the cell, or after it, before it gets another value."""
    line -= cell.ahead
    reads, functions = [], []
    for top in cell.tree.body:
        for node in ast.walk(top):
            if isinstance(node, (*FUNCTIONS, ast.Lambda, ast.ClassDef)):
                functions.append(node)
            elif isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Store):
                reads.append(node.lineno)
    if any(isinstance(node, ast.Name) and node.id == name for one in functions for node in ast.walk(one)):
        # A function may read it whenever it is called.
        return True
    loops = cell.nodes_around(line, _LOOPS)
    if not any(_gets_another(loop, name, line) for loop in loops):
        # A later cell may read it.
        return True
    for read in reads:
        if read >= line:
            return True
        around = [loop for loop in loops if loop.lineno <= read <= (loop.end_lineno or read)]
        # The smallest loop that leads from the line to the read again.
        inner = max(around, key=lambda loop: loop.lineno, default=None)
        if inner is not None and not _gets_another(inner, name, read):
            return True
    return False


def _gets_another(loop: Any, name: str, line: int) -> bool:
    """Whether each turn of a loop gives a variable another value before a line: in its head, or in a statement that always
    runs."""
    if isinstance(loop, ast.For) and name in _given([loop.target]):
        return True
    for node in _always(loop.body):
        if node.lineno >= line and not (isinstance(node, ast.Assign) and node.lineno == line):
            return False
        if isinstance(node, ast.Assign) and name in _given(node.targets):
            return not any(isinstance(one, ast.Name) and one.id == name for one in ast.walk(node.value))
    return False


def _always(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, _WITHS):
            yield from _always(node.body)


def _given(targets: Iterable[ast.expr]) -> set[str]:
    return {part.id for one in targets for part in each_target(one) if isinstance(part, ast.Name)}
