"""What is kept on the device on purpose, though it need not: data, copies of weights, a key-value cache, a bank that grows."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate
from math import prod

from gpumem_magic.causes.alike import made_at
from gpumem_magic.causes.filled import positions_used, with_less_room
from gpumem_magic.causes.model import LEAST, WORTH, Scene, partnered
from gpumem_magic.causes.places import Spot, added, is_part, quoted, release, spots, taking_off
from gpumem_magic.causes.sized import asked_for_room
from gpumem_magic.devices.base import Birth
from gpumem_magic.owners.model import Held, Station, size_of
from gpumem_magic.recording.model import BACKWARD, FORWARD
from gpumem_magic.report.failure import failed_request
from gpumem_magic.report.model import Cause
from gpumem_magic.snapshot.timeline import Allocation
from gpumem_magic.units import counted, human

# So many tensors in one place are batches, or items.
_PARTS = 8
# Fewer batches that wait are what a loader has ready.
_AHEAD = 4
_HAS_NO_BOUND = re.compile(r"\bQueue\(\s*\)")
# Their results keep the memory of their inputs' size (`virtual/operators/losses.py`).
_SHRUNK = frozenset({"mse_loss", "smooth_l1_loss", "binary_cross_entropy"})
# The argument and the attribute of transformers' models.
_NAMES_CACHE = re.compile(r"\bpast_key_values?\b|\bcache_params\b|\.cache\b|use_cache\s*=\s*True")
# A cache with more than so many times the room that is in use is worth a shorter one.
_ROOMY = 1.2
# What a result has one of for each layer, by its key or attribute, and so many layers.
_OF_EACH_LAYER = re.compile(r"(?:\['(?P<key>\w+)'\]|\.(?P<name>\w+))(?=\[\d+\])")
_LAYERS = 3
_CACHE = "transformers.cache_utils.Cache"
_STATIC = "transformers.cache_utils.StaticCache"


def data_on_device(scene: Scene) -> Iterator[Cause]:
    """A request failed, and much of what is allocated is data from before the cell, or moved by it, in one place."""
    error = scene.report.error
    if failed_request(scene.report) is None or error is None:
        return
    data = [
        one
        for one in scene.held
        if one.kind == "tensor"
        and one.address in scene.alive
        and (scene.alive[one.address].born < 0 or scene.labels[scene.alive[one.address].index].category == "inputs")
        and scene.holdings.roots[one.roots[0]].kind in ("variable", "module")
        and not one.goes_through(_CACHE)
    ]
    total = size_of(scene.alive.values())
    for spot in spots(data)[:1]:
        if 10 * spot.size < 4 * total or spot.size < (error.wanted or 0):
            # Without it the request would have failed all the same.
            continue
        taken = rf"{re.escape(spot.place)}\s*\[|\bin\b[^:\n]*\b{re.escape(spot.place)}\b[^:\n]*:"
        is_dataset = any(
            base.endswith("data.dataset.Dataset") for one in spot.held for at in one.trail for base in at.bases
        )
        by_its_loader = is_dataset and not any(
            re.search(rf"\b{re.escape(spot.root)}\b", cell.source) for cell in scene.program.cells[:1]
        )
        if spot.root in scene.mentioned and not by_its_loader and not re.search(taken, scene.typed):
            # The cell computes with all of it, and takes no batches.
            continue
        if scene.mentioned and spot.root not in scene.mentioned and not by_its_loader and not is_dataset:
            made = scene.program.stating(re.compile(rf"^{re.escape(spot.root)}\s*="))
            at = f" (made at {made.words}, `{made.shown}`)" if made is not None else ""
            yield Cause(
                "data_on_device",
                f"{quoted(spot.place)} is there from an earlier cell{at}, and this one does not use it: {human(spot.size)} of "
                f"the {human(total)} that were allocated when memory ran out.",
                f"{let_go}." if (let_go := release(scene, spot)) else "",
                spot.size,
            )
            return
        whole = "The whole dataset lies on the device" if is_dataset else "Data lies on the device as a whole"
        if (let_go := release(scene, spot)) and quoted(spot.place) == spot.place:
            # Nothing to type: in a suspended generator, say.
            text = (
                f"{spot.place} takes {human(spot.size)} of the {human(total)} that were allocated when memory ran out."
            )
            yield Cause(
                "data_on_device", text[0].upper() + text[1:], f"{let_go}, where it is not needed any more.", spot.size
            )
            return
        yield Cause(
            "data_on_device",
            f"{whole}: {quoted(spot.place)} takes {human(spot.size)} of the {human(total)} that were allocated when memory "
            "ran out.",
            f"Keep {quoted(spot.place)} on the host (`.cpu()`) and move one batch at a time (`.to(device)`, with "
            "`pin_memory=True` and `non_blocking=True`).",
            spot.size,
        )


def data_ready(scene: Scene) -> Iterator[Cause]:
    """Most of the peak is data of which the cell takes a part at a time: it fits, and need not lie there."""
    if scene.report.error is not None:
        return
    data = [
        one
        for one in scene.held
        if one.kind == "tensor"
        and (made := scene.alive.get(one.address)) is not None
        and made.born < scene.moment
        and scene.labels[made.index].category == "inputs"
        and scene.holdings.roots[one.roots[0]].kind in ("variable", "module")
    ]
    for spot in spots(data)[:1]:
        is_dataset = any(
            base.endswith("data.dataset.Dataset") for one in spot.held for at in one.trail for base in at.bases
        )
        several = len({one.address for one in spot.held}) >= _PARTS
        # (A loop may go over the object whose attribute it is.)
        owners = accumulate(spot.place.split("."), "{}.{}".format)
        named = rf"\b(?:{'|'.join(map(re.escape, owners))})\b"
        taken = rf"{named}\s*\[[^\n\]]*[:a-z]|\bin\b[^:\n]*{named}[^:\n]*:"
        sliced = re.search(rf"{named}\s*\[[^\n\],\[]*:[^\n\]]*\]", scene.typed) is not None
        if spot.size < max(WORTH, scene.part_of_peak(2)) or not scene.loops:
            continue
        if not is_dataset and not (several and re.search(taken, scene.typed)) and not sliced:
            continue
        what = "The whole dataset lies" if is_dataset or not several else "All batches lie"
        place = added(scene, spot)
        at = f", put there at {place.words} (`{place.shown}`)" if place is not None else ""
        yield Cause(
            "data_ready",
            f"{what} on the device: {quoted(spot.place)} takes {human(spot.size)} of {human(scene.report.peak.allocated)}{at}.",
            "Where that room is wanted, keep it on the host and move one batch at a time (`.to(device)`, with "
            "`pin_memory=True` and `non_blocking=True`).",
            spot.size,
            describes=True,
        )


def data_ahead(scene: Scene) -> Iterator[Cause]:
    """Batches that a generator or a queue of the program's has put on the device before the loop comes to them."""
    if scene.tensors is None or scene.report.error is not None:
        return
    # What is still in a list at the end is that list's, and waits for nobody.
    in_lists = {
        allocation.index
        for one in scene.held
        if scene.holdings.roots[one.roots[0]].kind in ("variable", "module")
        and (allocation := scene.alive.get(one.address)) is not None
    }
    waiting: dict[str, list[Allocation]] = defaultdict(list)
    for one in scene.living_in(scene.moment, "inputs"):
        if one.index not in in_lists and (name := scene.tensors.waits_for(one, scene.moment)):
            waiting[name].append(one)
    if not waiting:
        yield from _ahead_of_their_forwards(scene, in_lists)
    for name, its in sorted(waiting.items(), key=lambda pair: -size_of(pair[1]))[:1]:
        if len(its) < _AHEAD or size_of(its) < scene.part_of_peak(4):
            continue
        facts = scene.tensors.facts(max(its, key=lambda one: one.born))
        made = f", made by `{facts.expression}` ({facts.inner or f'line {facts.line}'})" if facts.expression else ""
        yield Cause(
            "data_ahead",
            f"{len(its)} batches wait on the device for their turn as {quoted(name)}{made}: {human(size_of(its))}.",
            "Have fewer ready ahead (a shorter queue), or move each to the device when its turn comes.",
            size_of(its),
        )


