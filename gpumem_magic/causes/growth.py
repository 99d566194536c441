"""Memory that grows with the iterations."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from gpumem_magic.causes.alike import made_at
from gpumem_magic.causes.detaching import detached_by_name, detaching
from gpumem_magic.causes.graph_counts import NEAR, backward_ahead
from gpumem_magic.causes.libraries import clearing_hook
from gpumem_magic.causes.model import EQUAL_ITERATIONS, LEAST, Iteration, Scene
from gpumem_magic.causes.own_functions import backward_went_through
from gpumem_magic.causes.places import (
    MODULE,
    NAMES,
    Spot,
    added,
    advice_known,
    chain_of,
    common_stem,
    detach,
    emptied_by,
    general,
    is_part,
    release_all,
    spots,
    taking_off,
    together,
    told,
)
from gpumem_magic.causes.turns import turns_of_lines
from gpumem_magic.owners.model import DEFAULT_ARGUMENT, GENERATOR, THIS_ERROR, size_of
from gpumem_magic.recording.model import BACKWARD, FORWARD, OPTIMIZER
from gpumem_magic.report.model import Cause
from gpumem_magic.units import human

# What is done now and then is done so often.
_EVERY = (2, 3, 4, 5, 10)
# So many iterations that each leave something, the largest so many times the smallest.
_MANY_STEPS, _UNEVEN = 5, 4
# What transformers' models are asked to give besides, by its key in their results.
_ASKED = re.compile(r"\boutput_(?P<key>\w+)\s*=\s*True")


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
    for turns in turns_of_lines(scene):
        if (growing := _growth_of(scene, turns, 1)) is not None:
            if growing.text:
                yield growing
            return


def _all_grow(steps: Sequence[int]) -> bool:
    """Whether each of several iterations left something, of sizes as those of texts are."""
    return len(steps) >= _MANY_STEPS and min(steps) >= LEAST and max(steps) <= _UNEVEN * min(steps)


def leaving(steps: Sequence[int], each: int) -> list[int]:
    """Those of the iterations that left about as much: others may have trained in between."""
    return [one for one in steps if 2 * one >= each]


def _recurs(scene: Scene, iterations: Sequence[Iteration], every: int) -> bool:
    """Whether the last iterations left the same as those so many before them, as random sizes do not."""
    steps = scene.left_by(iterations)
    pairs = list(zip(steps[-every:], steps[-2 * every : -every], strict=True)) if len(steps) >= 2 * every else []
    largest = max((abs(size) for pair in pairs for size in pair), default=0)
    return bool(pairs) and all(NEAR * abs(one - other) <= largest for one, other in pairs)


def _joined(iterations: Sequence[Iteration], every: int) -> list[Iteration]:
    """So many iterations as one, counted from the last."""
    ends = range(len(iterations) - 1, every - 2, -every)
    return [Iteration(iterations[end - every + 1].start, iterations[end].end) for end in reversed(ends)]


def _growth_of(scene: Scene, iterations: Sequence[Iteration], every: int) -> Cause | None:
    """What one loop's iterations leave behind. Without text where another cause says it."""
    if len(iterations) < EQUAL_ITERATIONS + 1:
        return None
    steps = scene.left_by(iterations)
    # The first iteration brings gradients and optimizer states, which stay.
    last = steps[-EQUAL_ITERATIONS:]
    uneven = max(last) > 1.5 * min(last)
    if min(last) < LEAST or (uneven and not _all_grow(steps)):
        return None
    # What the last iteration made may be made anew in each (gradients, the batch): only what outlived one counts.
    alive = [
        one for one in scene.alive.values() if iterations[-EQUAL_ITERATIONS].start <= one.born < iterations[-1].start
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
    if (chained := _in_a_chain(scene, found, text)) is not None:
        return chained
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
        saved = not backward_went_through(scene, main[0])
        holder = "it is saved for a backward in the graph of" if saved else "it is held by the graph of"
    if not at and (made_by := made_at(scene, max(alive, key=lambda one: one.size))):
        at = f", made by {made_by}"
    return Cause(
        "growth",
        f"{text}: {holder} {told(main)}{at}.",
        _less(scene, main),
        total,
    )


def _in_a_chain(scene: Scene, found: Sequence[Spot], text: str) -> Cause | None:
    """What each object keeps that leads to the one before it (``state.previous``), so that the last one has all."""
    held = [one for spot in found for one in spot.held]
    if (chain := chain_of(held)) is None:
        return None
    first, link = chain
    put = scene.program.adding(first.partition(".")[0], link) or scene.program.stating(re.compile(rf"\b{link}=(?!=)"))
    at = f", put there at {put.words} (`{put.shown}`)" if put is not None else ""
    return Cause(
        "growth",
        f"{text}: it is held by `{first}`, which leads from each to the one before{at}.",
        f"Set `{first} = None` where the way back is not needed any more; else keep what it leads to on the host (`.cpu()`).",
        size_of(held),
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
    if most < 0 or most in own or roots[most].kind not in NAMES or reached[most] < 2 * sum(one.size for one in found):
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
    if any(one.kind == "graph" for one in spot.held) and backward_ahead(scene, [spot]) is not None:
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
        if backward_went_through(scene, spot):
            return detaching(scene, [spot], added(scene, spot), [], freed)
        number = scene.holdings.number(spot.root)
        root = scene.holdings.roots[number] if number is not None else None
        code = detached_by_name(scene, spot, root, []) if root is not None else None
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
    if any(one.kind == "parameter" and one.goes_through(MODULE) for one in spot.held):
        host = "keep the models that are used later on the host (`.cpu()`)"
    elif ".param_groups[" in spot.place:
        host = "make an optimizer of its own for what is trained alone, or take its group out of `param_groups` again"
    elif spot.held[0].kind == "optimizer_state":
        host = "keep one optimizer at a time"
    if spot.place.startswith(DEFAULT_ARGUMENT):
        host = "make it anew in each call (`None` as the default): a default is made once, with the function"
    elif all(one.goes_through(GENERATOR) for one in spot.held):
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
    if method := emptied_by(scene, spot.held, spot.place):
        return (
            f"{now}; `{method}()` empties it: better, call it where what it keeps is not needed any more."
            if now
            else (f"`{method}()` empties it: call it where what it keeps is not needed any more.")
        )
    return f"{now}; better, {host}." if now else f"Better {host}."
