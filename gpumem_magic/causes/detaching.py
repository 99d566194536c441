"""What to write in place of what keeps a graph: with `.detach()`, as a number, or under `torch.no_grad()`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gpumem_magic.causes.graph_counts import keeps_numbers
from gpumem_magic.causes.model import Scene
from gpumem_magic.causes.places import (
    Spot,
    quoted,
)
from gpumem_magic.causes.written import Written, put_into
from gpumem_magic.owners.holders import ELEMENT, detach_words
from gpumem_magic.owners.model import Root
from gpumem_magic.units import human, listed

_ANY_PLACE = re.compile(r"\[\d+\]")


def detaching(scene: Scene, found: Sequence[Spot], place: Written | None, others: list[str], freed: int) -> str:
    spot, *more = found
    places = [one.place for one in (spot, *more) if one.root == spot.root]
    number = scene.holdings.number(spot.root)
    root = scene.holdings.roots[number] if number is not None else None
    if spot.container is None and root is not None and root.type != "Tensor":
        # An attribute: a module's statistics, say.
        return f"Compute it under `torch.no_grad()`, or `.detach()` what is assigned to {quoted(spot.place)}."
    adds = place is not None and (place.statement.count(spot.root) > 1 or "+=" in place.statement)
    if spot.container is None and adds and not others:
        now = f"`{spot.place} = {spot.place}.detach()` frees {human(freed)}"
        return f"Add numbers (`.item()`), or `.detach()` what is added; for now {now}."
    now = ""
    if root is not None and (code := detached_by_name(scene, spot, root, others)) is not None:
        now = f"; for now {code} frees {human(freed)}"
    elif others:
        names = [spot.place, *others]
        now = f"; detaching {', '.join(map(quoted, names[:4]))} frees {human(freed)}"
    meant = scene.program.calls("grad", "create_graph")
    if meant and place is not None and place.statement.count(spot.root) > 1:
        # Inner steps, of which a later backward may want the gradients: without a graph, the next one needs leaves.
        return (
            f"`create_graph=True` ({meant[0].words}) keeps them for a backward through all of these steps. Where none follows, "
            f"leave it out, and carry on `.detach().requires_grad_()`{now}."
        )
    numbers = keeps_numbers(scene, spot)
    if place is not None and len(places) == 1 and spot.holds_directly and (what := put_into(place.statement)):
        value = f" (or `{what}.item()`, if its value is all you need)" if numbers else ""
        return f"Put `{what}.detach()` there{value}{now}."
    goes = "goes into" if spot.container is not None else "is given to"
    told_places = list(map(quoted, places))
    if len(spot.held) > 1 and spot.container is not None:
        told_places = [_ANY_PLACE.sub("[…]", one) for one in told_places]
    return f"`.detach()` what {goes} {listed(told_places)}{' (`.item()` for a number)' if numbers else ''}{now}."


def detached_by_name(scene: Scene, spot: Spot, root: Root, others: list[str]) -> str | None:
    """What detaches a variable, or a list and the tensors in it with names of their own; None where others reach the graphs."""
    # (Only of the elements themselves: a list of tuples is another.)
    if spot.place != spot.root or any(len(one.trail) > ELEMENT for one in spot.held):
        return None
    own = detach_words(root.name, root.type)
    if not others:
        return own
    types = {one.name: one.type for one in scene.holdings.roots if one.kind == "variable"}
    if types.get(spot.root) not in ("list", "dict") or any(types[name] != "Tensor" for name in others):
        return None
    code = [own, *(detach_words(name, "Tensor") for name in others)]
    return f"`{'; '.join(words.strip('`') for words in code)}`"