def _ahead_of_their_forwards(scene: Scene, in_lists: Collection[int]) -> Iterator[Cause]:
    """The same inside of functions: copies from the host, made at one place, of which each forward from then on lets go of the
    oldest."""
    if scene.tensors is None:
        return
    alike: dict[object, list[Allocation]] = defaultdict(list)
    for one in scene.living_in(scene.moment, "inputs"):
        birth = scene.tensors.birth_of(one)
        if birth is not None and birth.shape and one.freed is not None and one.index not in in_lists:
            alike[birth.place].append(one)
    its = sorted(max(alike.values(), key=size_of, default=[]), key=lambda one: one.born)
    ends = [scene.end_of(one) for one in scene.spans(FORWARD)]
    turns = [bisect_left(ends, one.freed or 0) for one in its]
    if size_of(its) < scene.part_of_peak(4):
        return
    if len(set(turns)) == 1 and (cause := _in_a_list_without_name(scene, its, ends)) is not None:
        yield cause
    # (A buffer that is shuffled lets go of any.)
    if len(set(turns)) < _PARTS:
        return
    facts = scene.tensors.facts(its[-1])
    what = "batches" if len(set(turns)) == len(turns) else "samples"
    queue = next((one for one in scene.program.calls("Queue") if _HAS_NO_BOUND.search(one.statement)), None)
    shorter = f"Give the queue a `maxsize` (`{queue.shown}`, {queue.words})" if queue is not None else ""
    yield Cause(
        "data_ahead",
        f"{len(its)} {what} wait on the device for their turn, made by {made_at(scene, its[-1])}: {human(size_of(its))}."
        if facts.line
        else f"{len(its)} {what} wait on the device for their turn: {human(size_of(its))}.",
        f"{shorter or 'Have fewer ready ahead (a shorter queue)'}, or move each to the device when its turn comes.",
        size_of(its),
    )


