"""Memory that grows with the iterations, and graphs for which backward never runs."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from gpumem_magic.causes.ahead import backward_behind
from gpumem_magic.causes.alike import made_at
from gpumem_magic.causes.libraries import clearing_hook
from gpumem_magic.causes.model import LEAST, Iteration, Scene
from gpumem_magic.causes.own_functions import outlived_a_backward
from gpumem_magic.causes.places import (
    MODULE,
    Spot,
    added,
    advice_known,
    base,
    common_stem,
    detach,
    general,
    is_part,
    quoted,
    release_all,
    spots,
    taking_off,
    together,
    told,
    variable_of,
)
from gpumem_magic.causes.waiting import FEWER_AT_ONCE
from gpumem_magic.causes.written import Written, put_into
from gpumem_magic.devices.base import CodePlace
from gpumem_magic.owners.holders import ELEMENT, detach_words, detached
from gpumem_magic.owners.model import A_LEAF, DEFAULT_ARGUMENT, GENERATOR, THIS_ERROR, Held, Root, by_root, size_of
from gpumem_magic.recording.model import BACKWARD, FORWARD, OPTIMIZER, Span
from gpumem_magic.report.model import Cause
from gpumem_magic.units import human, listed

# The kinds of roots that have a name in the program.
_NAMES = frozenset({"variable", "module"})
# So many equal steps are no accident.
_EQUAL_ITERATIONS = 3
# What is done now and then is done so often.
_EVERY = (2, 3, 4, 5, 10)
# Two steps are near each other if they differ by one part in so many of the largest.
_NEAR = 4
_ANY_PLACE = re.compile(r"\[\d+\]")
# So many iterations that each leave something, the largest so many times the smallest.
_MANY_STEPS, _UNEVEN = 5, 4
# What transformers' models are asked to give besides, by its key in their results.
_ASKED = re.compile(r"\boutput_(?P<key>\w+)\s*=\s*True")
# What keeps autograd from recording, as a context.
_WITHOUT_GRAPHS = ("no_grad", "inference_mode")
_Turn = TypeVar("_Turn", int, tuple[tuple[int, ...], tuple[int, ...]])
# Bytes of a complex number in double precision.
_A_NUMBER = 16


def graphs_alive(scene: Scene) -> Iterator[Cause]:
    """What keeps the graphs of several iterations: a list of losses, a running total of them, a state that is carried along."""
    graphs = [one for one in scene.held if one.kind == "graph" and _is_the_programs(scene, one)]
    # Neither was saved for a backward.
    graphs = [one for one in graphs if A_LEAF not in one.place and not outlived_a_backward(scene, one)]
    told_apart = [one if _graphs_of(scene, one) >= 2 else _with_shared(scene, one, graphs) for one in spots(graphs)]
    counted = [(one, _graphs_of(scene, one)) for one in told_apart]
    found = [one for one, count in counted if count >= 2]
    # (The graph of one iteration saves a detached state of the one before.)
    if not any(_graphs_of(scene, one, whole=True) >= 2 for one in found):
        return
    main = found[0]
    count = max(count for one, count in counted if one in found)
    freed = detach(scene, found)
    theirs = {one.address for one in scene.holdings.freed_without("graph") if one.device == scene.device}
    all_of_it = size_of(one for spot in found for one in spot.held if one.address in theirs)
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
    keep, who = "keeps" if len(found) == 1 else "keep", told(found)
    yield Cause(
        "kept_graphs",
        f"{who[0].upper()}{who[1:]}{at} {keep} the graphs of {count} iterations alive{also}: {human(freed)} that were saved for "
        f"backward{none}.",
        _detaching(scene, found, place, list(dict.fromkeys([*others, *_roots_beside(scene, found)])), freed)
        + _without_autograd(scene, found, alone=not others),
        freed,
    )


def _on_the_way_to_a_backward(scene: Scene, found: Sequence[Spot], count: int, freed: int) -> Cause | None:
    """Memory ran out in a loop behind which a backward would have used up the graphs of all its turns: layers one after the
    other, steps in time, losses that are added up. Nothing is to be detached there."""
    if (ahead := _backward_ahead(scene, found)) is None:
        return None
    loop, backward = ahead
    return Cause(
        "graphs_ahead",
        f"The graphs of {count} turns of the loop at {loop.words} wait for their backward ({backward.words}): "
        f"{human(freed)}.",
        FEWER_AT_ONCE,
        freed,
    )


def _backward_ahead(scene: Scene, found: Sequence[Spot]) -> tuple[Written, Written] | None:
    """The loop in which memory ran out, and the backward behind it that goes through what it made, where the graphs were all made
    since the last backward."""
    last = max(map(scene.end_of, scene.spans(BACKWARD)), default=-1)
    if scene.report.error is None or any(_born(scene, one) < last for spot in found for one in spot.held):
        return None
    return backward_behind(scene.program.texts, scene.left.way)


def _carried_on(carrier: str, where: Written, names: Sequence[str], count: int, freed: int) -> str:
    """names: the others that reach the graphs."""
    reach = "reaches" if len(names) == 1 else "reach"
    rest = f" ({', '.join(map(quoted, names[:3]))} {reach} them, too)" if names else ""
    return (
        f"{quoted(carrier)} ({where.words}, `{where.shown}`) carries the graph on from each iteration to the next, so "
        f"those of {count} iterations are alive{rest}: {human(freed)} that were saved for backward."
    )


def _is_the_programs(scene: Scene, one: Held) -> bool:
    """Whether a variable of the program keeps it, or one of a function of its own that has just failed. (Of what an earlier error
    left `kept_errors` tells: nobody detaches that.)"""
    root = scene.holdings.roots[one.roots[0]]
    if root.name == THIS_ERROR:
        return (found := variable_of(one)) is not None and found[1] in scene.left.graphs
    return root.kind in _NAMES and not one.in_traceback


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
    if alone and not ends and _keeps_numbers(scene, found[0]):
        return ""
    if any(_born(scene, one) < max(ends, default=0) for spot in found for one in spot.held):
        return ""
    return " Where no backward is to follow, run it inside `with torch.no_grad():`, and nothing is saved for one."


def _roots_beside(scene: Scene, found: Sequence[Spot]) -> list[str]:
    """The variables of the places beside the first: what comes back only comes if these let go as well."""
    variables = {root.name for root in scene.holdings.roots if root.kind == "variable"}
    return [one.root for one in found[1:] if one.root in variables and one.root != found[0].root]


def _with_shared(scene: Scene, spot: Spot, graphs: Sequence[Held]) -> Spot:
    """With what a list reaches, too, though it goes by a variable's name: of the results that it keeps, the last one."""
    number, roots = scene.holdings.number(spot.root), scene.holdings.roots
    if spot.container is None or number is None:
        return spot
    shared = [
        one
        for one in graphs
        if number in one.roots and one not in spot.held and all(roots[each].kind == "variable" for each in one.roots)
    ]
    return replace(spot, place=spot.container.place, held=(*spot.held, *shared)) if shared else spot


