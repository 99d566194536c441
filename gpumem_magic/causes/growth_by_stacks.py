"""Memory that grows with the turns of a loop, where a file's stacks are all that is known."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median_low
from typing import NamedTuple

from gpumem_magic.attribution.places import line_in_program
from gpumem_magic.attribution.sites import CAST, FUNCTION, site_of
from gpumem_magic.causes.forwards_by_stacks import after_backwards, go_backward
from gpumem_magic.causes.model import LEAST, Scene
from gpumem_magic.causes.stack_loops import LoopInStacks, loops_of
from gpumem_magic.owners.model import size_of
from gpumem_magic.recording.model import BACKWARD, FORWARD, OPTIMIZER
from gpumem_magic.report.model import LABELS, OF_A_MODEL, Cause
from gpumem_magic.snapshot.timeline import Allocation
from gpumem_magic.units import human, listed

# So many turns are no accident.
_TURNS = 5
# Of ten turns that count so many leave about as much as the others, and of what they left so much is there.
_MOST_OF_TEN = 8
# What grows is a part of the peak, at least one in so many; what waits for a backward, so many.
_PART, _OF_GRAPHS = 10, 4
_FORWARDS = frozenset({FORWARD, FUNCTION, CAST})
# What a turn leaves is a graph's where it is results of so many layers, and of all that ran, one in so many.
_OF_A_GRAPH, _SHARE = 3, 3
_NAMED = 3
# Turns that differ by more, as a part of what each leaves, leave "about" so much.
_EVEN = 0.05


class _LeftByTurns(NamedTuple):
    """What the turns of a loop left, each so many bytes. spread: how far apart they are, as a part of these."""

    loop: LoopInStacks
    each: int
    spread: float
    left: Sequence[Allocation]


def growth(scene: Scene) -> Iterator[Cause]:
    """What each turn of a loop leaves behind, and is there at the end, or when memory ran out."""
    moment = scene.end if scene.report.error is None else scene.moment
    if (found := _most_even(scene, 0, moment, _PART)) is not None:
        yield _told(scene, found)


def graphs_ahead(scene: Scene) -> Iterator[Cause]:
    """At the peak, what several turns saved for one backward that comes behind them all."""
    if scene.report.error is not None:
        return
    found = _most_even(scene, after_backwards(scene), scene.moment, _OF_GRAPHS)
    if found is None:
        return
    saved = [one for one in found.left if scene.labels[one.index].category == "activations" and one.freed is not None]
    if size_of(saved) < scene.part_of_peak(_OF_GRAPHS) or not go_backward(scene, saved):
        return
    yield Cause(
        "waiting_graphs",
        f"{len(found.loop.begins)} {found.loop.several} come before one backward, and what they saved for it is all there until "
        f"then: {human(size_of(saved))}.",
        f"Where each {found.loop.noun} has a loss of its own, `.backward()` in it lets go of what it saved: gradients add up by "
        "themselves. (What one turn hands on to the next has to be `.detach()`ed then.)",
        size_of(saved),
        describes=True,
    )


def _most_even(scene: Scene, begin: int, end: int, part: int) -> _LeftByTurns | None:
    """Of the loops whose turns each leave as much, between two positions, and one part in so many of the peak in all, that whose
    turns are most alike; of such the innermost."""
    made = [one for one in scene.timeline.live_at(end) if one.born >= begin]
    if size_of(made) < max(LEAST, scene.part_of_peak(part)):
        return None
    here = (one.between(begin, end) for one in loops_of(scene))
    found = [_left_by(scene, one, made, part) for one in here if len(one.begins) >= _TURNS]
    growing = [one for one in found if one is not None]
    return min(growing, key=lambda one: (round(one.spread, 1), -len(one.loop.begins)), default=None)


def _left_by(scene: Scene, loop: LoopInStacks, made: Sequence[Allocation], part: int) -> _LeftByTurns | None:
    """made: in the order in which they were."""
    turns = loop.begins
    steps = [scene.timeline.allocated_at(after) - scene.timeline.allocated_at(one) for one, after in pairwise(turns)]
    # The first turns bring gradients and an optimizer's states, which stay.
    counting = steps[len(steps) // 2 :] if len(steps) >= 2 * _TURNS else steps[1:]
    each, taken = median_low(counting), sum(counting)
    alike = [one for one in counting if each <= 2 * one <= 4 * each]
    if each <= 0 or 10 * len(alike) < _MOST_OF_TEN * len(counting) or taken < scene.part_of_peak(2 * part):
        return None
    counted_from = turns[-1 - len(counting)]
    left = _made_between(made, counted_from, turns[-1])
    if 10 * size_of(left) < _MOST_OF_TEN * taken or _builds_a_model(scene, turns[-1 - len(counting) :], left):
        return None
    spread = sum(abs(one - each) for one in counting) / (each * len(counting))
    whole = _made_between(made, turns[0], turns[-1])
    return _LeftByTurns(loop, each, spread, whole) if size_of(whole) >= scene.part_of_peak(part) else None


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
    turns, events = found.loop.begins, scene.recording.logs[scene.device].events
    recurring: dict[tuple[str, str], list[Allocation]] = defaultdict(list)
    for one in found.left:
        line = line_in_program(events[one.born].frames)
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
        f"Each {found.loop.once} leaves {'about ' if found.spread > _EVEN else ''}{human(found.each)} more allocated than the "
        f"one before ({len(turns):,} {found.loop.noun}s): {human(whole)} of {what}{f' made by {listed(by)}' if by else ''}."
    )
    of_a_graph = "activations" in named and _are_a_graphs(scene, turns, [one for its in left.values() for one in its])
    return Cause("growth", text, _remedy(found, named, of_a_graph), whole)


def _are_a_graphs(scene: Scene, turns: Sequence[int], left: Sequence[Allocation]) -> bool:
    """Whether each turn left results of several layers, and of a good part of all forwards that ran in it: who keeps keys and
    values, or what a model gives, keeps a few."""
    events = scene.recording.logs[scene.device].events
    layers = [frames for one in left if site_of(frames := events[one.born].frames) in _FORWARDS]
    last = (event.frames for event in events[turns[-2] : turns[-1]] if event.action == "alloc")
    ran = {tuple(map(id, frames)) for frames in last if site_of(frames) in _FORWARDS}
    kept = {tuple(map(id, frames)) for frames in layers}
    return len(layers) >= _OF_A_GRAPH * len(turns) and _SHARE * len(kept & ran) >= len(ran)


def _remedy(found: _LeftByTurns, named: Sequence[str], of_a_graph: bool) -> str:
    if set(named) <= set(OF_A_MODEL):
        return (
            "What keeps the former ones (a list, an object, a closure) has to let go of them before the next is made."
        )
    if of_a_graph:
        return (
            f"Results of so many layers are a graph's: something that each {found.loop.noun} computed is kept with what autograd "
            "saved, in a list or a sum. `.detach()` it before it is kept, or take its number by `.item()`."
        )
    return (
        f"Something keeps it, such as a list that each {found.loop.noun} appends to: keep only what is used later, on the host "
        "(`.detach().cpu()`)."
    )
