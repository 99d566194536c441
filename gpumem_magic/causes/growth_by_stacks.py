"""Memory that grows with the turns of a loop, where a file's stacks are all that is known: its lines come again and again."""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from statistics import median_low
from typing import NamedTuple

from gpumem_magic.attribution.places import place_in_program
from gpumem_magic.attribution.sites import is_python, tells_a_part
from gpumem_magic.causes.model import LEAST, Scene
from gpumem_magic.owners.model import size_of
from gpumem_magic.recording.model import BACKWARD, OPTIMIZER
from gpumem_magic.report.model import LABELS, OF_A_MODEL, Cause
from gpumem_magic.snapshot.model import Frame, TraceEvent
from gpumem_magic.snapshot.timeline import Allocation
from gpumem_magic.units import counted, human, listed

# So many turns are no accident.
_TURNS = 5
# Of ten turns that count so many leave about as much as the others, and of what they left so much is there.
_MOST_OF_TEN = 8
# What grows is a part of the peak, at least one in so many.
_PART = 10
# What a turn leaves is a graph's where it is results of so many layers: else it is what a line made.
_OF_A_GRAPH = 3
_NAMED = 3
# Turns that differ by more, as a part of what each leaves, leave "about" so much.
_EVEN = 0.05

# The program's functions around a request, outermost first, without those of modules and optimizers.
_Way = tuple[Frame, ...]


@dataclass
class _LoopInStacks:
    """Where a function of the program came back to a line. first, last: that line, and the last one that it came back from.
    turns: the events at which it did."""

    file: str
    function: str
    first: int
    last: int = 0
    turns: list[int] = field(default_factory=list)

    @property
    def place(self) -> str:
        lines = f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"
        of = "" if self.function == "<module>" else f" {self.function}"
        return f"{os.path.basename(self.file.replace(chr(92), '/'))}:{lines}{of}"


class _LeftByTurns(NamedTuple):
    """What the turns of a loop left, each so many bytes. spread: how far apart they are, as a part of these."""

    loop: _LoopInStacks
    each: int
    spread: float
    left: Sequence[Allocation]


def growth(scene: Scene) -> Iterator[Cause]:
    """What each turn of a loop leaves behind, and is there at the end, or when memory ran out."""
    moment = scene.end if scene.report.error is None else scene.moment
    made = [one for one in scene.timeline.live_at(moment) if one.born >= 0]
    if size_of(made) < max(LEAST, scene.part_of_peak(_PART)):
        return
    loops = _loops_of(scene.recording.logs[scene.device].events[:moment])
    found = [_growth_of(scene, one, made) for one in loops if len(one.turns) >= _TURNS]
    growing = [one for one in found if one is not None]
    if not growing:
        return
    # The loop whose turns are most alike; of such the innermost.
    best = min(growing, key=lambda one: (round(one.spread, 1), -len(one.loop.turns)))
    yield _told(scene, best)


def _loops_of(events: Sequence[TraceEvent]) -> list[_LoopInStacks]:
    """The places at which a function goes back to an earlier line of its own, or is called again from the same one."""
    ways: dict[tuple[int, ...], _Way] = {}
    loops: dict[tuple[_Way, str, str, int], _LoopInStacks] = {}
    # The lines that a function has come to since it was called.
    lines: dict[tuple[_Way, str, str], set[int]] = defaultdict(set)
    before: _Way = ()
    for number, event in enumerate(events):
        if event.action != "alloc" or not event.frames:
            continue
        # (A file's equal frames are one object.)
        key = tuple(map(id, event.frames))
        if (way := ways.get(key)) is None:
            way = ways[key] = _way_of(event.frames)
        # Autograd's threads have none of the program's functions, or begin with an operator's own.
        if not way or way == before:
            continue
        depth = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(way, before, strict=False)))
        for level in range(depth, len(way)):
            now, was = way[level], before[level].line if level < len(before) else 0
            reached = lines[way[:level], now.filename, now.name]
            if level > depth or not was or before[level][:2] != now[:2]:
                # (It is called anew.)
                reached.clear()
                was = 0
            loop = loops.setdefault((way[:level], *now), _LoopInStacks(now.filename, now.name, now.line))
            if is_back := was > now.line:
                loop.last = max(loop.last, was)
            if is_back or now.line not in reached:
                loop.turns.append(number)
            reached.add(now.line)
        before = way
    return [one for one in loops.values() if one.last]