def _other_names(scene: Scene, main: Spot, held: Sequence[Held]) -> list[str]:
    """The variables that reach these besides the place's own."""
    roots = [scene.holdings.roots[number] for number in sorted({number for one in held for number in one.roots})]
    # (Whose closure it is in, the place says.)
    _, function = variable_of(main.held[0]) or ("", "")
    own = (main.root, function)
    return [root.name for root in roots if root.kind == "variable" and root.name not in own]


def _graphs_of(scene: Scene, spot: Spot, *, whole: bool = False) -> int:
    """How many iterations' graphs a place keeps: of training's, or of the loop in which they were made; in a loop that nobody
    sees, as many as the place has parts, each of a forward of its own. whole: without one of which next to nothing is there."""
    kept = [(birth, one.size) for one in spot.held if (birth := _born(scene, one)) >= 0 and not _is_shared(scene, one)]
    born = sorted(birth for birth, _ in kept)
    ends = [one.end for one in scene.iterations]
    iterations = _turns(((bisect_left(ends, birth + 1), size) for birth, size in kept), whole=whole) if ends else set()
    turns = _turns(((turn, size) for birth, size in kept if (turn := scene.turn_of(birth))), whole=whole)
    spans = sorted((scene.start_of(one), scene.end_of(one)) for one in scene.spans(FORWARD))
    parts = len({base(one) for one in spot.held})
    # What lies around a forward, its batch and its loss, is no other one's.
    within = sum(bisect_left(born, begin) < bisect_left(born, end) for begin, end in spans)
    if any(one.beside for one in scene.spans(FORWARD)):
        # Of the threads that run a model, one is watched; what shares a forward has next to nothing of its own.
        by_part = Counter[str]()
        for one in spot.held:
            by_part[base(one)] += one.size
        largest = max(by_part.values())
        within = max(within, sum(2 * size >= largest for size in by_part.values()))
    forwards = within if spans else parts
    # A step in the midst of a turn: what comes behind it in the last one is of no further iteration.
    steps = len(iterations) - (len(turns) > 1 and len(iterations) == len(turns) + 1)
    return max(min(parts, forwards), steps, len(turns), _added_up(scene, spot, [begin for begin, _ in spans]))


