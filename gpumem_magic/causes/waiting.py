"""Graphs that wait for a backward: those of many forwards for one, or each for its own, and some through which none ever goes."""

from __future__ import annotations

import ast
import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from gpumem_magic.causes.model import LEAST, Scene
from gpumem_magic.causes.places import quoted
from gpumem_magic.devices.base import Birth, CodePlace
from gpumem_magic.owners.model import ON_CTX, size_of
from gpumem_magic.recording.model import BACKWARD, FORWARD, KEPT_BY_LIST, KEPT_BY_NAME
from gpumem_magic.report.model import Cause
from gpumem_magic.snapshot.timeline import Allocation
from gpumem_magic.units import human, listed

FEWER_AT_ONCE = (
    "Where their losses are only added up, `.backward()` after each keeps one graph at a time; else fewer at once take less, and "
    "`torch.utils.checkpoint` around each keeps its inputs only."
)
_TURNS_AT_ONCE = (
    "`torch.utils.checkpoint` around a turn keeps its inputs only; where nothing is to be learned through it, "
    "`with torch.no_grad():` keeps nothing."
)
# A model's two views of a batch, or a real and a generated one, are often meant.
_FORWARDS = 5
# A few turns of a loop are the depth of a model.
_TURNS = 8
# Two are a forward before the backward of the one before it.
_AHEAD = 3
_GOES_BACKWARD = re.compile(r"\bbackward\(|\bstep\(")
_BACKWARD_SOONER = (
    "A backward soon after its forward (in a pipeline, the schedule 1F1B) lets fewer wait at once; "
    "`torch.utils.checkpoint` inside keeps inputs only."
)
_LESS_EACH = (
    "Half the items in each, and twice as many, take about half; `torch.utils.checkpoint` inside keeps inputs only."
)


def waiting_graphs(scene: Scene) -> Iterator[Cause]:
    """At the peak, the graphs of many forwards of one model, all of which one backward then uses up."""
    backward = next((one for one in scene.spans(BACKWARD) if scene.end_of(one) >= scene.moment), None)
    if backward is None or backward.failed:
        return
    begin, end = scene.start_of(backward), scene.end_of(backward)
    forwards = _forwards(scene)
    found: dict[str, dict[int, list[Allocation]]] = defaultdict(lambda: defaultdict(list))
    for number, one in _made_in(scene, forwards, min(begin, scene.moment)):
        if one.freed is not None and begin <= one.freed <= end:
            found[forwards[number][2]][number].append(one)
    label, its = max(found.items(), key=lambda pair: sum(map(size_of, pair[1].values())), default=("", {}))
    what, remedy = f"{len(its)} forwards of {quoted(label)}", FEWER_AT_ONCE
    least = _FORWARDS
    if len(its) < least:
        what, its, remedy, least = *_turns(scene, begin, end), _TURNS_AT_ONCE, _TURNS
    if len(its) < least:
        what, its = _turns_inside(scene, begin, end)
    sizes = sorted(map(size_of, its.values()))
    if len(sizes) < least or sum(sizes) < scene.part_of_peak(4):
        return
    row = next((point for point, start, stop in scene.statements if start <= begin <= stop), None)
    at = f" (line {row.line})" if row is not None else ""
    yield Cause(
        "waiting_graphs",
        f"{what} come before one backward{at}, and the graphs of all of them live until then: {human(sum(sizes))}.",
        remedy,
        sum(sizes) - sizes[-1],
        describes=True,
    )