def _in_a_list_without_name(scene: Scene, its: Sequence[Allocation], ends: Sequence[int]) -> Cause | None:
    """All are made, then as many forwards run, and then all go: a loop over a list of them that no name leads to.

    its: in the order in which they were made; ends: of the forwards."""
    forwards = bisect_left(ends, its[-1].freed or 0) - bisect_left(ends, its[-1].born)
    if not _PARTS <= len(its) <= forwards:
        return None
    listed_at = next(iter(scene.program.calls("list")), None)
    way = f"Without `list` (`{listed_at.shown}`, {listed_at.words})" if listed_at else "Without a list of them all"
    return Cause(
        "data_ahead",
        f"{len(its)} batches are on the device before the first of {forwards} forwards, and until behind the last, made by "
        f"{made_at(scene, its[-1])}: {human(size_of(its))}.",
        f"{way} each is made when its turn comes; or keep them on the host, and move one at a time.",
        size_of(its),
    )


def copied_weights(scene: Scene) -> Iterator[Cause]:
    """A request failed while, or after, the weights were copied on the device."""
    if failed_request(scene.report) is None:
        return
    roots = scene.holdings.roots
    weights = [
        one for one in scene.held if one.kind == "parameter" and (one.device, one.address) in scene.holdings.optimized
    ]
    others = [
        one
        for one in scene.held
        if one.kind in ("parameter", "tensor", "buffer")
        and (one.device, one.address) not in scene.holdings.optimized
        and (one.kind == "tensor" or roots[one.roots[0]].kind == "traceback")
    ]
    copies = partnered(others, _shape, map(_shape, weights))
    calls = [one for name in ("deepcopy", "clone", "state_dict") for one in scene.program.calls(name)]
    if not calls or 10 * size_of(copies) < size_of(weights):
        return
    yield Cause(
        "copied_weights",
        f"A second copy of the weights was on the device when memory ran out: {human(size_of(copies))} of "
        f"{human(size_of(weights))} (`{calls[0].shown}`, {calls[0].words}).",
        "Keep the copy on the host (`.cpu()`) or in bfloat16, or make it before training, so that it is seen at once "
        "whether it fits.",
        size_of(copies),
    )


