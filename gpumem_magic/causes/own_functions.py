"""What a program's own autograd functions keep in attributes of ``ctx``: a backward frees what was saved for it, but not these.

Of `torch.autograd.Function`, `save_for_backward` makes saved variables, which ``release_variables`` lets go of behind a backward
(torch/csrc/autograd/python_function.cpp, 2.0 to 2.13); attributes live as long as the node.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from gpumem_magic.causes.model import Scene
from gpumem_magic.causes.places import Spot, quoted, release, spots, told
from gpumem_magic.owners.model import A_LEAF, ON_CTX, Held, size_of
from gpumem_magic.recording.model import BACKWARD
from gpumem_magic.report.model import Cause
from gpumem_magic.snapshot.timeline import Allocation
from gpumem_magic.units import human, listed

_CTX = ON_CTX.lstrip(": ")
_ATTRIBUTE = re.compile(rf"{_CTX}\.(?P<name>\w+)[^ ]* of (?P<function>\w+)")
# What lies in an object of a program's own, or in a function's closure, is told as no part of the graph.
_KINDS = frozenset({"graph", "tensor"})


def kept_on_ctx(scene: Scene) -> Iterator[Cause]:
    """Graphs through which a backward has gone, and which keep tensors all the same."""
    ours = [one for one in scene.held if outlived_a_backward(scene, one)]
    # (Where they are in cycles, it depends on Python's collector how many of them are left at the end.)
    size = max(size_of(ours), size_of(_alike_at_the_peak(scene, ours)))
    if size < scene.part_of_peak(10):
        return
    named = [found for one in ours if (found := _ATTRIBUTE.search(one.place))]
    attributes = list(dict.fromkeys(f"`{_CTX}.{one['name']}`" for one in named))
    functions = list(dict.fromkeys(f"`{one['function']}`" for one in named))
    who = listed(functions[:2]) or "A function of the program's own"
    where = listed(attributes[:3]) or f"attributes of `{_CTX}`"
    places = spots(ours)
    # (A closure's variable is no name of the graph's.)
    deep = any(one.kind != "graph" for one in ours)
    roots = dict.fromkeys(scene.holdings.roots[one.roots[0]].name for one in ours)
    graphs = listed([quoted(name) for name in roots][:3]) if deep else told(places)
    now = release(scene, places[0])
    much = human(size) if size == size_of(ours) else f"{human(size)} at the peak, {human(size_of(ours))} of it"
    yield Cause(
        "kept_on_ctx",
        f"{who} {'keep' if len(functions) > 1 else 'keeps'} tensors in {where}, which no "
        f"backward frees: {much} in the graph of {graphs}.",
        f"Give them to `ctx.save_for_backward`: a backward then frees them{f'; for now {now}' if now else ''}.",
        size,
    )


def _alike_at_the_peak(scene: Scene, ours: Iterable[Held]) -> list[Allocation]:
    """What came to be in the same way, and is there at the peak though a backward has gone by."""
    births = scene.recording.logs[scene.device].births
    ways = {births.get(scene.alive[one.address].born) for one in ours} - {None}
    gone_by = max((start for one in scene.spans(BACKWARD) if (start := scene.start_of(one)) < scene.moment), default=-1)
    living = scene.timeline.live_at(scene.moment) if ways else ()
    return [one for one in living if births.get(one.born) in ways and one.born < gone_by]


def outlived_a_backward(scene: Scene, one: Held) -> bool:
    """Whether an attribute of ``ctx`` keeps it, and a backward began after it was made."""
    allocation = scene.alive.get(one.address)
    if one.kind not in _KINDS or ON_CTX not in one.place or allocation is None:
        return False
    return allocation.born < max(map(scene.start_of, scene.spans(BACKWARD)), default=-1)


def backward_went_through(scene: Scene, spot: Spot) -> bool:
    """Whether what its graph keeps are leaves, and what functions keep themselves: a backward freed the rest."""
    own = [one for one in spot.held if one.kind == "graph"]
    return bool(own) and all(A_LEAF in one.place or outlived_a_backward(scene, one) for one in own)
