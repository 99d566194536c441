"""Results that are joined to one tensor only to be made one again: experts, models, views of an image."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from gpumem_magic.causes.alike import Alike, births_alive, made_by, of_birth
from gpumem_magic.causes.model import WORTH, Scene
from gpumem_magic.devices.base import Birth
from gpumem_magic.recording.model import BACKWARD
from gpumem_magic.report.model import Cause
from gpumem_magic.units import human, shape_words

_REDUCES = frozenset({"sum", "mean", "amax", "amin", "max", "min", "prod", "logsumexp", "nansum"})
_JOINS = frozenset({"stack", "cat"})
# So many parts are worth a loop; and one part in so many of the peak a word.
_PARTS, _SHARE = 3, 3


def joined_to_be_reduced(scene: Scene) -> Iterator[Cause]:
    """``torch.stack([f(x) for f in experts]).sum(0)``, where autograd has no part."""
    if scene.spans(BACKWARD) or scene.report.error is not None:
        return
    living = sorted(births_alive(scene), key=lambda each: -each[1])
    for event, size, birth in living:
        if size < max(WORTH // 2, scene.part_of_peak(2 * _SHARE)):
            return
        if birth.kernel not in _JOINS or birth.node or birth.shape is None or not birth.inputs:
            continue
        parts = prod(birth.shape) // max(1, prod(birth.inputs[0][0]))
        same = len(set(birth.inputs)) == 1
        found = _reduced(scene, event, birth, birth.inputs[0][0]) if same and parts >= _PARTS else None
        if found is None:
            continue
        event_of_it, reduced = found
        alive = sum(each for _, each, one in living if prod(one.shape or ()) == prod(birth.shape))
        if alive < scene.part_of_peak(_SHARE):
            continue
        what = made_by(scene, Alike(birth.shape, 1, size, birth, event))
        yield Cause(
            "joined_to_be_reduced",
            f"{what} joins {parts} results to {shape_words(birth.shape)}, of which "
            f"{of_birth(scene, event_of_it, reduced)} makes one again: {human(alive)} of that size at the peak.",
            "Add each to a total as it comes (`total += part`; for the largest `torch.maximum(total, part)`): then one is "
            f"there at a time, {human(size // parts)}.",
            alive,
            describes=True,
        )
        return


def _reduced(scene: Scene, event: int, birth: Birth, part: tuple[int, ...]) -> tuple[int, Birth] | None:
    """What makes one of the parts of it, or of what has its shape, in the same statement."""
    row = scene.start_of_row(event)
    for later, one in scene.births:
        given = [shape for shape, _ in one.inputs]
        taken = later > event and one.kernel in _REDUCES and birth.shape in given and one.shape is not None
        if taken and scene.start_of_row(later) == row and prod(one.shape or ()) <= prod(part):
            return later, one
    return None