def pinned_by_view(scene: Scene) -> Iterator[Cause]:
    """A view of a small part keeps all of the tensor that it was taken from, and a result that was shrunk what it was."""
    views = [
        one for one in scene.held if is_part(one) and scene.holdings.roots[one.roots[0]].kind in ("variable", "module")
    ]
    for spot in spots(views)[:1]:
        freed = size_of(one for one in scene.holdings.freed_by_replacing(spot.tensors) if one.device == scene.device)
        seen = sum(one.seen for one in spot.held)
        if freed - seen < scene.part_of_peak(10):
            return
        of_events, made = scene.recording.logs[scene.device].births, (scene.alive.get(one.address) for one in spot.held)
        births = [None if one is None else of_events.get(one.born) for one in made]
        # (What is from before the cell was put there by none of its statements.)
        place = added(scene, spot) if any(births) else None
        at = f" ({place.words}, `{place.shown}`)" if place is not None else ""
        several = len(spot.held) > 1
        if several and spot.container is not None:
            kept = f"The {counted(len(spot.held), 'tensor')} in {quoted(spot.container.place)}{at}"
        elif several:
            kept = f"{quoted(spot.place)}, with {counted(len(spot.held) - 1, 'other')} like it,{at}"
        else:
            kept = f"{quoted(spot.place)}{at}"
        kernels = {one.kernel if one is not None else "" for one in births}
        yield Cause(
            "pinned_by_view",
            f"{kept} {_cut_out(spot, kernels, human(seen))}",
            f"With `.clone()` {'each' if several else 'it'} keeps its own numbers only, which frees {human(freed - seen)}.",
            freed - seen,
        )


def _cut_out(spot: Spot, kernels: Collection[str], seen: str) -> str:
    """How small tensors keep much memory. kernels: that made it, "" where that is not known. seen: how much they are of it."""
    several, all_of = len(spot.held) > 1, human(spot.size)
    are, keep, they, them = ("are", "keep", "they", "them") if several else ("is", "keeps", "it", "it")
    were = "were" if several else "was"
    if _SHRUNK.issuperset(kernels):
        names = " and ".join(f"`{name}`" for name in sorted(kernels))
        return (
            f"{are} one number{' each' if several else ''}, and {keep} {all_of}: PyTorch makes the result of {names} in the size "
            "of its input, and does not give back the rest."
        )
    if all(one.viewed for one in spot.held):
        views, whole = ("views", "the tensors") if several else ("a view", "the tensor")
        return f"{are} {views} of {seen} and {keep} all of {whole} that {they} {were} taken from: {all_of}."
    return (
        f"{are} {seen} of the {all_of} that {they} {keep}: {they} {were} cut out of a larger tensor, or an operator made {them} "
        "in the size of its input and did not give back the rest."
    )


def kept_by_hook(scene: Scene) -> Iterator[Cause]:
    """A forward hook that puts what it sees where it stays."""
    kept = [
        one
        for one in scene.held
        if one.kind in ("tensor", "graph")
        and one.address in scene.alive
        and scene.holdings.roots[one.roots[0]].kind in ("variable", "module")
    ]
    groups: dict[str, list[Spot]] = {}
    for spot in spots(kept):
        groups.setdefault(spot.root, []).append(spot)
    for root, its in groups.items():
        size = sum(one.size for one in its)
        place = added(scene, its[0]) if size >= scene.part_of_peak(10) else None
        registered = scene.program.hook_of(place) if place is not None else None
        if place is None or registered is None:
            continue
        if its[0].container is None and scene.program.removes_hooks():
            # The hook has gone, and what it put on modules has not.
            more = f" and {counted(len(its) - 1, 'other place')}" if len(its) > 1 else ""
            yield Cause(
                "kept_by_hook",
                f"A hook ({place.words}, `{place.shown}`) has left what modules put out in {quoted(its[0].place)}{more}: "
                f"{human(size)}.",
                "Taking the hook off leaves it there: let go of it, too (`del`, or `= None`), or keep less, on the host "
                "(`.detach().cpu()`).",
                size,
            )
            return
        where = its[0].container.place if its[0].container is not None else root
        yield Cause(
            "kept_by_hook",
            f"A hook ({place.words}, `{place.shown}`) keeps what modules put out in {quoted(where)}, also while the next forward "
            f"runs: {human(size)}.",
            f"Take it off when it has done its work ({taking_off(registered)}), or keep less there, on the host "
            "(`.detach().cpu()`).",
            size,
            # After one forward it is what the hook is for; and of several it keeps the last one's only.
            describes=len(spans := scene.spans(FORWARD)) < 2 or _are_of_the_last(scene, its, scene.start_of(spans[-1])),
        )
        return


