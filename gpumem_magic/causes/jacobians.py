"""Jacobians: the graph that one keeps, all of its rows at once, and one of a whole batch where each row was meant."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gpumem_magic.causes.alike import Alike, made_by, of_birth, size_words
from gpumem_magic.causes.model import LEAST, Scene
from gpumem_magic.causes.places import quoted
from gpumem_magic.devices.base import Birth
from gpumem_magic.owners.model import size_of
from gpumem_magic.report.model import Cause
from gpumem_magic.snapshot.timeline import Allocation
from gpumem_magic.units import human, shape_words

_JACREV, _JACOBIAN = re.compile(r"\bjacrev\("), re.compile(r"\bjacobian\(")
# Such a part of the rows is computed at a time in what is told.
_PARTS = 8
# A batch has so many rows.
_ROWS = 4


def rows_at_once(scene: Scene) -> Iterator[Cause]:
    """``jacrev`` runs its backward for all rows at once (torch/_functorch/eager_transforms.py), and with a graph: where the
    function has parameters that are trained, the Jacobian depends on them, too."""
    found = _basis(scene)
    if found is None:
        return
    event, birth, rows = found
    made = [one for one in _gradients_since(scene, event) if (_shape(scene, one) or (0,))[0] % rows == 0]
    size = size_of(made)
    if size < scene.part_of_peak(3):
        return
    what = of_birth(scene, event, birth)
    some = rows // _PARTS
    words = birth.place.text if birth.place is not None else ""
    in_parts = ""
    if some and "chunk_size" not in words:
        in_parts = f"`chunk_size={some}` in the call of `jacrev` computes {some} of the {rows:,} rows at a time"
    addresses = {one.address for one in made if one.freed is None}
    kept = [one for one in scene.held if one.kind == "graph" and one.address in addresses]
    if size_of(kept) >= max(LEAST, scene.part_of_peak(10)):
        root = scene.holdings.roots[kept[0].roots[0]].name
        yield Cause(
            "jacobian_graph",
            f"{what} gives a result, {quoted(root)}, that keeps a graph: it depends on parameters that are trained, too: "
            f"{human(size_of(kept))}.",
            "Inside `with torch.no_grad():` `jacrev` still differentiates, and keeps none"
            + (f"; and {in_parts}." if in_parts else "."),
            size,
        )
    elif in_parts:
        yield Cause(
            "jacobian_rows",
            f"{what} computes all {rows:,} rows of the Jacobian at once: {human(size)} of gradients.",
            f"{in_parts}.",
            size,
            describes=True,
        )


def jacobian_of_a_batch(scene: Scene) -> Iterator[Cause]:
    """``jacobian(net, batch)`` has every row's outputs by every row's inputs."""
    births = scene.recording.logs[scene.device].births
    for one in scene.timeline.live_at(scene.moment):
        birth = births.get(one.born)
        if birth is None or birth.place is None or birth.shape is None or birth.kernel != "stack" or not birth.inputs:
            continue
        rows, given = birth.shape[0], birth.inputs[0][0]
        of_batch = len(given) > 1 and birth.shape[1:] == given and given[0] >= _ROWS and rows % given[0] == 0
        if not of_batch or not _JACOBIAN.search(birth.place.expression or birth.place.text):
            continue
        parts = [each for each in _gradients_since(scene, 0) if _shape(scene, each) == given]
        alike = Alike(birth.shape, 1, one.size, birth, one.born)
        if one.size >= scene.part_of_peak(4) and _goes_by_rows(scene, birth, given[0]):
            yield Cause(
                "jacobian_of_a_batch",
                f"{made_by(scene, alike)} makes the derivatives of the outputs of all {given[0]:,} rows by the inputs of all "
                f"rows, {shape_words(birth.shape)}: {size_words(alike)}.",
                "Where a row's outputs depend on that row alone, `torch.func.vmap(torch.func.jacrev(function))` makes one "
                f"Jacobian for each, {given[0]:,} times less.",
                one.size + size_of(parts),
                describes=True,
            )
            return


def _basis(scene: Scene) -> tuple[int, Birth, int] | None:
    """The unit vectors by which ``jacrev`` goes backward in the statement at the peak, and how many rows there are of them."""
    begin = scene.start_of_row(scene.moment - 1)
    for event, birth in scene.births:
        shape, place = birth.shape or (), birth.place
        square = len(shape) == 2 and shape[0] == shape[1] and birth.kernel in ("new_zeros", "zeros")
        if square and begin <= event < scene.moment and place is not None and _JACREV.search(place.text):
            return event, birth, shape[0]
    return None


def _gradients_since(scene: Scene, event: int) -> list[Allocation]:
    births = scene.recording.logs[scene.device].births
    living = (one for one in scene.timeline.live_at(scene.moment) if one.born >= event)
    return [one for one in living if (birth := births.get(one.born)) is not None and birth.node]


def _shape(scene: Scene, one: Allocation) -> tuple[int, ...] | None:
    birth = scene.recording.logs[scene.device].births.get(one.born)
    return birth.shape if birth is not None else None


def _goes_by_rows(scene: Scene, birth: Birth, rows: int) -> bool:
    """Whether what the function made on its way has the batch's rows."""
    ways = [one.shape for _, one in scene.births if one.place == birth.place and not one.node and one.kernel != "stack"]
    return bool(ways) and all(shape is not None and shape[:1] == (rows,) for shape in ways)
