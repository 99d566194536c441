"""Results that a name still keeps at the peak, though nothing reads them any more."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from gpumem_magic.causes.model import Scene, found_once
from gpumem_magic.causes.places import quoted
from gpumem_magic.causes.readings import (
    gives_attribute,
    is_read_again,
    is_read_at_all,
    is_read_from,
    is_read_in,
    reads_attribute,
)
from gpumem_magic.causes.written import Written
from gpumem_magic.devices.base import Birth
from gpumem_magic.owners.model import size_of
from gpumem_magic.owners.running import RunningFunction
from gpumem_magic.recording.model import BACKWARD
from gpumem_magic.report.model import Cause
from gpumem_magic.snapshot.timeline import Allocation
from gpumem_magic.units import human, listed

# Bytes that are computed; a model's and an optimizer's are kept for what they are.
_RESULTS = frozenset({"activations", "temporaries"})
# So many names in a sentence.
_MANY = 3


@dataclass(frozen=True)
class NoLongerRead:
    """names: that keep these results, together. held: what they keep. made: where the first was made. lets_go: the statement that
    ends it; "" where a later cell may read them. before: the one at the peak. highest: the peak, if it ended before that."""

    names: tuple[str, ...]
    held: tuple[Allocation, ...]
    made: str
    lets_go: str
    before: Written
    highest: int

    @property
    def called(self) -> str:
        return listed(list(map(quoted, self.names)))

    def advice(self, *, by_name: bool = False) -> str:
        """What to type where, and what the peak would be. by_name: where the sentence before has not named them."""
        peak = f"the peak would be {human(self.highest)}"
        if not self.lets_go:
            them = self.called if by_name else ("it" if len(self.names) == 1 else "them")
            return f"The rest of the cell does not read {them}: on the host (`.cpu()`), or deleted, {peak}"
        before = f"before `{self.before.shown}` ({self.before.words})"
        return f"`{self.lets_go}` {before} lets go of what nothing reads any more: {peak}"


def unread_results(scene: Scene) -> Iterator[Cause]:
    """Logits that their loss no longer needs, while backward runs, say."""
    if (found := unread(scene)) is None:
        return
    keep = "still keeps its result" if len(found.names) == 1 else "still keep their results"
    yield Cause(
        "unread_results",
        f"{found.called}{found.made} {keep} at the peak: {human(size_of(found.held))}.",
        f"{found.advice()}.",
        size_of(found.held),
        describes=True,
    )


@found_once
def unread(scene: Scene) -> NoLongerRead | None:
    """What names alone keep at the peak, and no graph, where the statement at the peak and what runs after it read none of them
    before they get other values: variables of the cell, of a function in which backward runs, an object's attribute."""
    if scene.tensors is None or not scene.program.cells or scene.report.error is not None:
        return None
    found = [
        one for kind in (_of_the_cell, _of_functions, _of_objects) for one in kind(scene) if _is_worth_it(scene, one)
    ]
    return min(found, key=lambda one: one.highest, default=None)


def _is_worth_it(scene: Scene, found: NoLongerRead) -> bool:
    saved = scene.report.peak.allocated - found.highest
    return (
        0 < len(found.names) <= _MANY
        and size_of(found.held) >= scene.part_of_peak(10)
        and saved >= scene.part_of_peak(20)
    )


def _of_the_cell(scene: Scene) -> Iterator[NoLongerRead]:
    tensors = scene.tensors
    point = tensors.statement_at(scene.moment - 1) if tensors is not None else None
    if tensors is None or point is None:
        return
    begin = scene.start_of_row(scene.moment - 1)
    of_names = tensors.variables
    by_name: dict[tuple[str, ...], list[Allocation]] = defaultdict(list)
    for one in _at_the_peak(scene, begin):
        if its := of_names.get(one.index):
            by_name[its].append(one)
    starts = [begin for row, begin, _ in scene.statements if row.line == point.line]
    # First what no later cell can read; then what this one does not.
    for is_read, lets_go in ((is_read_from, "del {}"), (is_read_again, "")):
        chosen: list[str] = []
        held: list[Allocation] = []
        for its, kept in by_name.items():
            if not any(is_read(scene.program.cells[0], name, point.line) for name in its):
                chosen += [name for name in its if name not in chosen]
                held += kept
        # (What the cell itself reads nowhere is its result, for another one.)
        if not lets_go and not all(is_read_at_all(scene.program.cells[0], name) for name in chosen):
            continue
        if not chosen or (not lets_go and _is_elsewhere(scene, chosen)):
            continue
        everything = (
            one for one in scene.timeline.allocations if (its := of_names.get(one.index)) and set(its) <= set(chosen)
        )
        yield NoLongerRead(
            tuple(chosen),
            tuple(held),
            f" (line {tensors.facts(max(held, key=lambda one: one.size)).line})",
            lets_go.format(", ".join(chosen)),
            Written("", point.line, point.statement),
            _highest_without(scene, everything, starts),
        )