def _added_up(scene: Scene, spot: Spot, starts: Sequence[int]) -> int:
    """Of how many forwards of one line a number reaches the graphs, where a later backward has gone through none of them: a sum
    that a function makes which trains and evaluates, say."""
    last = max(map(scene.start_of, scene.spans(BACKWARD)), default=-1)
    if not _keeps_numbers(scene, spot) or any(_born(scene, one) >= last for one in spot.held):
        return 0
    return max(map(len, _come_again(scene, spot.held, starts).values()), default=0)


def _turns(sizes: Iterable[tuple[_Turn, int]], *, whole: bool) -> set[_Turn]:
    """The turns in which these were made. whole: but for a first one of which little is there: a detached state, say."""
    of_each: dict[_Turn, int] = defaultdict(int)
    for turn, size in sizes:
        of_each[turn] += size
    turns = sorted(of_each)
    least = min((of_each[one] for one in turns[1:]), default=0)
    return set(turns[1:] if whole and turns and _NEAR * of_each[turns[0]] < least else turns)


def _detaching(scene: Scene, found: Sequence[Spot], place: Written | None, others: list[str], freed: int) -> str:
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
    if root is not None and (code := _detached_by_name(scene, spot, root, others)) is not None:
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
    numbers = _keeps_numbers(scene, spot)
    if place is not None and len(places) == 1 and spot.holds_directly and (what := put_into(place.statement)):
        value = f" (or `{what}.item()`, if its value is all you need)" if numbers else ""
        return f"Put `{what}.detach()` there{value}{now}."
    goes = "goes into" if spot.container is not None else "is given to"
    told_places = list(map(quoted, places))
    if len(spot.held) > 1 and spot.container is not None:
        told_places = [_ANY_PLACE.sub("[…]", one) for one in told_places]
    return f"`.detach()` what {goes} {listed(told_places)}{' (`.item()` for a number)' if numbers else ''}{now}."


def _detached_by_name(scene: Scene, spot: Spot, root: Root, others: list[str]) -> str | None:
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


def _keeps_numbers(scene: Scene, spot: Spot) -> bool:
    """Whether what lies at a place are numbers, losses say, as far as is known."""
    own = [one for one in scene.held if one.kind == "tensor" and one.place.startswith(spot.place)]
    return bool(own) and all(one.requested <= _A_NUMBER for one in own)


def growth(scene: Scene) -> Iterator[Cause]:
    """What each iteration leaves behind, where the last ones all left the same and it is still there."""
    loops = [scene.finished(one) for one in (scene.iterations, *scene.loops, scene.forwards_of_a_statement) if one]
    # What only every few iterations leave behind (checkpoints, say) is looked for last.
    for every in (1, *_EVERY):
        recurring = (one for one in loops if every == 1 or _recurs(scene, one, every))
        found = [_growth_of(scene, _joined(one, every), every) for one in recurring]
        # (What an inner loop gathers may go when it has ended, and an outer one keep more.)
        if growing := max((one for one in found if one is not None), key=lambda one: one.bytes, default=None):
            if growing.text:
                yield growing
            return


