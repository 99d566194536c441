"""A batch that is too large for the device: what is made of it, for each item, and how many would fit at most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from gpumem_magic.causes.model import Scene
from gpumem_magic.devices.base import Birth
from gpumem_magic.report.model import Cause
from gpumem_magic.units import human

_LEAST = 4


def whole_batch(scene: Scene) -> Iterator[Cause]:
    """A request failed, and most of what was there, with it, was made of one batch: its items are the first dimension."""
    error = scene.report.error
    if error is None or error.wanted is None or scene.moment == scene.peak == 0:
        return
    births = scene.recording.logs[scene.device].births
    made = [(one.size, births.get(one.born)) for one in scene.timeline.live_at(scene.moment)]
    failed = births.get(scene.moment - 1)
    if failed is not None:
        made.append((error.wanted, failed))
    sizes: Counter[int] = Counter()
    for size, birth in made:
        if birth is not None and birth.shape and birth.shape[0] >= _LEAST and birth.operator not in _NOT_OF_A_BATCH:
            sizes[birth.shape[0]] += size
    if not sizes:
        return
    items, size = sizes.most_common(1)[0]
    total = sum(size for size, _ in made)
    row = next((row for row in reversed(scene.report.checkpoints) if row.kind == "error"), None)
    capacity = scene.report.device.total_bytes
    if 2 * size < total or row is None or not capacity:
        return
    outside = sum(row.categories.get(name) or 0 for name in ("context", "other_processes", "context_or_others"))
    fits = int((capacity - outside - (total - size)) * items // size)
    if not 0 < fits < items:
        return
    yield Cause(
        "whole_batch",
        f"{items:,} items go through at once{_where(scene, failed)}: what was made of them up to here takes "
        f"{human(size // items)} each, {human(size)} in all.",
        f"A smaller batch: by this, at most {fits:,} fit, and fewer if more is made later.",
        size,
    )


_NOT_OF_A_BATCH = frozenset({"empty", "zeros", "ones", "full", "clone", "zeros_like", "empty_like"})


def _where(scene: Scene, birth: Birth | None) -> str:
    place = birth.place if birth is not None else None
    return f" in `{place.expression}`" if place is not None and place.expression else ""
