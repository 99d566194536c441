"""The same weights twice: a checkpoint that is still held, one that was loaded to the device, a model that was built again."""

from __future__ import annotations

import ast
import re
import textwrap
from bisect import bisect_left
from collections import Counter

from gpumem_magic.causes.model import LEAST, Scene, size
from gpumem_magic.owners.model import Held, Root, size_of
from gpumem_magic.report.model import Cause
from gpumem_magic.snapshot.timeline import Allocation
from gpumem_magic.units import human

# The names in front of a call of something that loads, each time that one stands there.
_LOADED = re.compile(r"\b(\w+)\s*=\s*(?=[^\n]*\bload\w*\s*\()")
_LOAD = re.compile(r"\btorch\.load\s*\((?P<arguments>[^\n]*)")


def held_checkpoint(scene: Scene) -> list[Cause]:
    """A variable that something was loaded into, and that still holds the same weights as a model's, by shape and type."""
    if scene.holdings is None:
        return []
    loaded = frozenset(_LOADED.findall(scene.typed))
    weights = Counter(_shape(one) for one in scene.held if one.kind == "parameter")
    found = []
    for number, root in enumerate(scene.holdings.roots):
        if root.kind != "variable" or root.name not in loaded:
            continue
        copies = [one for one in scene.holdings.freed([number]) if one.device == scene.device and one.kind == "tensor"]
        left = weights.copy()
        same = []
        for one in copies:
            if left[_shape(one)] > 0:
                left[_shape(one)] -= 1
                same.append(one)
        if size_of(same) < LEAST or 2 * size_of(same) < size_of(copies):
            continue
        found.append(
            Cause(
                "held_checkpoint",
                f"`{root.name}` still holds a checkpoint that was loaded to the device, although the model already "
                f"has its weights: {human(size_of(copies))}.",
                f'`{root.statement}` frees {human(size_of(copies))}; better, load it to the host with `map_location="cpu"`.',
                size_of(copies),
            )
        )
    return found


def loaded_to_device(scene: Scene) -> list[Cause]:
    """`torch.load` without `map_location` that put tensors where they were saved from: on the device."""
    total, lines = 0, []
    for point, begin, end in scene.points:
        call = _LOAD.search(point.statement)
        if call is None or "map_location" in point.statement or point.kind != "statement":
            continue
        new = [one for one in scene.timeline.live_at(end) if one.born >= begin]
        if size(new) >= LEAST:
            total += size(new)
            lines.append(point.line)
    if not total:
        return []
    return [
        Cause(
            "map_location_missing",
            f"`torch.load` at line {lines[0]} put {human(total)} on the device, because the tensors were saved from "
            "there.",
            'Pass `map_location="cpu"`: `load_state_dict` copies the weights to the model\'s device.',
            total,
        )
    ]


def built_again(scene: Scene) -> list[Cause]:
    """A model built while the one from an earlier run was still there."""
    found = []
    parameters = [one for one in scene.timeline.allocations if scene.labels[one.index].category == "parameters"]
    parameters.sort(key=lambda one: one.born)
    births = [one.born for one in parameters]
    for point, begin, end in scene.points:
        if point.kind != "statement" or begin == end:
            continue
        made = parameters[bisect_left(births, begin) : bisect_left(births, end)]
        new = [one for one in made if one.freed is None or one.freed >= end]
        if size(new) < LEAST:
            continue
        old = [one for one in parameters[: bisect_left(births, begin)] if one.freed is None or one.freed >= begin]
        if not old:
            continue
        twins = _twins(old, new)
        both = [one for one in twins if one.freed is None or one.freed >= max(fresh.born for fresh in new)]
        if size(both) < 0.9 * size(new):
            continue
        gone = [one for one in both if one.freed is not None]
        name = point.statement.partition("=")[0].strip()
        if len(gone) == len(both):
            if _works_on_a_model(scene, point.statement):
                continue
            later = _statement_at(scene, max(one.freed for one in gone if one.freed is not None))
            until = f", until `{_short(later)}`" if later and later != point.statement else ""
            text = (
                f"`{_short(point.statement)}` built a model while the previous one was still on the device, which "
                f"took {human(size(both))} more{until}."
            )
            remedy = f"`del {name}` (and its optimizer) before building it again." if name.isidentifier() else ""
            found.append(Cause("model_built_again", text, remedy, size(both)))
        elif (keeper := _keeper(scene, both)) is not None:
            text = (
                f"The previous model is still on the device ({human(size(both))}): `{keeper.name}` holds its "
                "parameters."
            )
            remedy = f"`{keeper.statement}` before building it again." if keeper.statement else ""
            found.append(Cause("model_built_again", text, remedy, size(both)))
    return found[:1]


def _works_on_a_model(scene: Scene, statement: str) -> bool:
    """Whether a statement gives new weights to a model that stays (pruning it, say): it names one and assigns nothing."""
    try:
        body = ast.parse(textwrap.dedent(statement)).body
    except SyntaxError:
        return False
    return bool(body) and all(
        isinstance(one, ast.Expr)
        and any(isinstance(node, ast.Name) and node.id in scene.modules for node in ast.walk(one))
        for one in body
    )


def _statement_at(scene: Scene, event: int) -> str:
    """The statement in which an event happened; "" for none."""
    return next((point.statement for point, begin, end in scene.points if begin <= event < end), "")


def _keeper(scene: Scene, allocations: list[Allocation]) -> Root | None:
    """Who keeps the old weights at the end, where one and the same variable keeps them all and it is no model."""
    if scene.holdings is None:
        return None
    addresses = {one.address for one in allocations if one.freed is None}
    held = [one for one in scene.held if one.address in addresses]
    if not held or len(held) < len(addresses):
        return None
    everyone = set.intersection(*(set(one.roots) for one in held))
    names = [scene.holdings.roots[number] for number in sorted(everyone)]
    # Two models that are meant to be there (a teacher, a target network) each have a variable of their own.
    if not all(".param_groups" in one.place for one in held):
        return None
    return next(iter(names), None)


def _twins(old: list[Allocation], new: list[Allocation]) -> list[Allocation]:
    wanted = Counter(one.requested for one in new)
    found = []
    for one in old:
        if wanted[one.requested] > 0:
            wanted[one.requested] -= 1
            found.append(one)
    return found


def _shape(one: Held) -> tuple[str, tuple[int, ...]]:
    return one.dtype, one.shape


def _short(statement: str) -> str:
    line = statement.strip().partition("\n")[0]
    return line if len(line) <= 60 else f"{line[:59]}…"