def _all_grow(steps: Sequence[int]) -> bool:
    """Whether each of several iterations left something, of sizes as those of texts are."""
    return len(steps) >= _MANY_STEPS and min(steps) >= LEAST and max(steps) <= _UNEVEN * min(steps)


def leaving(steps: Sequence[int], each: int) -> list[int]:
    """Those of the iterations that left about as much: others may have trained in between."""
    return [one for one in steps if 2 * one >= each]


def _steps(scene: Scene, iterations: Sequence[Iteration]) -> list[int]:
    """How many bytes more are allocated after each iteration than before it."""
    return [scene.timeline.allocated_at(one.end) - scene.timeline.allocated_at(one.start) for one in iterations]


def _recurs(scene: Scene, iterations: Sequence[Iteration], every: int) -> bool:
    """Whether the last iterations left the same as those so many before them, as random sizes do not."""
    steps = _steps(scene, iterations)
    pairs = list(zip(steps[-every:], steps[-2 * every : -every], strict=True)) if len(steps) >= 2 * every else []
    largest = max((abs(size) for pair in pairs for size in pair), default=0)
    return bool(pairs) and all(_NEAR * abs(one - other) <= largest for one, other in pairs)


def _joined(iterations: Sequence[Iteration], every: int) -> list[Iteration]:
    """So many iterations as one, counted from the last."""
    ends = range(len(iterations) - 1, every - 2, -every)
    return [Iteration(iterations[end - every + 1].start, iterations[end].end) for end in reversed(ends)]


def _growth_of(scene: Scene, iterations: Sequence[Iteration], every: int) -> Cause | None:
    """What one loop's iterations leave behind. Without text where another cause says it."""
    if len(iterations) < _EQUAL_ITERATIONS + 1:
        return None
    steps = _steps(scene, iterations)
    # The first iteration brings gradients and optimizer states, which stay.
    last = steps[-_EQUAL_ITERATIONS:]
    uneven = max(last) > 1.5 * min(last)
    if min(last) < LEAST or (uneven and not _all_grow(steps)):
        return None
    # What the last iteration made may be made anew in each (gradients, the batch): only what outlived one counts.
    alive = [
        one for one in scene.alive.values() if iterations[-_EQUAL_ITERATIONS].start <= one.born < iterations[-1].start
    ]
    left = size_of(alive)
    if left < sum(last[:-1]) * 0.5:
        return None
    addresses = {one.address for one in alive}
    made = {one.address for one in scene.alive.values() if one.born >= iterations[0].start}
    kept = {general(one) for one in scene.held if one.address in addresses}
    stem = common_stem(kept)
    found = spots(
        one
        for one in scene.held
        if one.address in made and (general(one) in kept or (stem and common_stem([general(one)]) == stem))
    )
    found = _by_what_reaches_all(scene, found, made)
    each = sum(last) // len(last)
    about, many = "about " if uneven else "", scene.how_many(leaving(steps, each))
    text = f"Each iteration leaves {about}{human(each)} more allocated than the previous one{many}"
    if every > 1:
        text = f"Every {every} iterations leave {human(each)} more allocated than those before"
    if found and all(scene.holdings.roots[one.roots[0]].kind == "cycle" for one in found[0].held):
        # `reference_cycle` says more of it.
        return Cause("growth", "", "", left)
    if not found and (hooks := scene.program.entering("saved_tensors_hooks")) and _in_any(scene, iterations, FORWARD):
        # ("Registering default hooks for saved tensors", PyTorch's notes on autograd.)
        return Cause(
            "growth",
            f"{text}, and no name leads to it. A pack hook (`{hooks.shown}`, {hooks.words}) that keeps a result as it is "
            "keeps its graph, and that keeps the result: a circle that only a backward opens.",
            "Let the pack hook return `t.detach()`; or use `torch.no_grad()`, where no backward follows.",
            left,
        )
    if not found and (at_exit := next(iter(scene.program.calls("register")), None)) and "atexit" in at_exit.statement:
        # (Python's own list of them is no object that anybody can look into: Modules/atexitmodule.c.)
        return Cause(
            "growth",
            f"{text}, and no name leads to it: `{at_exit.shown}` ({at_exit.words}) keeps each function that it is given, with "
            "the object that it is a method of, until Python ends.",
            "Register one function once, or `atexit.unregister` what is not needed any more.",
            left,
        )
    if not found:
        return Cause(
            "growth",
            f"{text}, and no name of the program was found that leads to it.",
            "A library's own object may keep it, which Python does not look into.",
            left,
        )
    main = together([one for one in found if 10 * one.size >= found[0].size])
    if _only_graphs(main[0], addresses):
        main = [replace(main[0], held=tuple(one for one in main[0].held if one.kind == "graph")), *main[1:]]
    if main[0].held[0].kind == "gradient" and not _in_any(scene, iterations, BACKWARD):
        # Set one after the other, of a model whose parameters a loop goes through.
        return None
    if _is_trained_on(scene, iterations[-1], main[0]) or _is_set_up(scene, iterations, main):
        return None
    total = sum(one.size for one in main)
    place = added(scene, main[0])
    at = f", put there at {place.words} (`{place.shown}`)" if place is not None else ""
    holder = "it is held by"
    if _is_a_graph(main[0]):
        saved = not _backward_went_through(scene, main[0])
        holder = "it is saved for a backward in the graph of" if saved else "it is held by the graph of"
    if not at and (made_by := made_at(scene, max(alive, key=lambda one: one.size))):
        at = f", made by {made_by}"
    return Cause(
        "growth",
        f"{text}: {holder} {told(main)}{at}.",
        _less(scene, main),
        total,
    )


