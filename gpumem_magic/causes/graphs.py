"""Graphs that something keeps after their iteration, and gradients that have graphs of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from gpumem_magic.causes.detaching import detaching
from gpumem_magic.causes.graph_counts import backward_ahead, born_at, graphs_of, keeps_numbers
from gpumem_magic.causes.model import LEAST, Scene
from gpumem_magic.causes.own_functions import outlived_a_backward
from gpumem_magic.causes.places import (
    NAMES,
    Spot,
    added,
    base,
    detach,
    quoted,
    spots,
    told,
    variable_of,
)
from gpumem_magic.causes.waiting import FEWER_AT_ONCE
from gpumem_magic.causes.written import Written
from gpumem_magic.owners.holders import detach_words, detached
from gpumem_magic.owners.model import A_LEAF, THIS_ERROR, Held, size_of
from gpumem_magic.recording.model import BACKWARD
from gpumem_magic.report.model import Cause
from gpumem_magic.units import human, listed

_SECOND = 2


def graphs_alive(scene: Scene) -> Iterator[Cause]:
    """What keeps the graphs of several iterations: a list of losses, a running total of them, a state that is carried along."""
    graphs = [one for one in scene.held if one.kind == "graph" and is_the_programs(scene, one)]
    # Neither was saved for a backward.
    graphs = [one for one in graphs if A_LEAF not in one.place and not outlived_a_backward(scene, one)]
    told_apart = [one if graphs_of(scene, one) >= 2 else _with_shared(scene, one, graphs) for one in spots(graphs)]
    counted = [(one, graphs_of(scene, one)) for one in told_apart]
    found = [one for one, count in counted if count >= 2]
    # (The graph of one iteration saves a detached state of the one before.)
    if not any(graphs_of(scene, one, whole=True) >= 2 for one in found):
        return
    main = found[0]
    if _are_of_one_turn(scene, main):
        # (They go when the next turn makes its own: `unused_graphs` tells of them.)
        return
    count = max(count for one, count in counted if one in found)
    freed, all_of_it = detach(scene, found), by_graphs_alone(scene, found)
    if 2 * freed < all_of_it:
        # Others reach the same graph: all have to let go.
        freed = all_of_it
        others = _other_names(scene, main, main.held)
    else:
        others = _other_names(scene, main, [one for one in main.held if not base(one).startswith(main.root)])
    if freed < LEAST:
        return
    if (waits := _on_the_way_to_a_backward(scene, found, count, freed)) is not None:
        yield waits
        return
    place = added(scene, main)
    # An object that carries a state on, in an attribute of its own.
    roots = [one for one in scene.holdings.roots if one.name in (main.root, *others) and one.type not in ("", "Tensor")]
    states = ((one.name, scene.program.carried(one.type)) for one in roots)
    owner, state = next(((name, state) for name, state in states if state is not None), ("", None))
    if state is not None:
        attribute, place = state
        carrier = f"{owner}.{attribute}"
        names = [one for one in [main.place, *others] if one != owner and not one.startswith(carrier)]
        several = main.place.startswith(f"{carrier}[")
        kinds = (_containers(main.held, carrier) or ("tuple",)) if several else ()
        code = detached(carrier, kinds)
        carry = f"Carry on `{code}`" if code else f"`.detach()` the tensors that `{carrier}` carries on"
        yield Cause(
            "kept_graphs",
            _carried_on(carrier, place, names, count, freed),
            f"{carry}: the graph then ends with its iteration, and `retain_graph=True` is not needed.",
            freed,
        )
        return
    if (told_so := _state_carried_on(scene, main, others, count, freed)) is not None:
        yield told_so
        return
    at = f" ({place.words})" if place is not None else ""
    reach = "reaches" if len(others) == 1 else "reach"
    also = f" ({', '.join(map(quoted, others[:3]))} {reach} them, too)" if others else ""
    none = "" if scene.spans(BACKWARD) else ", and no backward ran here"
    remedy = detaching(scene, found, place, list(dict.fromkeys([*others, *_roots_beside(scene, found)])), freed)
    if (again := _retained_for_the_list(scene, main)) is not None:
        clear = f"`{main.container.place}.clear()`" if main.container is not None else "clear it"
        remedy = (
            f"Where each is for one backward, {clear} behind that, and leave out `retain_graph=True` ({again.words}); what is "
            "only to be looked at later goes there by `.detach()`."
        )
    keep, who = "keeps" if len(found) == 1 else "keep", told(found)
    yield Cause(
        "kept_graphs",
        f"{who[0].upper()}{who[1:]}{at} {keep} the graphs of {count} iterations alive{also}: {human(freed)} that were saved for "
        f"backward{none}.",
        remedy + _without_autograd(scene, found, alone=not others),
        freed,
    )


def _are_of_one_turn(scene: Scene, spot: Spot) -> bool:
    """Whether all of them, through which no backward has gone, were made in one turn of a loop, behind others, that has one."""
    turns = {scene.turn_of(born_at(scene, one)) for one in spot.held}
    first = turns.pop()
    if turns or first is None or first[1][0] < _SECOND:
        return False
    now = scene.outermost_turn(born_at(scene, spot.held[0]))
    return any(scene.outermost_turn(scene.start_of(one)) == now for one in scene.spans(BACKWARD))


def by_graphs_alone(scene: Scene, found: Iterable[Spot]) -> int:
    """Bytes of these that would come back if no tensor had a graph: more than if theirs alone went, where others have it, too."""
    theirs = {one.address for one in scene.holdings.freed_without("graph") if one.device == scene.device}
    return size_of(one for spot in found for one in spot.held if one.address in theirs)


def _retained_for_the_list(scene: Scene, main: Spot) -> Written | None:
    """The backward that keeps its graph, where most of what a list has was there before the one before the last: each goes
    through all again."""
    calls = scene.program.calls("backward", "retain_graph")
    starts = sorted(map(scene.start_of, scene.spans(BACKWARD)))
    if main.container is None or not calls or len(starts) < 2:
        return None
    old = [one for one in main.held if 0 <= born_at(scene, one) < starts[-2]]
    return calls[0] if 2 * size_of(old) >= main.size else None


def _on_the_way_to_a_backward(scene: Scene, found: Sequence[Spot], count: int, freed: int) -> Cause | None:
    """Memory ran out in a loop behind which a backward would have used up the graphs of all its turns: layers one after the
    other, steps in time, losses that are added up. Nothing is to be detached there."""
    if (ahead := backward_ahead(scene, found)) is None:
        return None
    loop, backward = ahead
    return Cause(
        "graphs_ahead",
        f"The graphs of {count} turns of the loop at {loop.words} wait for their backward ({backward.words}): "
        f"{human(freed)}.",
        FEWER_AT_ONCE,
        freed,
    )


def _carried_on(carrier: str, where: Written, names: Sequence[str], count: int, freed: int) -> str:
    """names: the others that reach the graphs."""
    reach = "reaches" if len(names) == 1 else "reach"
    rest = f" ({', '.join(map(quoted, names[:3]))} {reach} them, too)" if names else ""
    return (
        f"{quoted(carrier)} ({where.words}, `{where.shown}`) carries the graph on from each iteration to the next, so "
        f"those of {count} iterations are alive{rest}: {human(freed)} that were saved for backward."
    )


def is_the_programs(scene: Scene, one: Held) -> bool:
    """Whether a variable of the program keeps it, or one of a function of its own that has just failed. (Of what an earlier error
    left `kept_errors` tells: nobody detaches that.)"""
    root = scene.holdings.roots[one.roots[0]]
    if root.name == THIS_ERROR:
        return (found := variable_of(one)) is not None and found[1] in scene.left.graphs
    return root.kind in NAMES and not one.in_traceback


def _state_carried_on(scene: Scene, main: Spot, others: Sequence[str], count: int, freed: int) -> Cause | None:
    """A variable that a training loop makes from itself, whose graph so is that of all iterations: by its own name, or where they
    go by another one's that only reaches them through it."""
    first, function = variable_of(main.held[0]) or (main.root, "")
    names = list(dict.fromkeys([first, *others, *scene.left.graphs.get(function, ())]))
    types = {one.name: one.type for one in scene.holdings.roots if one.kind == "variable" and one.name in names}
    states = scene.program.carried_on(names)
    if main.container is not None or not states:
        return None
    # Inner steps and samplers make a variable from itself, too; there the graph is meant, or none is.
    trained = scene.spans(BACKWARD) and not scene.program.calls("grad", "create_graph")
    if first in dict(states) and not trained:
        return None
    name, where = next((one for one in states if one[0] == first), states[0])
    rest = [one for one in names if one != name]
    kinds = _containers([one for one in scene.held if one.kind in ("graph", "tensor")], name)
    also = [one for one in rest if scene.program.sums_up(one)]
    added = f"; add numbers to {listed(list(map(quoted, also)))} (`.item()`)" if also else ""
    return Cause(
        "kept_graphs",
        _carried_on(name, where, rest, count, freed),
        f"{detach_words(name, *(kinds or (types.get(name, ''),)))} after each iteration ends the graph there{added}.",
        freed,
    )