def forwards_ahead(scene: Scene) -> Iterator[Cause]:
    """At the peak, the graphs of several forwards, each of which a backward of its own uses up: micro-batches of a pipeline."""
    backwards = _backwards(scene)
    if len(backwards) < _AHEAD:
        return
    forwards = _forwards(scene)
    waits: dict[str, dict[int, Counter[int]]] = defaultdict(lambda: defaultdict(Counter))
    for number, one in _made_in(scene, forwards, scene.moment):
        if one.freed is not None and _is_in(one.freed, backwards):
            waits[forwards[number][2]][number][bisect_right(backwards, (one.freed, one.freed))] += one.size
    its = max(waits.values(), key=lambda found: sum(map(Counter.total, found.values())), default={})
    its = {number: sizes for number, sizes in its.items() if sizes.total() >= scene.part_of_peak(50)}
    own = {sizes.most_common(1)[0][0] for sizes in its.values()}
    total = sum(map(Counter.total, its.values()))
    if not _AHEAD <= len(its) == len(own) or total < scene.part_of_peak(4):
        return
    first, last = (forwards[number][0] for number in (min(its), max(its)))
    is_in_turns = any(first < start < last for start, _ in backwards)
    yield Cause(
        "forwards_ahead",
        f"{len(its)} forwards wait at once, each for its own backward, and {human(total)} are kept for them.",
        _LESS_EACH if is_in_turns else _BACKWARD_SOONER,
        total - max(map(Counter.total, its.values())),
        describes=True,
    )


def _turns(scene: Scene, begin: int, end: int) -> tuple[str, dict[int, list[Allocation]]]:
    """A loop before a backward, in words, and what each of its turns has made that goes in the backward."""
    made: dict[tuple[int, ...], list[Allocation]] = defaultdict(list)
    lines = Counter[int]()
    for one in scene.living_in(min(begin, scene.moment), "activations"):
        if one.freed is None or not begin <= one.freed <= end:
            continue
        row = scene.tensors.statement_at(one.born) if scene.tensors is not None else None
        if row is not None and row.iteration:
            made[row.iteration].append(one)
            lines[row.line] += one.size
    # (Of a loop in a loop, the inner one's turns since the last backward.)
    if not lines:
        return "", {}
    where = listed([str(line) for line, _ in sorted(lines.most_common(2))])
    return f"{len(made)} turns of a loop (line{'s' * (len(lines) > 1)} {where})", dict(enumerate(made.values()))


def _turns_inside(scene: Scene, begin: int, end: int) -> tuple[str, dict[int, list[Allocation]]]:
    """The same of a loop in a function, such as a solver's, whose turns all compute with the same module; its own statements that
    keep most."""
    made: dict[CodePlace, list[Allocation]] = defaultdict(list)
    for one in scene.living_in(min(begin, scene.moment), "activations"):
        birth = scene.tensors.birth_of(one) if scene.tensors is not None else None
        goes = one.freed is not None and begin <= one.freed <= end
        if goes and birth is not None and birth.place is not None and not birth.node:
            made[birth.place].append(one)
    place, its = max(made.items(), key=lambda pair: size_of(pair[1]), default=(None, []))
    text = scene.program.text_of(place.own_file, scene.recording.own_file) if place is not None else None
    if place is None or text is None or scene.tensors is None or len(its) < 2 * _TURNS:
        return "", {}
    # (A model's layers, one after the other, are its depth.)
    modules = {scene.tensors.facts(one).module for one in its}
    loops = text.loops_around(place.own_line - text.ahead)[1]
    # (Of a loop that trains, each turn has a backward of its own.)
    trains = any(_GOES_BACKWARD.search(ast.unparse(one)) for one in loops)
    if 2 * size_of(its) < scene.report.peak.allocated or len(modules) > 1 or not loops or trains:
        return "", {}
    number = f"{len(its)}" if _made_alike(scene, its) else "Many"
    words = f"{number} turns of a loop ({scene.tensors.facts(its[0]).inner or f'line {place.own_line}'})"
    return words, {number: [one] for number, one in enumerate(its)}


def _made_alike(scene: Scene, its: Sequence[Allocation]) -> bool:
    """Whether each of these is the same operator's, so that there is one of each turn."""
    births = scene.recording.logs[scene.device].births
    return len({(births[one.born].kernel, births[one.born].shape) for one in its}) == 1