def _by_what_reaches_all(scene: Scene, found: list[Spot], made: Collection[int]) -> list[Spot]:
    """These, or, where what iterations left goes by the names of several and one of them leads to much more of it, that one: the
    last few have what the others gave back long ago."""
    roots = scene.holdings.roots
    reached = Counter[int]()
    for one in scene.held:
        for number in one.roots if one.address in made else ():
            reached[number] += one.size
    shared = set.intersection(*(set(one.roots) for spot in found for one in spot.held)) if found else set()
    most = max(shared, key=lambda number: reached[number], default=-1)
    if any(spot.container is not None for spot in found):
        # An inner loop's own list grows, whoever has those of its other runs.
        return found
    own = {number for spot in found for one in spot.held for number in one.roots[:1]}
    if most < 0 or most in own or roots[most].kind not in _NAMES or reached[most] < 2 * sum(one.size for one in found):
        return found
    # (What is known on the way to the others' is of theirs.)
    theirs = tuple(
        one if one.roots[0] == most else replace(one, trail=())
        for one in scene.held
        if one.address in made and most in one.roots
    )
    return [Spot(roots[most].name, theirs, None)]


def _is_a_graph(spot: Spot) -> bool:
    """Whether its graph is what a place keeps, but for a number or two of its own."""
    return size_of(one for one in spot.held if one.kind != "graph") < LEAST


def _backward_went_through(scene: Scene, spot: Spot) -> bool:
    """Whether what its graph keeps are leaves, and what functions keep themselves: a backward freed the rest."""
    own = [one for one in spot.held if one.kind == "graph"]
    return bool(own) and all(A_LEAF in one.place or outlived_a_backward(scene, one) for one in own)


def _is_set_up(scene: Scene, iterations: Sequence[Iteration], main: Sequence[Spot]) -> bool:
    """Whether a loop only puts models together: layers, adapters, buffers, an ensemble, with which nothing is computed there."""
    if any(one.kind not in ("parameter", "buffer") for spot in main for one in spot.held):
        return False
    return not _in_any(scene, iterations, FORWARD, BACKWARD, OPTIMIZER)