def _are_of_the_last(scene: Scene, its: Iterable[Spot], begin: int) -> bool:
    """Whether all of it was made behind a position."""
    made = [scene.alive.get(one.address) for spot in its for one in spot.held]
    return all(one is not None and one.born >= begin for one in made)


def key_value_cache(scene: Scene) -> Iterator[Cause]:
    """A cache of keys and values is as large as a good part of the peak, then or at the end."""
    at_end = scene.living_in(scene.end, "kv_cache")
    cached = max(scene.living_in(scene.moment, "kv_cache"), at_end, key=size_of)
    if size_of(cached) < scene.part_of_peak(5):
        return
    births = scene.recording.logs[scene.device].births
    caches = {one.address for one in at_end}
    known = [one for one in scene.held if scene.holdings.roots[one.roots[0]].kind in ("variable", "module")]
    its = [one for one in known if one.address in caches]
    if len({cache.node for one in its if (cache := _outermost_cache(one)) is not None}) > 1:
        # Of several sequences, one after the other: `growth` tells who keeps them.
        return
    place = _cache_of(its)
    positions = _positions_of(its)
    filled = positions_used(scene, its)
    used = None if place is None else scene.program.using(place.partition(".")[0].partition("[")[0])
    at = f" ({used.words})" if used is not None else ""
    joined = [birth for one in cached if (birth := births.get(one.born)) is not None and birth.kernel == "cat"]
    grows, longer = bool(joined), min(map(_positions_added, joined), default=0)
    its_name = f"The key-value cache{'' if place is None else f' {quoted(place)}'}"
    its_size = f"{human(size_of(cached))} in {counted(len(cached), 'tensor')}"
    if _trains_without(scene, cached):
        yield Cause(
            "key_value_cache",
            f"{its_name}{at} still keeps {its_size} while the model is trained, which needs none of it.",
            f"Let go of it when the generation has ended{'' if place is None else f' (`{place} = None`, and so on)'}.",
            size_of(cached),
        )
        return
    if _made_in_training(scene, cached):
        # While its graph is there, it is what that keeps anyway.
        gone = max((end for one in scene.spans(BACKWARD) if (end := scene.end_of(one)) <= scene.moment), default=0)
        still = [one for one in scene.living_in(scene.moment, "kv_cache") if one.born < gone]
        if size_of(still) >= LEAST:
            yield Cause(
                "cache_in_training",
                "Each forward in training makes a key-value cache that only generation reads, and "
                f"{human(size_of(still))} of it{'' if place is None else f', kept by {quoted(place)}{at},'} outlive their "
                "backward.",
                "`use_cache=False` in the call of the model (or `model.config.use_cache = False`) makes none.",
                size_of(still),
            )
        return
    room = asked_for_room(scene, max(cached, key=lambda one: one.size))
    if room is not None:
        yield Cause(
            "key_value_cache",
            f"{its_name} keeps {its_size}, as the room that was left allowed ({room.words}, `{room.shown}`).",
            "Take a smaller share there if other tensors need more: the cache then has room for fewer positions.",
            size_of(cached),
        )
        return
    if longer > 1:
        yield Cause(
            "key_value_cache",
            f"{its_name}{at} keeps {its_size}: the last call added {longer:,} positions to those of the calls before.",
            "Where it does not go on from these, let go of the cache first (set it to None, or empty it).",
            size_of(cached),
        )
        return
    yield Cause(
        "key_value_cache",
        f"{its_name}{at} keeps {its_size}, {_for_what(positions, filled)}"
        f"{'; it grows by `torch.cat`, which copies it, a layer at a time, at each new token' if grows else ''}.",
        f"{_with_less_room(cached, filled)}"
        f"{'One that is allocated once for the longest sequence (a `StaticCache`) is not copied; a' if grows else 'A'} "
        f"{'shorter `max_cache_len`, a ' if positions else ''}smaller batch, a quantized cache or fewer key-value heads make it "
        "smaller.",
        size_of(cached),
    )


