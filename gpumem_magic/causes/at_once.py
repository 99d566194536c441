"""What a statement makes of all rows at once on its way to a result, and lets go of again: in parts it would be less."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator

from gpumem_magic.causes.alike import made_at
from gpumem_magic.causes.model import WORTH, Scene
from gpumem_magic.devices.base import Birth
from gpumem_magic.owners.model import size_of
from gpumem_magic.recording.model import BACKWARD, FORWARD, OPTIMIZER
from gpumem_magic.report.model import Cause
from gpumem_magic.snapshot.timeline import Allocation
from gpumem_magic.units import counted, human

# Fewer rows can't be worked on in parts, and so many of one kind are parts.
_LEAST, _PARTS = 4, 3
# What goes is one part in so many of the peak, or more; so is what would be saved.
_SHARE, _SAVED = 2, 4
# What a statement computes.
_COMPUTED = frozenset({"temporaries", "activations", "activation_gradients", "other", "unknown", "inputs"})


def all_at_once(scene: Scene) -> Iterator[Cause]:
    """Where autograd has no part. (What one module alone makes of a batch, `whole_batch` tells.)"""
    moment = scene.moment
    row = next((each for each in scene.points if each[1] < moment <= each[2]), None)
    spans = [*scene.spans(BACKWARD, OPTIMIZER), *(one for one in scene.spans(FORWARD) if one.graph)]
    if row is None or any(scene.start_of(one) < moment <= scene.end_of(one) for one in spans):
        return
    point, begin, end = row
    # (What gradients are computed for that nobody steps by, as for each sample, is in parts less, too.)
    trains = bool(scene.spans(OPTIMIZER)) or bool(scene.living_in(scene.end, "gradients"))
    if scene.report.error is not None or (
        trains and any(begin <= scene.start_of(one) < end for one in scene.spans(BACKWARD))
    ):
        return
    births = scene.recording.logs[scene.device].births
    here = [one for one in scene.timeline.live_at(moment) if _passes(scene, one, begin, end)]
    size = size_of(here)
    if size < max(WORTH, scene.part_of_peak(_SHARE)):
        return
    sizes: Counter[int] = Counter()
    for one in here:
        if shape := _shape(births[one.born]):
            sizes[shape[0]] += one.size
    rows = max(sizes, key=lambda each: sizes[each], default=0)
    largest = max(here, key=lambda one: one.size)
    birth = births[largest.born]
    if rows < _LEAST or 2 * sizes[rows] < size:
        return
    if not any(shape and not shape[0] % rows for shape, _ in birth.inputs):
        # What is made of nothing has no rows that could come one after the other.
        return
    made = {event for event, one in scene.births if begin <= event < end and one == birth}
    if len(made) >= _PARTS and 2 * sum(one.born in made for one in here) < len(made):
        # They come in parts as it is.
        return
    alike = [(start, stop) for each, start, stop in scene.points if each.line == point.line]
    everything = [
        one
        for one in scene.timeline.allocations
        for start, stop in alike[max(0, bisect_right(alike, (one.born, scene.end)) - 1) :][:1]
        if _passes(scene, one, start, stop) and not (_shape(births[one.born]) or (0,))[0] % rows
    ]
    highest, _ = scene.highest_without(everything, share=2)
    saved = scene.report.peak.allocated - highest
    if saved < max(WORTH // 2, scene.part_of_peak(_SAVED)):
        return
    yield Cause(
        "all_at_once",
        f"{made_at(scene, largest)} works on all {rows:,} rows at once: {human(size)} in {counted(len(here), 'tensor')}, which "
        "go again before the statement ends.",
        f"Half of them at a time would take about {human(saved)} less; smaller parts take still less.",
        size,
        describes=True,
    )


def _passes(scene: Scene, one: Allocation, begin: int, end: int) -> bool:
    if scene.labels[one.index].category not in _COMPUTED or one.freed is None:
        return False
    return begin <= one.born and one.freed <= end and one.born in scene.recording.logs[scene.device].births


def _shape(birth: Birth) -> tuple[int, ...]:
    """Its own; of what an operator takes for its own work, that of what it is given."""
    return birth.shape or next((shape for shape, _ in birth.inputs), ())