def _in_any(scene: Scene, iterations: Sequence[Iteration], *kinds: str) -> bool:
    """Whether there is one of these in them."""
    # (A loop's first begins where its statement before ended, or the program.)
    begin, end = iterations[0].end, iterations[-1].end
    return any(begin <= scene.start_of(one) < end for one in scene.spans(*kinds))


def _only_graphs(spot: Spot, addresses: Collection[int]) -> bool:
    """Whether what has outlived its iteration is there by the graph of what a place keeps, which is made anew each time."""
    outlived = [one for one in spot.held if one.address in addresses]
    return size_of(one for one in outlived if one.kind != "graph") < LEAST <= size_of(outlived)


def _is_trained_on(scene: Scene, last: Iteration, spot: Spot) -> bool:
    """Whether what a loop gathered is what the next backward needs: a sequence's outputs, which a loss then reads."""
    if any(one.kind == "graph" for one in spot.held) and _backward_ahead(scene, [spot]) is not None:
        return True
    starts = [scene.start_of(one) for one in scene.spans(BACKWARD)]
    after = min((start for start in starts if start >= last.end), default=None)
    if after is None or any(last.start <= start < last.end for start in starts):
        return False
    reads = re.compile(rf"\b{re.escape(spot.root)}\b")
    between = (point.statement for point, begin, _ in scene.statements if last.end <= begin <= after)
    return any(reads.search(statement) for statement in between)


def _less(scene: Scene, main: Sequence[Spot]) -> str:
    """What to do about places that grow, the largest first: what lets go of it now, and how it would not grow."""
    # (Models have gradients, which go with them.)
    spot = next((one for one in main if one.held[0].kind != "gradient"), main[0])
    now = (
        ""
        if scene.holdings.roots[spot.held[0].roots[0]].name == THIS_ERROR
        else release_all(scene, [spot, *(one for one in main if one is not spot)])
    )
    if spot.held[0].kind == "gradient":
        return f"{now}." if now else ""
    if _is_a_graph(spot):
        freed = detach(scene, [spot])
        if _backward_went_through(scene, spot):
            return _detaching(scene, [spot], added(scene, spot), [], freed)
        number = scene.holdings.number(spot.root)
        root = scene.holdings.roots[number] if number is not None else None
        code = _detached_by_name(scene, spot, root, []) if root is not None else None
        now = f" For now {code} frees {human(freed)}." if code is not None and freed >= LEAST else ""
        return (
            "Where no backward is to follow, run it inside `with torch.no_grad():`; else run one in each iteration, or add "
            f"up numbers (`.item()`).{now}"
        )
    if advice_known(spot):
        return f"{now}."
    held = [one for each in main for one in each.held]
    parts = list(filter(is_part, held))
    # (The first ones of a sequence that grows are parts of little.)
    if 10 * size_of(parts) >= 9 * size_of(held):
        seen = human(sum(one.seen for one in held))
        what, whole = "is a view", "the whole tensor it was taken from"
        if not all(one.viewed for one in parts):
            what, whole = "is a small part", "all of the tensor it was made in"
        added_up = f"Each {what} ({seen} in all) that keeps {whole}: add `.clone()`"
        return f"{added_up}; {now}." if now else f"{added_up}."
    host = "keep only what is used later, on the host (`.detach().cpu()`)"
    if any(one.kind == "parameter" and _is_in_a_module(one) for one in spot.held):
        host = "keep the models that are used later on the host (`.cpu()`)"
    elif spot.held[0].kind == "optimizer_state":
        host = "keep one optimizer at a time"
    if spot.place.startswith(DEFAULT_ARGUMENT):
        host = "make it anew in each call (`None` as the default): a default is made once, with the function"
    elif all(any(GENERATOR in station.bases for station in one.trail) for one in spot.held):
        host = "let each generator come to its end, or `.close()` it: until then it keeps its local variables"
    if summed := scene.program.summed(spot.place):
        host = f"add them up as they come: `{summed}` reads nothing else of them"
    hook = scene.program.hook_of(place) if (place := added(scene, spot)) is not None else None
    asked = _ASKED.search(place.statement) if place is not None else None
    if asked is not None and f"'{asked['key']}'" in spot.place:
        host = f"leave out `{asked[0]}`, where nothing reads them, or {host}"
    if hook is not None:
        host = f"{host}, and take the hook off when it has done its work ({taking_off(hook)})"
    elif epoch := clearing_hook(spot.place, [kind for station in spot.held[0].trail for kind in station.bases]):
        host = f"{epoch}, and keep only what is used there, on the host (`.detach().cpu()`)"
    if method := _emptied_by(scene, spot):
        return (
            f"{now}; `{method}()` empties it: better, call it where what it keeps is not needed any more."
            if now
            else (f"`{method}()` empties it: call it where what it keeps is not needed any more.")
        )
    return f"{now}; better, {host}." if now else f"Better {host}."