def _containers(held: Iterable[Held], place: str) -> tuple[str, ...]:
    """The classes of the containers from a place down to its tensors, the outermost first; () where they differ."""
    found = set()
    for one in held:
        kinds = [station.type for station in one.trail]
        number = next((at for at, station in enumerate(one.trail) if station.place == place), None)
        if number is not None and kinds[-1] == "Tensor":
            found.add(tuple(kinds[number:-1]))
    return found.pop() if len(found) == 1 else ()


def _without_autograd(scene: Scene, found: Sequence[Spot], *, alone: bool) -> str:
    """Another way, where all of these were made after the last backward, or there was none: they may be for none. (Of losses
    alone the number is enough.)"""
    ends = [scene.end_of(one) for one in scene.spans(BACKWARD)]
    if alone and not ends and keeps_numbers(scene, found[0]):
        return ""
    if any(born_at(scene, one) < max(ends, default=0) for spot in found for one in spot.held):
        return ""
    return " Where no backward is to follow, run it inside `with torch.no_grad():`, and nothing is saved for one."


def _roots_beside(scene: Scene, found: Sequence[Spot]) -> list[str]:
    """The variables of the places beside the first: what comes back only comes if these let go as well."""
    variables = {root.name for root in scene.holdings.roots if root.kind == "variable"}
    return [one.root for one in found[1:] if one.root in variables and one.root != found[0].root]


