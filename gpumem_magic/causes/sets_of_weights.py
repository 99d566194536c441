"""Tensors for all of a model's weights at once, though one after the other would do: an optimizer, an average or a sum of
gradients in lists of their own."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace

from gpumem_magic.causes.alike import made_at
from gpumem_magic.causes.model import WORTH, Scene, requested
from gpumem_magic.devices.base import CodePlace
from gpumem_magic.owners.model import size_of
from gpumem_magic.recording.model import BACKWARD, OPTIMIZER
from gpumem_magic.report.model import Cause
from gpumem_magic.snapshot.timeline import Allocation
from gpumem_magic.units import counted, human

# A set has nearly all weights, in per cent; so many are one model's.
_NEARLY, _WEIGHTS = 80, 4
# One set that comes and goes may be needed as one.
_SEVERAL = 2
_OF_IT = frozenset({"gradients", "activations"})


def sets_of_weights(scene: Scene) -> Iterator[Cause]:
    """At the peak, outside of PyTorch's optimizers, and of no graph."""
    moment = scene.moment
    begin, end = _row(scene)
    at_work = (BACKWARD, OPTIMIZER)
    if any(scene.start_of(one) < moment <= scene.end_of(one) for one in scene.spans(*at_work)):
        return
    # (What a list or a dictionary has of each weight is labelled as weights, too.)
    own = {one.address for one in scene.held if one.kind == "parameter"}
    weights = [requested(one) for one in scene.living_in(moment, "parameters") if one.address in own]
    whole, births = sum(weights), scene.recording.logs[scene.device].births
    if len(weights) < _WEIGHTS or _SEVERAL * whole < scene.part_of_peak(4):
        return
    going: dict[CodePlace | None, list[Allocation]] = defaultdict(list)
    fresh: dict[CodePlace | None, list[Allocation]] = defaultdict(list)
    for one in scene.timeline.live_at(moment):
        birth = births.get(one.born)
        kept = scene.labels[one.index].category in _OF_IT or (one.address in own and one.freed is None)
        kept |= scene.tensors is not None and scene.tensors.is_saved(one)
        place = birth.place if birth is not None and not birth.node else None
        # (Of what is from before the cell, nobody knows where it was made.)
        if kept or (place is None and one.born >= 0):
            continue
        if one.freed is not None and one.freed <= end:
            going[place].append(one)
        elif one.born >= begin:
            fresh[place].append(one)
    sets = {place: _like(its, weights) for place, its in going.items()}
    # (What is made anew while the old one is there.)
    if any(one.born < begin for its in sets.values() for one in its):
        sets |= {place: [*sets.get(place, ()), *_like(its, weights)] for place, its in fresh.items()}
    # (The last may be half made.)
    sets = {place: its for place, its in sets.items() if 100 * size_of(its) >= _NEARLY * whole or _is_last(its, sets)}
    its = [one for each in sets.values() for one in each]
    if 100 * size_of(its) < _SEVERAL * _NEARLY * whole or not any(one.born >= begin for one in its):
        return
    alone = {max(each, key=requested).index for each in sets.values()}
    ours = [one for one in scene.timeline.allocations if one.index not in alone and _is_from(scene, one, sets)]
    ours += (one for one in sets.get(None, ()) if one.index not in alone)
    highest, _ = scene.highest_without(_in_a_loop(scene, ours))
    saved = scene.report.peak.allocated - highest
    if saved < max(WORTH // 2, scene.part_of_peak(8)):
        return
    made = [its for place, its in sets.items() if place is not None]
    first = max(made, key=size_of)
    others = f" and {counted(len(made) - 1, 'other line')}" if len(made) > 1 else ""
    yield Cause(
        "sets_of_weights",
        f"{made_at(scene, first[-1])}{others} {'make' if others else 'makes'} a tensor for each of {len(weights)} weights before "
        f"any is let go of: {human(size_of(its))}.",
        "One weight after the other, in a loop and in place (`mul_`, `add_`, `lerp_`, `addcdiv_`), needs one weight's at a time: "
        f"the peak would be about {human(highest)}.",
        saved,
        describes=True,
    )


def _row(scene: Scene) -> tuple[int, int]:
    """The row that the moment is in."""
    return next(((a, b) for _, a, b in scene.points if a < scene.moment <= b), (0, scene.end))


def _like(its: Sequence[Allocation], weights: Sequence[int]) -> list[Allocation]:
    """Those among them that have the sizes of weights, as many sets as there are."""
    sizes = Counter(weights)
    return [one for one in its if sizes[one.requested]]


def _is_last(its: Sequence[Allocation], sets: dict[CodePlace | None, list[Allocation]]) -> bool:
    newest = max((one.born for each in sets.values() for one in each), default=-1)
    return len(its) > 1 and any(one.born == newest for one in its)


def _is_from(scene: Scene, one: Allocation, places: Container[CodePlace | None]) -> bool:
    birth = scene.recording.logs[scene.device].births.get(one.born)
    return (
        birth is not None
        and birth.place is not None
        and birth.place in places
        and scene.labels[one.index].category not in _OF_IT
    )


def _in_a_loop(scene: Scene, its: Iterable[Allocation]) -> Iterator[Allocation]:
    """When a loop over the weights would have none of these: of what is from before the statement that lets go of it, while
    that runs, since the new one takes its place."""
    for one in its:
        if one.freed is not None:
            begin = scene.start_of_row(one.freed - 1)
            yield one if one.born >= begin else replace(one, born=begin)
