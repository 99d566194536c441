"""Parameters that an optimizer does not step any more, and whose states it keeps, with them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from gpumem_magic.causes.model import Scene
from gpumem_magic.causes.places import quoted
from gpumem_magic.owners.model import Held, size_of
from gpumem_magic.report.model import Cause
from gpumem_magic.units import human

# Of a parameter that has no name but as a key there only its class is known.
_OF_A_KEY = re.compile(r"(?:a key of )?(?P<optimizer>[A-Za-z_][\w.]*)\.state(?:\[(?:Parameter|Tensor)\]|(?=\.grad$|$))")
_PART = 10


def stale_states(scene: Scene) -> Iterator[Cause]:
    """``group["params"] = [grown]``: what was there is a key of `optimizer.state` still, which has no other name."""
    held: dict[str, list[Held]] = defaultdict(list)
    for one in scene.held:
        found = _OF_A_KEY.match(one.place)
        is_key = one.place.startswith("a key of ") or one.kind == "optimizer_state"
        if found is not None and is_key and found["optimizer"] not in ("", "a"):
            held[found["optimizer"]].append(one)
    for optimizer, its in sorted(held.items(), key=lambda pair: -size_of(pair[1])):
        if size_of(its) < scene.part_of_peak(_PART):
            return
        if all(one.kind == "optimizer_state" for one in its):
            # (Of parameters on the host, which it steps.)
            continue
        name, _, attribute = optimizer.partition(".")
        groups = scene.program.adding(name, "param_groups")
        put = groups or scene.program.adding(name, attribute.rpartition(".")[2] or "state")
        at = f" (`{put.shown}`, {put.words})" if put is not None else ""
        yield Cause(
            "stale_states",
            f"{quoted(optimizer)} has parameters that it does not step any more{at} as keys of its `state`, and keeps their "
            f"states, their gradients and the parameters themselves: {human(size_of(its))}.",
            f"`del {optimizer}.state[old]` (or `.pop(old)`) where another takes the place of one.",
            size_of(its),
        )
        return
