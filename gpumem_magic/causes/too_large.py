"""A model whose weights alone are more than the card has room for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpumem_magic.causes.model import Scene
from gpumem_magic.causes.places import quoted
from gpumem_magic.owners.model import size_of
from gpumem_magic.recording.model import BACKWARD, FORWARD, OPTIMIZER
from gpumem_magic.report.failure import failed_row
from gpumem_magic.report.model import OUTSIDE_CATEGORIES, Cause
from gpumem_magic.units import human

# Bytes of a number, of the types that have twice what 16 bits need, or more.
_WIDE = {"float32": 4, "float64": 8}
_HALF, _OF_FOUR_BITS = 2, 4


def weights_too_large(scene: Scene) -> Iterator[Cause]:
    """``model.cuda()`` that fails on its way, since all of its weights can't be there."""
    error, row = scene.report.error, failed_row(scene.report)
    capacity = scene.report.device.total_bytes
    if error is None or not error.wanted or row is None or not capacity or not scene.weights:
        return
    computing = (*scene.spans(FORWARD), *scene.spans(BACKWARD, OPTIMIZER))
    if any(scene.start_of(one) < scene.moment <= scene.end_of(one) for one in computing):
        return
    room = capacity - sum(row.categories.get(name) or 0 for name in OUTSIDE_CATEGORIES)
    name, sizes = max(scene.weights.items(), key=lambda each: sum(each[1].values()))
    total, moved = sum(sizes.values()), scene.living_in(scene.moment, "parameters", "buffers")
    if total <= room or 4 * size_of(moved) < 3 * scene.timeline.allocated_at(scene.moment):
        return
    dtype = max(sizes, key=lambda each: sizes[each])
    yield Cause(
        "weights_too_large",
        f"The weights of {quoted(name)} take {human(total)} in {dtype}, and this card has room for {human(room)}.",
        _narrower(name, sizes, room),
        total,
    )


def _narrower(name: str, sizes: Mapping[str, int], room: int) -> str:
    """What they take in fewer bits."""
    half = sum(size * _HALF // _WIDE.get(dtype, _HALF) for dtype, size in sizes.items())
    four_bits = half // _OF_FOUR_BITS
    if half == sum(sizes.values()):
        return f"In four bits (bitsandbytes) they take about {human(four_bits)}; else they need several cards."
    words = f"In bfloat16 (`{name}.to(torch.bfloat16)`, before they are moved) they take {human(half)}"
    if half < room:
        return f"{words}."
    return (
        f"{words}, still too much; in four bits (bitsandbytes) about {human(four_bits)}. Else they need several cards."
    )