def _positions_added(birth: Birth) -> int:
    """By how many positions what was joined is longer than its longest part; 0 where that is not known."""
    sizes = sorted(prod(shape) for shape, _ in birth.inputs)
    if birth.shape is None or len(sizes) < 2 or not sizes[-1]:
        return 0
    part = next(shape for shape, _ in birth.inputs if prod(shape) == sizes[-1])
    more = [whole - few for whole, few in zip(birth.shape, part, strict=False) if whole != few]
    return more[0] if len(part) == len(birth.shape) and len(more) == 1 else 0


def _with_less_room(cached: Iterable[Allocation], filled: tuple[int, int] | None) -> str:
    """What a cache would take that was made for the positions in use."""
    if filled is None or filled[0] <= _ROOMY * filled[1]:
        return ""
    return f"{with_less_room(size_of(cached), filled, 'it')} "


def _for_what(positions: int, filled: tuple[int, int] | None) -> str:
    if filled is not None:
        room, used = filled
        return f"with room for {room:,} positions of every sequence of the batch, of which {used:,} were written to"
    if not positions:
        return "for every position and every sequence of the batch"
    return f"with room for {positions:,} positions of every sequence of the batch, used or not"


def _positions_of(held: Iterable[Held]) -> int:
    """How many positions a cache of a length that was given to it has room for; 0 where it is none."""
    fixed = [one for one in held if one.goes_through(_STATIC)]
    # (batch, heads, positions, width)
    return max((one.shape[2] for one in fixed if len(one.shape) == 4), default=0)


def _made_in_training(scene: Scene, cached: Sequence[Allocation]) -> bool:
    """Whether a forward that a backward follows made the cache, and the program never names one."""
    last = max(map(scene.end_of, scene.spans(BACKWARD)), default=0)
    forwards = [
        (scene.start_of(one), scene.end_of(one))
        for one in scene.spans(FORWARD)
        if one.graph and scene.end_of(one) <= last
    ]
    made = [one for one in cached if any(start <= one.born < end for start, end in forwards)]
    return 2 * size_of(made) > size_of(cached) and not _NAMES_CACHE.search(scene.typed)


def _trains_without(scene: Scene, cached: list[Allocation]) -> bool:
    """Whether the moment lies in a step of training that began after all of a cache was made."""
    backward = next((one for one in scene.spans(BACKWARD) if scene.end_of(one) >= scene.moment), None)
    if backward is None:
        return False
    begin, end = scene.start_of(backward), scene.end_of(backward)
    used = [
        one
        for one in scene.living_in(scene.moment, "activations")
        if one.freed is not None and begin <= one.freed <= end
    ]
    return bool(used) and max(one.born for one in cached) < min(one.born for one in used)


def _outermost_cache(one: Held) -> Station | None:
    return next((station for station in one.trail if _CACHE in station.bases), None)


def _cache_of(held: Sequence[Held]) -> str | None:
    """The cache that holds tensors, or the list that does, as the program calls it."""
    caches = (cache.place for one in held if (cache := _outermost_cache(one)) is not None)
    return next(caches, spots(held)[0].place if held else None)


def _shape(one: Held) -> tuple[str, tuple[int, ...]]:
    return one.dtype, one.shape


def asked_for(scene: Scene) -> Iterator[Cause]:
    """What a call was asked to give besides its result (``output_hidden_states=True``): one for each layer."""
    parts: dict[tuple[str, str], list[Held]] = defaultdict(list)
    for one in scene.held:
        made = scene.alive.get(one.address)
        found = _OF_EACH_LAYER.search(one.place)
        if found is not None and made is not None and one.kind == "tensor" and made.born < scene.moment:
            parts[one.place[: found.end()], found["key"] or found["name"]].append(one)
    for (place, key), its in sorted(parts.items(), key=lambda pair: -size_of(pair[1])):
        calls = [one for one in scene.program.asking() if f"output_{key}" in one.statement]
        if len(its) < _LAYERS or size_of(its) < scene.part_of_peak(4) or not calls:
            continue
        call = calls[0]
        yield Cause(
            "asked_for",
            f"`output_{key}=True` ({call.words}) has the {key.replace('_', ' ')} of every layer kept in {quoted(place)}: "
            f"{human(size_of(its))} of {len(its)} layers at the peak.",
            "Leave it out where nothing reads them; else take what you need of each and let go of the result.",
            size_of(its),
            describes=True,
        )
        return
