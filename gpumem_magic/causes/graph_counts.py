"""How many forwards' graphs a place keeps, and whether a backward is to come for them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TypeVar

from gpumem_magic.causes.ahead import backward_behind
from gpumem_magic.causes.model import Scene
from gpumem_magic.causes.places import (
    Spot,
    base,
    variable_of,
)
from gpumem_magic.causes.written import Written
from gpumem_magic.devices.base import CodePlace
from gpumem_magic.owners.model import Held
from gpumem_magic.recording.model import BACKWARD, FORWARD

# Two steps are near each other if they differ by one part in so many of the largest.
NEAR = 4
# Bytes of a complex number in double precision.
_A_NUMBER = 16
_Turn = TypeVar("_Turn", int, tuple[tuple[int, ...], tuple[int, ...]])


def graphs_of(scene: Scene, spot: Spot, *, whole: bool = False) -> int:
    """How many iterations' graphs a place keeps: of training's, or of the loop in which they were made; in a loop that nobody
    sees, as many as the place has parts, each of a forward of its own. whole: without one of which next to nothing is there."""
    kept = [
        (birth, one.size) for one in spot.held if (birth := born_at(scene, one)) >= 0 and not _is_shared(scene, one)
    ]
    born = sorted(birth for birth, _ in kept)
    ends = [one.end for one in scene.iterations]
    iterations = _turns(((bisect_left(ends, birth + 1), size) for birth, size in kept), whole=whole) if ends else set()
    turns = _turns(((turn, size) for birth, size in kept if (turn := scene.turn_of(birth))), whole=whole)
    spans = sorted((scene.start_of(one), scene.end_of(one)) for one in scene.spans(FORWARD))
    parts = len({base(one) for one in spot.held})
    # What lies around a forward, its batch and its loss, is no other one's.
    within = sum(bisect_left(born, begin) < bisect_left(born, end) for begin, end in spans)
    if any(one.beside for one in scene.spans(FORWARD)):
        # Of the threads that run a model, one is watched; what shares a forward has next to nothing of its own.
        by_part = Counter[str]()
        for one in spot.held:
            by_part[base(one)] += one.size
        largest = max(by_part.values())
        within = max(within, sum(2 * size >= largest for size in by_part.values()))
    forwards = within if spans else parts
    # A step in the midst of a turn: what comes behind it in the last one is of no further iteration.
    steps = len(iterations) - (len(turns) > 1 and len(iterations) == len(turns) + 1)
    return max(min(parts, forwards), steps, len(turns), _added_up(scene, spot, [begin for begin, _ in spans]))


def _added_up(scene: Scene, spot: Spot, starts: Sequence[int]) -> int:
    """Of how many forwards of one line a number reaches the graphs, where a later backward has gone through none of them: a sum
    that a function makes which trains and evaluates, say."""
    last = max(map(scene.start_of, scene.spans(BACKWARD)), default=-1)
    if not keeps_numbers(scene, spot):
        return 0
    behind = any(born_at(scene, one) >= last for one in spot.held)
    if behind and (scene.report.error is None or backward_ahead(scene, [spot]) is not None):
        return 0
    return max(map(len, come_again(scene, spot.held, starts).values()), default=0)


def _turns(sizes: Iterable[tuple[_Turn, int]], *, whole: bool) -> set[_Turn]:
    """The turns in which these were made. whole: but for a first one of which little is there: a detached state, say."""
    of_each: dict[_Turn, int] = defaultdict(int)
    for turn, size in sizes:
        of_each[turn] += size
    turns = sorted(of_each)
    least = min((of_each[one] for one in turns[1:]), default=0)
    return set(turns[1:] if whole and turns and NEAR * of_each[turns[0]] < least else turns)


def come_again(scene: Scene, graphs: Iterable[Held], starts: Sequence[int]) -> dict[CodePlace, set[int]]:
    """By the program's lines, of which forwards graphs are kept. starts: where these began."""
    births = scene.recording.logs[scene.device].births
    found: dict[CodePlace, set[int]] = defaultdict(set)
    for one in graphs:
        birth = births.get(born_at(scene, one))
        # (What a backward makes is placed where its forward is.)
        if birth is not None and not birth.node and birth.place is not None and birth.place.own_line:
            found[birth.place].add(bisect_right(starts, born_at(scene, one)))
    return found


def born_at(scene: Scene, one: Held) -> int:
    allocation = scene.alive.get(one.address)
    return -1 if allocation is None else allocation.born


def _is_shared(scene: Scene, one: Held) -> bool:
    """Whether it is autocast's copy of a weight: the first forward makes it, and the graphs of all later ones save it."""
    allocation = scene.alive.get(one.address)
    return allocation is not None and scene.labels[allocation.index].category == "autocast_copies"


def keeps_numbers(scene: Scene, spot: Spot) -> bool:
    """Whether what lies at a place are numbers, losses say, as far as is known."""
    own = [one for one in scene.held if one.kind == "tensor" and one.place.startswith(spot.place)]
    return bool(own) and all(one.requested <= _A_NUMBER for one in own)


def backward_ahead(scene: Scene, found: Sequence[Spot]) -> tuple[Written, Written] | None:
    """The loop in which memory ran out, and the backward behind it that goes through what it made, where the graphs were all made
    since the last backward."""
    last = max(map(scene.end_of, scene.spans(BACKWARD)), default=-1)
    if scene.report.error is None or any(born_at(scene, one) < last for spot in found for one in spot.held):
        return None
    ahead = backward_behind(scene.program.texts, scene.left.way, {_name_of(one) for one in found[:1]})
    if ahead is None or not ahead[0].where:
        return ahead
    # A loop of another file's began with the statement that called there, at the earliest.
    begin = scene.start_of_row(scene.moment - 1)
    return ahead if all(born_at(scene, one) >= begin for one in found[0].held) else None


def _name_of(spot: Spot) -> str:
    """The variable that keeps it, in a function or outside."""
    return (variable_of(spot.held[0]) or (spot.root, ""))[0]
