"""Turns of loops that no row shows, in a comprehension, a function or a library: told by what one line makes again and again."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from itertools import pairwise

from gpumem_magic.causes.model import LEAST, Iteration, Scene, found_once
from gpumem_magic.recording.model import FORWARD, OPTIMIZER
from gpumem_magic.report.model import OF_A_MODEL
from gpumem_magic.snapshot.timeline import Allocation

# So many of one line and one shape that are all still there are no accident.
_SEVERAL = 5
# What only copies: data to where they are wanted, a model with all its weights.
_COPIES = frozenset({"to", "copy_", "cuda", "clone", "half", "float", "bfloat16", "contiguous"})
# What a line makes in so many statements, and other statements let go of before the next makes its own, is what these work with.
_OFTEN = 3
# They are a part of the peak, at least one in so many.
_PART = 10


@found_once
def _made_by_lines(scene: Scene) -> dict[object, dict[int, list[Allocation]]]:
    """A line, and the shape and type that it makes -> where the statement began in which it did -> what it made."""
    made: dict[object, dict[int, list[Allocation]]] = defaultdict(lambda: defaultdict(list))
    births = scene.recording.logs[scene.device].births
    for one in scene.timeline.allocations:
        birth = births.get(one.born)
        if birth is None or birth.place is None or birth.node or not birth.shape:
            continue
        if scene.labels[one.index].category in (*OF_A_MODEL, "inputs", "workspace") or one.size < LEAST // 2:
            continue
        key = (birth.place.own_file, birth.place.own_line, birth.shape, birth.dtype)
        made[key][scene.start_of_row(one.born)].append(one)
    return made


@found_once
def what_comes_and_goes(scene: Scene) -> frozenset[int]:
    """The numbers of allocations that a line made together, in several statements, each when those of the one before were gone,
    but for a part that the next goes on with."""
    found: set[int] = set()
    for rows in _made_by_lines(scene).values():
        sets = [its for its in rows.values() if len(its) >= _SEVERAL]
        gone = [
            sum(one.freed is not None and one.freed <= after[0].born for one in its) / len(its)
            for its, after in pairwise(sets)
        ]
        if len(sets) >= _OFTEN and min(gone) > 1 / 2:
            found.update(one.index for its in sets for one in its)
    return frozenset(found)


@found_once
def turns_of_lines(scene: Scene) -> list[list[Iteration]]:
    """From one that a line made to the next, where most of what it made within a statement were there when it made the last:
    those of the line that made most first. Layers of a model make theirs within one forward, and data are only put there."""
    inside = sorted((scene.start_of(one), scene.end_of(one)) for one in scene.spans(FORWARD, OPTIMIZER))
    found: list[tuple[int, list[Iteration]]] = []
    for row, its in (one for rows in _made_by_lines(scene).values() for one in rows.items()):
        last = its[-1].born
        kept = [one for one in its if one.freed is None or one.freed > last]
        size = sum(one.size for one in kept)
        # (What each turn lets go of when the next has its own is there twice, and no more.)
        if len(kept) < max(_SEVERAL, len(its) // 2) or size < scene.part_of_peak(_PART) or not _is_apart(kept, inside):
            continue
        if _is_put_in_place(scene, row, kept):
            continue
        turns = [Iteration(before.born, after.born) for before, after in pairwise(kept)]
        if all(_computes(scene, turn) for turn in turns):
            found.append((size, turns))
    return [turns for _, turns in sorted(found, key=lambda pair: -pair[0])]


def _is_put_in_place(scene: Scene, row: int, kept: list[Allocation]) -> bool:
    """Whether a statement, of which this is left, has let go of as much that was there before: a cache made anew.
    row: where it began."""
    stop = next((stop for _, begin, stop in scene.statements if begin == row < stop), row)
    left = sum(one.size for one in kept if one.freed is None or one.freed > stop)
    more = scene.timeline.allocated_at(stop) - scene.timeline.allocated_at(row)
    return _PART * max(more, 0) < left


def _is_apart(kept: list[Allocation], spans: list[tuple[int, int]]) -> bool:
    """Whether no forward, and no optimizer's step, made two of them."""
    around = [bisect_right(spans, (one.born, one.born)) - 1 for one in kept]
    numbers = [number for number, one in zip(around, kept, strict=True) if number >= 0 and one.born < spans[number][1]]
    return len(set(numbers)) == len(numbers)


def _computes(scene: Scene, turn: Iteration) -> bool:
    """Whether an operator made something of tensors of the device in it."""
    births = scene.births
    first = bisect_right(births, turn.start - 1, key=lambda pair: pair[0])
    last = bisect_right(births, turn.end - 1, key=lambda pair: pair[0])
    return any(birth.inputs and birth.operator not in _COPIES for _, birth in births[first:last])