def unused_graphs(scene: Scene) -> Iterator[Cause]:
    """What a statement keeps for backward, though neither the next backward nor any other goes through it."""
    backwards = _backwards(scene)
    tensors = scene.tensors
    if not backwards or tensors is None:
        return
    births = scene.recording.logs[scene.device].births
    # Certain of the last turn's, by what holds them at the end; those before are alike.
    in_graphs = {
        _line(birth)
        for one in scene.held
        if one.kind == "graph"
        # (What a function keeps in an attribute stays behind its backward.)
        and ON_CTX not in one.place
        and (made := scene.alive.get(one.address)) is not None
        and (birth := births.get(made.born)) is not None
    } - {_line(birth) for birth in births.values() if birth.node}
    rows: dict[int, list[Allocation]] = defaultdict(list)
    for one in scene.timeline.allocations:
        birth = births.get(one.born)
        point = tensors.statement_at(one.born) if birth is not None and _line(birth) in in_graphs else None
        number = bisect_left(backwards, (one.born, 0))
        if point is None or number == len(backwards) or scene.labels[one.index].category != "activations":
            continue
        done = backwards[number][1]
        # What goes inside a backward was used by it.
        if one.freed is not None and (one.freed <= done or _is_in(one.freed, backwards)):
            continue
        # A name keeps what it names in any case.
        if tensors.keeper(one, done)[0] not in (KEPT_BY_NAME, KEPT_BY_LIST):
            rows[point.line].append(one)
    lines = sorted(rows)
    kept = [one for its in rows.values() for one in its]
    if (
        size_of(one for one in kept if one.born < scene.moment and (one.freed is None or one.freed > scene.moment))
        < LEAST
    ):
        return
    ends = sorted(stop for _, _, stop in scene.statements)
    begin = scene.start_of_row(scene.moment - 1)
    # In the statement at the peak, each would go as soon as the next one is there.
    here = sorted(one.born for one in kept if scene.start_of_row(one.born) == begin)
    gone = dict(pairwise(here))
    after = [replace(one, born=gone.get(one.born, ends[bisect_right(ends, one.born)])) for one in kept]
    highest, _ = scene.highest_without(after)
    saved = scene.report.peak.allocated - highest
    if saved < scene.part_of_peak(20):
        return
    statements = {point.line: point.statement.strip().partition("\n")[0] for point, _, _ in scene.statements}
    words = listed([f"`{statements[line]}`" for line in lines[:2] if line in statements])
    where = f"line{'s' if len(lines) > 1 else ''} {listed([str(line) for line in lines])}"
    yield Cause(
        "unused_graphs",
        f"{words} ({where}) keep{'' if len(lines) > 1 else 's'} a graph that no backward goes through, also while the next "
        f"ones run: {human(saved)} of the peak.",
        f"Compute it inside `with torch.no_grad():`; the peak would be at most {human(highest)}.",
        saved,
    )


def _forwards(scene: Scene) -> list[tuple[int, int, str]]:
    return sorted((scene.start_of(one), scene.end_of(one), one.label) for one in scene.spans(FORWARD))


def _backwards(scene: Scene) -> list[tuple[int, int]]:
    return sorted((scene.start_of(one), scene.end_of(one)) for one in scene.spans(BACKWARD) if not one.failed)


def _made_in(scene: Scene, forwards: list[tuple[int, int, str]], position: int) -> Iterator[tuple[int, Allocation]]:
    """The activations that are live at a position, each with the number of the forward that made it. What follows a forward (its
    loss, what becomes of the weights) is counted with it."""
    for one in scene.living_in(position, "activations"):
        number = bisect_right(forwards, (one.born, scene.end)) - 1
        if number >= 0:
            yield number, one


def _line(birth: Birth) -> tuple[str, int]:
    return ("", 0) if birth.place is None else (birth.place.own_file, birth.place.own_line)


def _is_in(position: int, spans: list[tuple[int, int]]) -> bool:
    number = bisect_right(spans, (position, position)) - 1
    return number >= 0 and spans[number][0] <= position <= spans[number][1]