def _emptied_by(scene: Scene, spot: Spot) -> str:
    """``accelerator.free_memory``: how the object in which a list or dictionary grows empties it by a method of its own; "" where
    it has none."""
    trail = max((one.trail for one in spot.held), key=len, default=())
    for owner in reversed(trail):
        rest = spot.place.removeprefix(f"{owner.place}.") if spot.place.startswith(f"{owner.place}.") else ""
        attribute = re.match(r"\w+", rest)
        if (
            attribute is not None
            and MODULE not in owner.bases
            and (method := scene.program.emptying(owner.bases, attribute[0]))
        ):
            return f"{owner.place}.{method}"
    return ""


def _is_in_a_module(one: Held) -> bool:
    return any(MODULE in station.bases for station in one.trail)


def graph_without_backward(scene: Scene) -> Cause | None:
    """Forwards whose graph something keeps, where no backward is meant to follow: in evaluation mode, or again and again where
    nothing is trained."""
    backwards = scene.spans(BACKWARD)
    last = max(map(scene.end_of, backwards), default=0)
    forwards = [one for one in scene.spans(FORWARD) if scene.start_of(one) >= last]
    if not forwards:
        return None
    starts = sorted(map(scene.start_of, forwards))
    ours = [one for one in scene.held if one.kind == "graph" and _born(scene, one) >= starts[0]]
    freed = size_of(ours)
    kept = len({bisect_right(starts, _born(scene, one)) for one in ours})
    if freed < LEAST or _backward_ahead(scene, spots(ours)) is not None:
        return None
    place = scene.left.place if scene.report.error is not None else None
    only_looks = place is not None and scene.program.loop_only_looks(place)
    ends = bool(backwards) and kept >= 2 and _ends_without_backward(scene, ours, starts)
    if place is not None and not only_looks and not ends and scene.program.trains(place):
        # It failed on the way to a backward.
        return None
    if backwards:
        # A single one may be the next iteration's, of a model that is trained in evaluation mode.
        told_by_mode = (kept >= 2 or only_looks) and _trained_places(scene)
        if not told_by_mode and not ends:
            return None
    elif may_train(scene, forwards):
        return None
    if (
        (scene.report.error is None or not backwards)
        and not scene.evaluating
        and any(_graphs_of(scene, spot) >= 2 for spot in spots(ours)[:1])
    ):
        # Losses that are kept or added up: `graphs_alive` says which.
        return None
    root = scene.holdings.roots[by_root(ours).most_common(1)[0][0]]
    graphs = kept if backwards else max(_graphs_of(scene, spot) for spot in spots(ours))
    what = f"the graphs of {graphs} iterations" if graphs > 1 else "a graph"
    row = next((point for point, begin, end in scene.statements if begin <= _born(scene, ours[0]) < end), None)
    at = f" (line {row.line})" if row is not None else ""
    evaluating = sorted(scene.evaluating)
    names = ", ".join(f"`{name}`" for name in evaluating[:3])
    why = f"{names} {'is' if len(evaluating) == 1 else 'are'} in evaluation mode, yet " if names else ""
    keeper, keeps = quoted(root.name), "keeps"
    if root.kind == "traceback":
        made = made_at(scene, scene.alive[max(ours, key=lambda one: one.size).address]) if not scene.left.told else ""
        keeper, keeps = scene.left.told or keeper, "keep" if " and " in scene.left.told else "keeps"
        if made:
            keeper, at = made, ""
    return Cause(
        "missing_no_grad",
        f"{why}{keeper} {keeps} {what}{at}, though no backward follows: {human(freed)}.",
        without_a_graph(
            scene,
            f"{'Evaluate' if names else 'Run it'} inside `with torch.inference_mode():` (or `torch.no_grad()`).",
            row.line if row is not None else 0,
        ),
        freed,
    )


