"""Parts that become a whole on the device: joined, so that both are there at once, or written into one that waits for them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from gpumem_magic.causes.alike import Alike, births_alive, bytes_of, made_by, of_birth, statement_of
from gpumem_magic.causes.libraries import gathering
from gpumem_magic.causes.model import WORTH, Scene
from gpumem_magic.causes.written import name_given
from gpumem_magic.devices.base import Birth
from gpumem_magic.owners.model import size_of
from gpumem_magic.recording.model import BACKWARD
from gpumem_magic.report.model import Cause
from gpumem_magic.snapshot.timeline import Allocation
from gpumem_magic.units import human, listed

# What makes a tensor that holds nothing yet, by the name that users know.
_BLANK = re.compile(r"(?:new_)?(?:zeros|empty|ones|full)(?:_like)?$")
# So many tensors that are joined are the parts of a result.
_PARTS = 3
# How a program reaches gradients; and weights without them.
_GRADIENTS = re.compile(r"\bgrads?\b")
_WEIGHTS = re.compile(r"^(?!.*\bgrad).*\bparameters\(", re.S)


def joined_in_a_loop(scene: Scene) -> Iterator[Cause]:
    """`x = torch.cat([x, new])` in a loop: the old and the new are there at once."""
    places: dict[object, list[tuple[int, Birth]]] = defaultdict(list)
    for event, birth in scene.births:
        if birth.kernel == "cat" and birth.place is not None and event < scene.moment:
            places[birth.place].append((event, birth))
    grown: tuple[Allocation, Birth, int] | None = None
    for made in places.values():
        sizes = [bytes_of(birth.shape or (), birth.dtype) for _, birth in made]
        if len(made) < 3 or not all(later > earlier for earlier, later in pairwise(sizes)):
            continue
        events = {event for event, _ in made}
        alive = sorted(
            (one for one in scene.timeline.live_at(scene.moment) if one.born in events), key=lambda one: one.born
        )
        # Each is made of the one before it.
        _, birth = made[-1]
        before = made[-2][1].shape
        if not alive or before is None or all(shape != before for shape, _ in birth.inputs):
            continue
        if len(alive) == 1:
            # What reads it may take more than the join did.
            grown = grown or (alive[0], birth, len(made))
            continue
        old, new = alive[-2:]
        if old.size + new.size < scene.part_of_peak(5):
            continue
        where = made_by(scene, Alike(birth.shape or (), 2, old.size + new.size, birth, made[-1][0]))
        if birth.place is not None and (known := gathering(birth.place)) is not None:
            yield Cause(
                "gathered_predictions",
                f"{where} {known[0]}, and copies them all for each batch: {human(old.size)} and {human(new.size)} at the peak.",
                known[1],
                old.size + new.size,
            )
            return
        yield Cause(
            "joined_in_a_loop",
            f"{where} needs the old tensor and the new one at once, and copies all of the old one every time: "
            f"{human(old.size)} and {human(new.size)} at the peak.",
            "Preallocate the result and write each part into it, or collect the parts on the host (`.cpu()`).",
            old.size,
        )
        return
    if grown is not None and 4 * grown[0].size >= scene.report.peak.allocated:
        whole, birth, turns = grown
        yield Cause(
            "joined_in_a_loop",
            f"{made_by(scene, Alike(birth.shape or (), 1, whole.size, birth, whole.born))} makes a larger tensor every time, and "
            f"copies all of the old one: {human(whole.size)} after {turns} times.",
            "Keep of each part only what is used later (a sum, a count), or collect the parts on the host (`.cpu()`).",
            whole.size,
        )
        return
    yield from _joined_once(scene)


def _joined_once(scene: Scene) -> Iterator[Cause]:
    """Parts that are all there still beside what they were joined to."""
    living = list(births_alive(scene))
    for born, whole, birth in sorted(living, key=lambda each: -each[1]):
        if whole < scene.part_of_peak(4):
            return
        if birth.kernel not in ("cat", "stack") or birth.node or len(birth.inputs) < _PARTS:
            continue
        # Of many parts a birth knows only some.
        parts = set(birth.inputs)
        alike_parts = (size for event, size, made in living if event < born and (made.shape, made.dtype) in parts)
        # (One may have been there before the cell, which then has a name.)
        before = (
            one.requested
            for one in scene.held
            if scene.alive[one.address].born < 0 and (one.shape, one.dtype.removeprefix("torch.")) in parts
        )
        size = min(sum(alike_parts) + sum(before), whole)
        if 10 * size >= 8 * whole:
            alike = Alike(birth.shape or (), 1, whole, birth, born)
            yield Cause(
                "joined",
                f"{made_by(scene, alike)} needs its parts and the whole at once: {human(size)} and {human(whole)}.",
                "Preallocate the result and write each part into it, or join the parts on the host.",
                size,
                describes=True,
            )
            return


def joined_gradients(scene: Scene) -> Iterator[Cause]:
    """All gradients once more in one piece. (Whoever joins the weights, which have the same shapes, works on with them.)"""
    whole = scene.living_in(scene.moment, "gradients")
    for born, joined, birth in births_alive(scene):
        if joined < scene.part_of_peak(10) or birth.node or birth.kernel != "cat" or len(birth.inputs) < _PARTS:
            continue
        before = [each for each in whole if each.born < born]
        size = sum(each.requested for each in before)
        if len(before) < _PARTS or 10 * abs(size - bytes_of(birth.shape or (), birth.dtype)) > size:
            continue
        # (Others may be as many by chance.)
        sizes = {each.requested for each in before}
        if any(bytes_of(shape, dtype) not in sizes for shape, dtype in birth.inputs):
            continue
        if not scene.program.matches_any(_GRADIENTS) or (
            birth.place is not None and _WEIGHTS.search(birth.place.expression)
        ):
            continue
        alike = Alike(birth.shape or (), 1, joined, birth, born)
        name = name_given(statement_of(scene, alike))
        normed = scene.program.matches_any(re.compile(rf"\b{re.escape(name)}\.norm\(|norm\(\s*{re.escape(name)}\b"))
        yield Cause(
            "joined_gradients",
            f"{made_by(scene, alike)} copies all gradients into one piece: {human(joined)} beside {human(size)}.",
            "Their norm needs no copy: `torch.nn.utils.get_total_norm(p.grad for p in model.parameters())`, or a norm of "
            "the norms of each."
            if name and normed
            else "Work on each by itself, or on views of one buffer, where that will do.",
            joined,
        )
        return


def joined_weights(scene: Scene) -> Iterator[Cause]:
    """All weights once more in one piece, and what is computed of that."""
    weights = scene.living_in(scene.moment, "parameters")
    if len(weights) < _PARTS:
        return
    whole = sum(each.requested for each in weights)
    alive = list(births_alive(scene))
    for event, birth in scene.births:
        size = bytes_of(birth.shape or (), birth.dtype)
        joins = birth.kernel == "cat" and not birth.node and len(birth.inputs) >= _PARTS and event < scene.moment
        if not joins or 10 * abs(size - whole) > whole:
            continue
        there = [each for _, each, one in alive if one.shape == birth.shape]
        if sum(there) < max(WORTH, scene.part_of_peak(3)):
            continue
        yield Cause(
            "joined_weights",
            f"{of_birth(scene, event, birth)} copies all weights into one piece, {human(size)}, and {len(there)} of that size "
            f"are there at the peak: {human(sum(there))}.",
            "Weight by weight (`sum(((p - q) ** 2).sum() for p, q in zip(model.parameters(), old))`) no tensor is larger "
            "than one weight.",
            sum(there),
            describes=True,
        )
        return


def filled_in_parts(scene: Scene) -> Iterator[Cause]:
    """Tensors that a loop fills part by part and that nothing reads before it ends: they could wait on the host."""
    if scene.tensors is None or scene.spans(BACKWARD):
        return
    births = scene.recording.logs[scene.device].births
    found: dict[str, Allocation] = {}
    places: list[str] = []
    for one in scene.timeline.live_at(scene.moment):
        birth = births.get(one.born) if one.size >= scene.part_of_peak(20) else None
        name = scene.tensors.keeper(one, scene.moment)[1] if birth is not None and _BLANK.match(birth.operator) else ""
        place = scene.program.filling(name) if name.isidentifier() else None
        if place is not None:
            found[name] = one
            places.append(place.words)
    total = size_of(found.values())
    if 3 * total < scene.report.peak.allocated or not total:
        return
    highest, _ = scene.highest_without(found.values())
    if scene.report.error is None and 2 * (scene.report.peak.allocated - highest) < total:
        return
    them, take = ("them", "take") if len(found) > 1 else ("it", "takes")
    then = f"the peak would be at most {human(highest)}" if scene.report.error is None else f"{human(total)} less here"
    yield Cause(
        "filled_in_parts",
        f"{listed([f'`{name}`' for name in found])} {take} {human(total)} on the device while a loop fills {them} part by part "
        f"({listed(list(dict.fromkeys(places)))}), and reads nothing of {them}.",
        f"Make {them} on the host and put each part there (`.cpu()`): {then}.",
        total,
        describes=True,
    )