def _way_of(frames: Sequence[Frame]) -> _Way:
    python = [frame for frame in reversed(frames) if is_python(frame)]
    return tuple(takewhile(lambda frame: not tells_a_part(frame), python))


def _growth_of(scene: Scene, loop: _LoopInStacks, made: Sequence[Allocation]) -> _LeftByTurns | None:
    """made: in the order in which they were."""
    turns = loop.turns
    steps = [scene.timeline.allocated_at(after) - scene.timeline.allocated_at(one) for one, after in pairwise(turns)]
    # The first turns bring gradients and an optimizer's states, which stay.
    counting = steps[len(steps) // 2 :] if len(steps) >= 2 * _TURNS else steps[1:]
    each, taken = median_low(counting), sum(counting)
    alike = [one for one in counting if each <= 2 * one <= 4 * each]
    if each <= 0 or 10 * len(alike) < _MOST_OF_TEN * len(counting) or taken < scene.part_of_peak(_PART):
        return None
    counted_from = turns[-1 - len(counting)]
    left = _made_between(made, counted_from, turns[-1])
    if 10 * size_of(left) < _MOST_OF_TEN * taken or _builds_a_model(scene, turns[-1 - len(counting) :], left):
        return None
    spread = sum(abs(one - each) for one in counting) / (each * len(counting))
    return _LeftByTurns(loop, each, spread, _made_between(made, turns[0], turns[-1]))


def _made_between(made: Sequence[Allocation], begin: int, end: int) -> list[Allocation]:
    first, last = (bisect_left(made, event, key=lambda one: one.born) for event in (begin, end))
    return list(made[first:last])


def _builds_a_model(scene: Scene, turns: Sequence[int], left: Sequence[Allocation]) -> bool:
    """Whether it is a model's memory that is left, and no turn trains: each makes a layer."""
    of_a_model = size_of(one for one in left if scene.labels[one.index].category in OF_A_MODEL)
    if 2 * of_a_model < size_of(left):
        return False
    trained = sorted(scene.start_of(one) for one in scene.spans(BACKWARD, OPTIMIZER))
    return any(bisect_left(trained, one) == bisect_left(trained, after) for one, after in pairwise(turns))


def _told(scene: Scene, found: _LeftByTurns) -> Cause:
    turns, events = found.loop.turns, scene.recording.logs[scene.device].events
    recurring: dict[tuple[str, str], list[Allocation]] = defaultdict(list)
    for one in found.left:
        line = place_in_program(events[one.born].frames).partition(",")[0]
        recurring[scene.labels[one.index].category, line].append(one)
    # (What one turn alone left, the others only used: an optimizer's states, a batch.)
    left = {
        key: its
        for key, its in recurring.items()
        if 2 * len({bisect_right(turns, one.born) for one in its}) >= len(turns)
    }
    whole = sum(map(size_of, left.values()))
    categories, lines = Counter[str](), Counter[str]()
    for (category, line), its in left.items():
        categories[category] += size_of(its)
        lines[line] += size_of(its)
    named, by = (
        [name for name, size in sizes.most_common(_NAMED) if name and 2 * _NAMED * size >= whole]
        for sizes in (categories, lines)
    )
    what = listed([LABELS[name] for name in named]) if named and "unknown" not in named else "memory"
    text = (
        f"Each turn of the loop at {found.loop.place} leaves {'about ' if found.spread > _EVEN else ''}"
        f"{human(found.each)} more allocated than the one before ({counted(len(turns), 'turn')}): "
        f"{human(whole)} of {what}{f' made by {listed(by)}' if by else ''}."
    )
    layers = [one for its in left.values() for one in its if any(map(tells_a_part, events[one.born].frames))]
    return Cause("growth", text, _remedy(named, len(layers) >= _OF_A_GRAPH * len(turns)), whole)


def _remedy(named: Sequence[str], of_graphs: bool) -> str:
    """of_graphs: whether what is left are results of several layers in each turn, which nobody but a graph keeps."""
    if set(named) <= set(OF_A_MODEL):
        return (
            "What keeps the former ones (a list, an object, a closure) has to let go of them before the next is made."
        )
    if "activations" in named and of_graphs:
        return (
            "Results of so many layers are a graph's: something that each turn computed is kept with what autograd saved, in "
            "a list or a sum. `.detach()` it before it is kept, or take its number by `.item()`."
        )
    return (
        "Something keeps it, such as a list that each turn appends to: keep only what is used later, on the host "
        "(`.detach().cpu()`)."
    )