def _is_elsewhere(scene: Scene, names: Iterable[str]) -> bool:
    """Whether another cell mentions one of these: its functions may read it."""
    words = re.compile(rf"\b(?:{'|'.join(map(re.escape, names))})\b")
    return any(words.search(one.source) for one in scene.program.cells[1:])


def _of_functions(scene: Scene) -> Iterator[NoLongerRead]:
    """Of those around the first backward: the others are taken to be as that."""
    there = {(scene.device, one.address): one for one in scene.timeline.live_at(scene.saved_at)}
    for function in scene.running:
        text = scene.program.text_of(function.file, scene.recording.own_file)
        line = 0 if text is None else function.line - text.ahead
        node = None if text is None else text.function_at(line, function.name)
        if text is None or node is None:
            continue
        others = {birth for one in scene.running if one is not function for birth in _made_for(scene, one, there)}
        free: dict[Birth, set[str]] = {
            birth: names
            for birth, names in _made_for(scene, function, there).items()
            if birth not in others and not any(is_read_in(text, node, name, line) for name in names)
        }
        held = _until_backward_ends(scene, free)
        names = sorted({name for one in held if (birth := _birth(scene, one)) for name in free[birth]})
        if held:
            before = Written(text.where, function.line, text.line(line))
            yield _let_go(scene, free, held, names, f" of {function.name}()", f"del {', '.join(names)}", before)


def _made_for(
    scene: Scene, function: RunningFunction, there: dict[tuple[int, int], Allocation]
) -> dict[Birth, set[str]]:
    """How what a function's variables lead to came to be -> their names."""
    found: dict[Birth, set[str]] = defaultdict(set)
    for name, places in function.variables.items():
        for one in (there[place] for place in places if place in there):
            if (birth := _birth(scene, one)) is not None:
                found[birth].add(name)
    return found


def _of_objects(scene: Scene) -> Iterator[NoLongerRead]:
    """An attribute that a function of the program's sets anew each time, and alone reads: by what it has at the end."""
    caller = next(iter(scene.running), None)
    where = None if caller is None else scene.program.text_of(caller.file, scene.recording.own_file)
    if caller is None or where is None or where.is_file:
        # (A module of its own does not know the notebook's variables.)
        return
    before = Written(where.where, caller.line, where.line(caller.line - where.ahead))
    for one in scene.held:
        variable, _, name = one.place.partition(".")
        made = scene.alive.get(one.address)
        birth = _birth(scene, made) if made is not None else None
        if one.kind != "tensor" or not name.isidentifier() or not variable.isidentifier() or birth is None:
            continue
        texts = [text for text in scene.program.texts if name in text.source]
        if not any(gives_attribute(text, name) for text in texts) or any(reads_attribute(text, name) for text in texts):
            continue
        if held := _until_backward_ends(scene, {birth}):
            yield _let_go(scene, {birth}, held, [one.place], "", f"{one.place} = None", before)


def _let_go(
    scene: Scene,
    free: Collection[Birth],
    held: Sequence[Allocation],
    names: Sequence[str],
    made: str,
    lets_go: str,
    before: Written,
) -> NoLongerRead:
    """free: how what the names keep came to be, in each iteration."""
    everything = (one for one in scene.timeline.allocations if _birth(scene, one) in free)
    starts = [scene.start_of(span) for span in scene.spans(BACKWARD)]
    return NoLongerRead(tuple(names), tuple(held), made, lets_go, before, _highest_without(scene, everything, starts))


def _until_backward_ends(scene: Scene, free: Collection[Birth]) -> list[Allocation]:
    """What came to be in one of these ways, is there at the peak, in a backward, and outlives it."""
    spans = (span for span in scene.spans(BACKWARD) if scene.start_of(span) < scene.moment <= scene.end_of(span))
    if (backward := next(spans, None)) is None:
        return []
    return [
        one
        for one in _at_the_peak(scene, scene.start_of(backward))
        if _birth(scene, one) in free and (one.freed is None or one.freed >= scene.end_of(backward))
    ]


def _birth(scene: Scene, one: Allocation) -> Birth | None:
    """How a result of the cell's came to be, in a forward; None of what a graph keeps, and of all else."""
    if scene.tensors is None or scene.labels[one.index].category not in _RESULTS or scene.tensors.is_saved(one):
        return None
    birth = scene.tensors.birth_of(one)
    return None if birth is None or birth.node or birth.shape is None else birth


def _at_the_peak(scene: Scene, begin: int) -> Iterator[Allocation]:
    """The large ones among these, from before a position."""
    for one in scene.timeline.live_at(scene.moment):
        if one.born < begin and one.size >= scene.part_of_peak(20) and _birth(scene, one) is not None:
            yield one


def _highest_without(scene: Scene, kept: Iterable[Allocation], starts: Sequence[int]) -> int:
    """The peak, if each of these that no graph keeps were let go of before the first of the starts that follows it."""
    parts = []
    for one in kept:
        start = next((begin for begin in starts if begin > one.born), None)
        if start is None or (scene.tensors is not None and scene.tensors.is_saved(one)):
            continue
        if one.freed is None or one.freed > start:
            parts.append(replace(one, born=start))
    return scene.highest_without(parts)[0]
