"""Data on the device that stays there beside its copy: rows that were picked out of it, or all of it in another type or order."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod

from gpumem_magic.causes.alike import made_at
from gpumem_magic.causes.model import WORTH, Scene
from gpumem_magic.causes.pairs import COPIES
from gpumem_magic.causes.places import quoted
from gpumem_magic.causes.written import name_given
from gpumem_magic.owners.model import Held, size_of
from gpumem_magic.report.model import Cause
from gpumem_magic.snapshot.timeline import Allocation
from gpumem_magic.units import human

# Operators that pick rows by their numbers, or by a mask, and copy them.
_PICKS = frozenset({"index", "index_select"})
_PARTS = 4
# ``data = data[order]``
_IN_ITS_PLACE = re.compile(r"(\w+) = \1\[")


def copied_rows(scene: Scene) -> Iterator[Cause]:
    """``X_train = X[perm[:n]]``, of which the cell then takes a batch at a time; or ``X = X[perm]``."""
    yield from _shuffled(scene)
    yield from _converted(scene)
    for source in scene.held:
        made = scene.alive.get(source.address)
        if source.kind != "tensor" or not source.place.isidentifier() or made is None or made.born >= scene.moment:
            continue
        copies = _rows_of(scene, source, made)
        if not copies or size_of(copies) < max(WORTH, scene.part_of_peak(_PARTS)):
            continue
        largest = max(copies, key=lambda one: one.size)
        name = scene.tensors.keeper(largest, scene.moment)[1] if scene.tensors is not None else ""
        if not name.isidentifier() or not re.search(rf"\b{name}\s*\[[^\]]*[:a-z]", scene.typed):
            continue
        highest, _ = scene.highest_without(copies)
        yield Cause(
            "copied_rows",
            f"{made_at(scene, largest)} copies rows of {quoted(source.place)}, which stays beside {quoted(name)}: "
            f"{human(size_of(copies))} twice.",
            f"Pick each batch's rows out of {quoted(source.place)} by their numbers (`{source.place}[numbers[i:j]]`): with a "
            f"small batch the peak would be about {human(highest)}.",
            size_of(copies),
            describes=True,
        )
        return


def _converted(scene: Scene) -> Iterator[Cause]:
    """``images = raw.permute(0, 3, 1, 2).contiguous()``, ``targets = labels.long()``, of which the cell takes parts."""
    births = scene.recording.logs[scene.device].births
    data = [one for one in scene.held if one.kind == "tensor" and one.place.isidentifier() and one.shape]
    for one in scene.timeline.live_at(scene.moment):
        birth = births.get(one.born)
        if birth is None or birth.node or birth.kernel not in COPIES or one.size < scene.part_of_peak(_PARTS):
            continue
        shape, dtype = birth.inputs[0] if birth.inputs else ((), "")
        name = name_given(scene.tensors.facts(one).statement) if scene.tensors is not None else ""
        read = birth.place.expression if birth.place is not None else ""
        source = next(
            (
                each
                for each in data
                if sorted(each.shape) == sorted(shape)
                and each.dtype == dtype
                and re.match(rf"{each.place}\b", read)
                and each.place != name
            ),
            None,
        )
        taken = rf"\b{name}\s*\[[^\]]*[:a-z]|\b{name}\.(?:split|chunk)\(|\bin {name}\b"
        if source is None or not name or one.size < WORTH or not re.search(taken, scene.typed):
            continue
        row, count = scene.start_of_row(one.born), prod(birth.shape or ())
        # (What the statement makes of it number by number is as large.)
        of_it = [
            each
            for each in scene.timeline.allocations
            if scene.start_of_row(each.born) == row
            and (its := births.get(each.born)) is not None
            and prod(its.shape or ()) == count
        ]
        highest, _ = scene.highest_without(of_it)
        if 2 * (scene.report.peak.allocated - highest) < one.size:
            continue
        yield Cause(
            "copied_rows",
            f"{made_at(scene, one)} copies all of {quoted(source.place)}, which stays beside {quoted(name)}: "
            f"{human(source.size)} and {human(one.size)}.",
            f"Do so with each batch where it is taken, and the peak would be about {human(highest)} with small ones.",
            one.size,
            describes=True,
        )
        return


def _shuffled(scene: Scene) -> Iterator[Cause]:
    """All rows in another order, while the old ones are there still."""
    births = scene.recording.logs[scene.device].births
    living = scene.timeline.live_at(scene.moment)
    for one in living:
        birth = births.get(one.born)
        facts = scene.tensors.facts(one) if scene.tensors is not None else None
        if (
            birth is None
            or facts is None
            or birth.kernel not in _PICKS
            or birth.node
            or one.size < scene.part_of_peak(_PARTS)
        ):
            continue
        name = _IN_ITS_PLACE.match(facts.statement.strip())
        old = [each for each in living if each.born < one.born and each.size == one.size]
        if name is None or not old or not birth.inputs or birth.inputs[0][0] != birth.shape:
            continue
        yield Cause(
            "copied_rows",
            f"{made_at(scene, one)} copies all rows of `{name[1]}` while it still has the old ones: {human(one.size)} twice.",
            f"Pick each batch's rows by their numbers (`{name[1]}[numbers[i:j]]`), and the data stays as it is.",
            one.size,
            describes=True,
        )
        return


def _rows_of(scene: Scene, source: Held, made: Allocation) -> list[Allocation]:
    """What was picked out of it, and outlives its statement."""
    births = scene.recording.logs[scene.device].births
    found = []
    for one in scene.timeline.live_at(scene.moment):
        birth = births.get(one.born)
        if birth is None or birth.node or birth.kernel not in _PICKS or not birth.inputs or not birth.shape:
            continue
        given, dtype = birth.inputs[0]
        same = given == source.shape and dtype == source.dtype and birth.shape[1:] == given[1:]
        if same and made.born < one.born < scene.start_of_row(scene.moment - 1) and birth.shape[0] <= given[0]:
            found.append(one)
    return found