def _with_shared(scene: Scene, spot: Spot, graphs: Sequence[Held]) -> Spot:
    """With what a list reaches, too, though it goes by a variable's name: of the results that it keeps, the last one. (What was
    made before them is what they were made of.)"""
    number, roots = scene.holdings.number(spot.root), scene.holdings.roots
    last = max(born_at(scene, one) for one in spot.held)
    if spot.container is None or number is None:
        return spot
    shared = [
        one
        for one in graphs
        if number in one.roots
        and one not in spot.held
        and born_at(scene, one) > last
        and all(roots[each].kind == "variable" for each in one.roots)
    ]
    return replace(spot, place=spot.container.place, held=(*spot.held, *shared)) if shared else spot


def _other_names(scene: Scene, main: Spot, held: Sequence[Held]) -> list[str]:
    """The variables that reach these besides the place's own."""
    roots = [scene.holdings.roots[number] for number in sorted({number for one in held for number in one.roots})]
    # (Whose closure it is in, the place says.)
    _, function = variable_of(main.held[0]) or ("", "")
    own = (main.root, function)
    return [root.name for root in roots if root.kind == "variable" and root.name not in own]


def gradients_with_graphs(scene: Scene) -> Iterator[Cause]:
    """``backward(create_graph=True)``: gradients that lead to graphs that lead to the gradients' tensors again."""
    kept = [one for one in scene.held if one.kind == "graph" and base(one).endswith(".grad")]
    lost = [one for one in scene.holdings.lost if one.device == scene.device and one.address in scene.alive]
    # What a cycle in C++ keeps has no name any more.
    gone = sum(one.size for one in lost if scene.alive[one.address].born >= 0)
    calls = scene.program.calls("backward", "create_graph")
    if not calls:
        return
    parameters = {one.place for one in scene.held if one.kind == "parameter"}
    gradients = [one.place for one in scene.held if one.kind == "gradient"]
    inputs = [place for place in gradients if place.removesuffix(".grad") not in parameters]
    place = (inputs or gradients or [".grad"])[0]
    again = f" {human(gone)} of earlier iterations have no name any more." if gone >= LEAST else ""
    yield Cause(
        "gradients_with_graphs",
        f"`backward(create_graph=True)` ({calls[0].words}) stores gradients that keep their graphs in {quoted(place)}: a "
        f"reference cycle that nothing frees, {human(size_of(kept) + gone)}.{again}",
        f"Use `torch.autograd.grad` with `create_graph=True`, which stores nothing, or `{place} = None` at the end of each step "
        "(and `zero_grad()` for the parameters).",
        size_of(kept) + gone,
    )
