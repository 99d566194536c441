"""Memory that grows with the iterations, and graphs for which backward never runs."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator

from gpumem_magic.causes.model import LEAST, Scene
from gpumem_magic.owners.holders import detach_words, freed_by_detaching
from gpumem_magic.owners.model import Held, by_root, size_of
from gpumem_magic.recording.model import BACKWARD, FORWARD
from gpumem_magic.report.model import Cause
from gpumem_magic.units import human

_MEMBER = re.compile(r"^(?:graph of )?(?P<member>[^:]*?\[[^\]]+\])")
# So many equal steps are no accident.
_EQUAL_ITERATIONS = 3


def graphs_alive(scene: Scene) -> Iterator[Cause]:
    """A variable that keeps the graphs of several iterations: a list of losses, or a running total of them."""
    for number, root in enumerate(scene.holdings.roots):
        if root.kind != "variable":
            continue
        graphs = [one for one in scene.held if number in one.roots and one.kind == "graph"]
        members = {match["member"] for one in graphs if (match := _MEMBER.match(one.place))}
        iterations = {iteration for one in graphs if (iteration := _iteration_of(scene, one)) is not None}
        if len(members) < 2 and len(iterations) < 2:
            continue
        freed = size_of(freed_by_detaching(scene.holdings, number))
        if freed < LEAST:
            continue
        count = max(len(members), len(iterations))
        yield Cause(
            "kept_graphs",
            f"`{root.name}` keeps the graphs of {count} iterations alive: {human(freed)} of activations that were saved for "
            "backward.",
            f"Store numbers instead (`.item()` or `.detach()` before they go into `{root.name}`); for now "
            f"{detach_words(root.name, root.type)} frees {human(freed)}.",
            freed,
        )


def growth(scene: Scene) -> Iterator[Cause]:
    """What each iteration leaves behind, where the last ones all left the same and it is still there."""
    iterations = scene.iterations
    if len(iterations) < _EQUAL_ITERATIONS + 1:
        return
    steps = [scene.timeline.allocated_at(one.end) - scene.timeline.allocated_at(one.start) for one in iterations]
    # The first iteration brings gradients and optimizer states, which stay.
    last = steps[-_EQUAL_ITERATIONS:]
    if min(last) < LEAST or max(last) > 1.5 * min(last):
        return
    # What the last iteration made may be made anew in each (gradients, the batch): only what outlived one counts.
    alive = [
        one for one in scene.alive.values() if iterations[-_EQUAL_ITERATIONS].start <= one.born < iterations[-1].start
    ]
    left = size_of(alive)
    if left < sum(last[:-1]) * 0.5:
        return
    addresses = {one.address for one in alive}
    owners = by_root(one for one in scene.held if one.address in addresses).most_common(1)
    each = sum(last) // len(last)
    text = f"Each iteration leaves {human(each)} more allocated than the previous one ({len(steps)} iterations)"
    if not owners:
        yield Cause("growth", f"{text}.", "`%gpumem_who` shows what holds it.", left)
        return
    owner = scene.holdings.roots[owners[0][0]]
    remedy = f"`{owner.statement}` frees it" if owner.statement else "`%gpumem_who` shows more"
    yield Cause(
        "growth", f"{text}: it is held by `{owner.name}`.", f"{remedy}; better, keep less in `{owner.name}`.", left
    )


def graph_without_backward(scene: Scene) -> Iterator[Cause]:
    """A forward in evaluation mode whose graph a variable keeps, where no backward ever ran."""
    if not scene.evaluating or scene.spans(BACKWARD) or not scene.spans(FORWARD):
        return
    first = scene.start_of(scene.spans(FORWARD)[0])
    ours = [one for one in scene.held if one.kind == "graph" and _born(scene, one) >= first]
    freed = size_of(ours)
    if freed < LEAST:
        return
    root = scene.holdings.roots[by_root(ours).most_common(1)[0][0]]
    names = ", ".join(f"`{name}`" for name in sorted(scene.evaluating)[:3])
    yield Cause(
        "missing_no_grad",
        f"{names} {'is' if len(scene.evaluating) == 1 else 'are'} in evaluation mode, yet `{root.name}` keeps a "
        f"graph for a backward that never runs: {human(freed)}.",
        "Evaluate inside `with torch.inference_mode():` (or `torch.no_grad()`).",
        freed,
    )


def _iteration_of(scene: Scene, one: Held) -> int | None:
    """The iteration in which a held allocation was born; None for one from before the cell or without iterations."""
    born = _born(scene, one)
    if born < 0 or not scene.iterations:
        return None
    return bisect_left([iteration.end for iteration in scene.iterations], born + 1)


def _born(scene: Scene, one: Held) -> int:
    allocation = scene.alive.get(one.address)
    return -1 if allocation is None else allocation.born
