"""A large batch: what is made of it, for each item, and how many would fit at most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from gpumem_magic.causes.model import Scene
from gpumem_magic.devices.base import Birth
from gpumem_magic.owners.model import size_of
from gpumem_magic.recording.model import BACKWARD
from gpumem_magic.report.model import OF_A_MODEL, Cause
from gpumem_magic.snapshot.timeline import Allocation
from gpumem_magic.units import MIB, human

_LEAST = 4
# A batch at the peak is worth a word from here on.
_WORTH = 256 * MIB
# What is made of a batch.
_OF_THE_BATCH = frozenset({"activations", "activation_gradients"})


def whole_batch(scene: Scene) -> Iterator[Cause]:
    """Much of what was there when a request failed, with it, or most at a training's peak, was made of one batch: its items are
    the first dimension."""
    error = scene.report.error
    if error is not None and error.wanted is not None:
        yield from _too_many(scene, error.wanted)
    elif error is None and scene.spans(BACKWARD):
        yield from _at_the_peak(scene)


def _too_many(scene: Scene, wanted: int) -> Iterator[Cause]:
    if scene.moment == scene.peak == 0:
        return
    births = scene.recording.logs[scene.device].births
    living = scene.timeline.live_at(scene.moment)
    made = [(one.size, births.get(one.born)) for one in living if scene.labels[one.index].category not in OF_A_MODEL]
    failed = births.get(scene.moment - 1)
    made.append((wanted, failed))
    items, size = _most_rows(made)
    total = size_of(living) + wanted
    row = next((row for row in reversed(scene.report.checkpoints) if row.kind == "error"), None)
    capacity = scene.report.device.total_bytes
    if 4 * size < total or row is None or not capacity:
        return
    outside = sum(row.categories.get(name) or 0 for name in ("context", "other_processes", "context_or_others"))
    fits = int((capacity - outside - (total - size)) * items // size)
    if not 0 < fits < items:
        return
    yield Cause(
        "whole_batch",
        f"The batch of {items:,} items{_where(scene, failed)} takes {human(size)} up to here, {human(size // items)} an item.",
        f"A smaller batch helps: {fits:,} items would get past this request, though later ones may need more room.",
        size,
    )


def _at_the_peak(scene: Scene) -> Iterator[Cause]:
    births = scene.recording.logs[scene.device].births

    def of_a_batch(one: Allocation) -> bool:
        return scene.labels[one.index].category in _OF_THE_BATCH

    living = scene.timeline.live_at(scene.moment)
    items, size = _most_rows((one.size, births.get(one.born)) for one in living if of_a_batch(one))
    if 2 * size < size_of(living) or size < _WORTH:
        return
    parts = [one for one in scene.timeline.allocations if of_a_batch(one) and _rows(births.get(one.born)) == items]
    saved = scene.report.peak.allocated - scene.highest_without(parts, share=2)[0]
    if saved < _WORTH // 2:
        return
    yield Cause(
        "whole_batch",
        f"The batch of {items:,} items takes {human(size)} of it, {human(size // items)} an item.",
        f"Half the batch would take about {human(saved)} less.",
        size,
    )


def _most_rows(made: Iterable[tuple[int, Birth | None]]) -> tuple[int, int]:
    """The first dimension of most of it, and bytes."""
    sizes: Counter[int] = Counter()
    for size, birth in made:
        if (rows := _rows(birth)) >= _LEAST:
            sizes[rows] += size
    return sizes.most_common(1)[0] if sizes else (0, 0)


def _rows(birth: Birth | None) -> int:
    """The first dimension of what may be of a batch; 0 of all else."""
    return birth.shape[0] if birth is not None and birth.shape and birth.operator not in _NOT_OF_A_BATCH else 0


_NOT_OF_A_BATCH = frozenset({"empty", "zeros", "ones", "full", "clone", "zeros_like", "empty_like"})


def _where(scene: Scene, birth: Birth | None) -> str:
    place = birth.place if birth is not None else None
    return f" in `{place.expression}`" if place is not None and place.expression else ""