def without_a_graph(scene: Scene, remedy: str, line: int) -> str:
    """The remedy, with what the program does to this end, and why that does not help: a context manager that is only called, or
    one that another thread knows nothing of (autograd's mode is each thread's own: c10/core/AutogradState.cpp). line: the cell's,
    at which the graphs were made."""
    if (call := scene.program.does_nothing(_WITHOUT_GRAPHS)) is not None:
        return (
            f"{remedy} `{call.shown}` by itself ({call.words}) switches nothing off: it wants a `with` in front of it."
        )
    around = scene.program.inside_with(line, _WITHOUT_GRAPHS)
    if around is None or scene.program.calls("enable_grad") or scene.program.calls("set_grad_enabled"):
        return remedy
    return (
        f"`{around.shown}` ({around.words}) holds for its own thread, and this was computed in another one: enter "
        "`torch.no_grad()` in the function that the threads run."
    )


def _ends_without_backward(scene: Scene, graphs: Sequence[Held], starts: Sequence[int]) -> bool:
    """Whether it failed where nothing that was still to run, in any of the functions that led there, goes backward; or ended, and
    of what several turns made only numbers are kept. starts: where the forwards began that made the graphs."""
    again, left = [place for place, its in _come_again(scene, graphs, starts).items() if len(its) > 1], scene.left
    if scene.report.error is None:
        return bool(again) and all(_keeps_numbers(scene, spot) for spot in spots(graphs))
    if not left.way or left.called_back:
        return False
    texts = ((scene.program.text_of(one.own_file, scene.recording.own_file), one.own_line) for one in again)
    line = next((line for text, line in texts if text is not None and text.where == left.way[-1].where), 0)
    ways = (0, line) if line else (0,)
    return not all(scene.program.may_go_backward(left.way, one) for one in ways)


def _come_again(scene: Scene, graphs: Iterable[Held], starts: Sequence[int]) -> dict[CodePlace, set[int]]:
    """By the program's lines, of which forwards graphs are kept. starts: where these began."""
    births = scene.recording.logs[scene.device].births
    found: dict[CodePlace, set[int]] = defaultdict(set)
    for one in graphs:
        birth = births.get(_born(scene, one))
        if birth is not None and birth.place is not None and birth.place.own_line:
            found[birth.place].add(bisect_right(starts, _born(scene, one)))
    return found


def _trained_places(scene: Scene) -> bool:
    """Whether a model in evaluation mode is one that an optimizer trains."""
    return any((scene.device, address) in scene.holdings.optimized for address in scene.evaluated)


def may_train(scene: Scene, forwards: list[Span]) -> bool:
    """Whether a backward may follow in another cell: a module in evaluation mode is trained, too, where batch norm is frozen."""
    source = "".join(one.source for one in scene.program.cells[:1])
    if not scene.evaluating:
        most = max(Counter(span.label for span in forwards).values())
        return bool(scene.holdings.optimized) or most < _EQUAL_ITERATIONS or "optim" in scene.typed
    return _trained_places(scene) and len(forwards) == 1 and ".eval(" not in source


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


def _is_shared(scene: Scene, one: Held) -> bool:
    """Whether it is autocast's copy of a weight: the first forward makes it, and the graphs of all later ones save it."""
    allocation = scene.alive.get(one.address)
    return allocation is not None and scene.labels[allocation.index].category == "autocast_copies"


def _born(scene: Scene, one: Held) -> int:
    allocation = scene.alive.get(one.address)
    return -1 if allocation is None else allocation.born
