"""The same weights twice: a checkpoint that is still held, one that was loaded to the device, a model that was built again."""

from __future__ import annotations

import ast
import re
import textwrap
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace

from gpumem_magic.attribution.owners import lives_at
from gpumem_magic.causes.model import LEAST, Scene, partnered, requested
from gpumem_magic.causes.places import emptied_by, in_common, quoted, spots, together
from gpumem_magic.causes.written import Written, names_given, statements_in
from gpumem_magic.owners.holders import joined
from gpumem_magic.owners.model import KINDS_OF_A_MODEL, Held, Root, size_of
from gpumem_magic.recording.model import FORWARD, Span
from gpumem_magic.report.model import LABELS, OF_A_MODEL, Cause
from gpumem_magic.snapshot.timeline import Allocation
from gpumem_magic.units import human, listed

# The names in front of a call of something that loads, each time that one stands there.
_LOADED = re.compile(r"\b(\w+)\s*=\s*(?=[^\n]*\bload\w*\s*\()")
_WHOLE = frozenset({"torch.nn.modules.module.Module", "torch.optim.optimizer.Optimizer"})
_AVERAGE = "torch.optim.swa_utils.AveragedModel"
_AVERAGE_ELSEWHERE = (
    'It is the average of the weights. With `AveragedModel(model, device="cpu")` it takes nothing here, and each update brings '
    "the weights there: an update every few steps makes that cheap."
)
_PARTS = frozenset({"dict", "OrderedDict", "list", "tuple", "Tensor"})
_COPIED = {"parameters": "the weights", "optimizer_state": "the optimizer's states"}
_LOAD = re.compile(r"\btorch\.load\s*\((?P<arguments>[^\n]*)")


def held_checkpoint(scene: Scene) -> Iterator[Cause]:
    """A variable, or an object's attribute, that something was loaded into, and that still holds the same weights as a
    model's, by shape and type."""
    loaded = frozenset(_LOADED.findall(scene.typed))
    weights = [_shape(one) for one in scene.held if one.kind == "parameter"]
    for place, names, gone in _holding_loaded(scene, loaded):
        # (What the program copied on the device was not loaded.)
        copies = [
            one
            for one in gone
            if one.kind == "tensor"
            and one.device == scene.device
            and ((made := scene.alive.get(one.address)) is None or made.index not in scene.sources)
        ]
        same = partnered(copies, _shape, weights)
        if size_of(same) < LEAST or 2 * size_of(same) < size_of(copies):
            continue
        others = f" ({listed([f'`{name}`' for name in names[1:]])}, too)" if names[1:] else ""
        root, _, attribute = place.partition(".")
        let_go = f"del {', '.join(names)}" if names else f"{place} = None"
        yield Cause(
            "held_checkpoint",
            f"`{place}`{_at(scene.program.adding(root, attribute.rpartition('.')[2]))} still holds a checkpoint that was "
            f"loaded to the device{others}, although the model already has its weights: {human(size_of(copies))}.",
            f'`{let_go}` frees {human(size_of(copies))}; better, load it to the host with `map_location="cpu"`.',
            size_of(copies),
        )
        return


def _holding_loaded(scene: Scene, loaded: frozenset[str]) -> Iterator[tuple[str, list[str], list[Held]]]:
    """Of each variable of these names, and each attribute, the place, the variables that have to let go together, and what they
    would free."""
    roots = scene.holdings.roots
    for number, root in enumerate(roots):
        if root.kind == "variable" and root.name in loaded:
            numbers = _names_of(scene, number)
            yield root.name, [roots[each].name for each in numbers], scene.freed(numbers)
    stations = {
        station.node: station.place
        for one in scene.held
        if one.kind == "tensor"
        for station in one.trail
        if "." in station.place and station.place.rpartition(".")[2] in loaded
    }
    for node, place in stations.items():
        yield place, [], scene.holdings.freed_by_replacing([node])


def _names_of(scene: Scene, number: int) -> list[int]:
    """A variable, and those that hold parts of the same: `state` of ``state = checkpoint["model"]``."""
    roots = scene.holdings.roots
    shared = {each for one in scene.holdings.reached(number) if one.kind == "tensor" for each in one.roots}
    return [number, *sorted(one for one in shared - {number} if roots[one].type in _PARTS)]


def loaded_to_device(scene: Scene) -> Iterator[Cause]:
    """`torch.load` without `map_location` that put tensors where they were saved from: on the device."""
    total, lines = 0, []
    for point, begin, end in scene.statements:
        if not _LOAD.search(point.statement) or "map_location" in point.statement:
            continue
        new = [one for one in scene.timeline.live_at(end) if one.born >= begin]
        if size_of(new) >= LEAST:
            total += size_of(new)
            lines.append(point.line)
    if total:
        yield Cause(
            "map_location_missing",
            f"`torch.load` at line {lines[0]} put {human(total)} on the device, because the tensors were saved from there.",
            'Pass `map_location="cpu"`: `load_state_dict` copies the weights to the model\'s device.',
            total,
        )


def loaded_beside(scene: Scene) -> Iterator[Cause]:
    """What a `torch.load` read to the device is there beside the model's weights, until it has been copied into them."""
    if scene.tensors is None:
        return
    live = scene.timeline.live_at(scene.moment)
    weights = [requested(one) for one in live if _is_weight(scene, one)]
    read: dict[tuple[str, str], list[Allocation]] = {}
    for one in live:
        facts = scene.tensors.facts(one)
        # What is held still has a name of its own.
        if (one.freed is not None or scene.report.error is not None) and _LOAD.match(facts.expression):
            # (A function of an earlier cell has a place of its own.)
            place = f"line {facts.line}{f': {facts.inner}' if facts.inner else ''}"
            read.setdefault((place, facts.expression), []).append(one)
    for (place, expression), copies in read.items():
        same = partnered(copies, requested, weights)
        if size_of(same) >= max(LEAST, size_of(copies) // 2):
            yield Cause(
                "loaded_beside",
                f"`{_short(expression)}` ({place}) puts {human(size_of(copies))} of weights on the device beside those of the "
                "model, until they have been copied into it.",
                'Load them to the host with `map_location="cpu"`: `load_state_dict` copies each to where the model\'s is.',
                size_of(copies),
            )
            return


def built_again(scene: Scene) -> Iterator[Cause]:
    """A model built while the one from an earlier run was still there."""
    parameters = [one for one in scene.timeline.allocations if _is_weight(scene, one)]
    parameters.sort(key=lambda one: one.born)
    births = [one.born for one in parameters]
    for point, begin, end in scene.statements:
        first, last = bisect_left(births, begin), bisect_left(births, end)
        new = [one for one in parameters[first:last] if one.freed is None or one.freed >= end]
        new = [one for one in new if not _goes_on(scene, one, scene.end)]
        if size_of(new) < LEAST:
            continue
        old = [one for one in parameters[:first] if one.freed is None or one.freed >= begin]
        twins = partnered(old, requested, map(requested, new))
        both = [one for one in twins if one.freed is None or one.freed >= max(fresh.born for fresh in new)]
        if size_of(both) < 0.9 * size_of(new):
            continue
        taken = size_of(both)
        gone = [one.freed for one in both if one.freed is not None]
        if len(gone) == len(both):
            if _works_on_a_model(scene, point.statement):
                continue
            if point.loops and max(one.born for one in both) >= scene.points[0][2]:
                # A loop that builds one after the other says so itself; what is left over is a cell that was run again.
                continue
            later = next((row.statement for row, start, stop in scene.points if start <= max(gone) < stop), "")
            until = f", until `{_short(later)}`" if later and later != point.statement else ""
            whole = _gone_with(scene, begin, max(one.born for one in new), max(gone))
            taken = max(taken, scene.report.peak.allocated - scene.highest_without(whole)[0])
            beside = " (its gradients and states among it)" if any(not _is_weight(scene, one) for one in whole) else ""
            text = (
                f"`{_short(point.statement)}` built a model while the previous one was still on the device, which "
                f"took {human(taken)} more{beside}{until}."
            )
            given = names_given(point.statement)
            optimizer = " (and its optimizer)" if len(given) == 1 else ""
            remedy = f"`del {', '.join(given)}`{optimizer} before building it again." if given else ""
        elif keepers := _keepers(scene, both):
            names = listed([f"`{one.name}`" for one in keepers])
            hold = "holds" if len(keepers) == 1 else "hold"
            freed = size_of(scene.freed(scene.holdings.roots.index(one) for one in keepers))
            beside = f" with their gradients and states, {human(freed)} in all" if freed > taken else ""
            text = f"The previous model is still on the device ({human(taken)}): {names} {hold} its parameters{beside}."
            code = joined(one.statement for one in keepers if one.statement is not None)
            every = all(one.statement is not None for one in keepers)
            remedy = f"`{'; '.join(code)}` before building it again." if every else ""
            taken = max(freed, taken)
        elif (emptied := _kept_beside(scene, both, new)) is not None:
            owner, method, freed = emptied
            text = f"The previous model is still on the device: `{owner}` keeps it, {human(freed)} with its gradients and states."
            remedy = f"`{method}()` empties it: call it before building the model again."
            taken = max(freed, taken)
        else:
            continue
        yield Cause("model_built_again", text, remedy, taken)
        return


def _gone_with(scene: Scene, begin: int, built: int, gone: int) -> list[Allocation]:
    """What of models was there before a position, and went between two others, up to the end of the row of the last, as if it had
    gone at the first: weights, their gradients and states."""
    over = next((stop for _, start, stop in scene.points if start <= gone < stop), gone + 1)
    its = (
        one
        for one in scene.timeline.allocations
        if one.born < begin
        and one.freed is not None
        and built < one.freed < over
        and scene.labels[one.index].category in OF_A_MODEL
    )
    return [replace(one, born=begin - 1) for one in its]


def built_beside(scene: Scene) -> Iterator[Cause]:
    """Each turn of a loop builds a model before it lets go of the last turn's, which makes the peak what it is."""
    born_last = max((one.born for one in scene.timeline.allocations if _is_weight(scene, one)), default=-1)
    for turns in scene.loops:
        if born_last < turns[0].end:
            continue
        early: list[Allocation] = []
        largest: list[Allocation] = []
        born = 0
        for turn in turns[1:]:
            new = [
                one
                for one in scene.living_in(turn.end, "parameters")
                if turn.start <= one.born and not _goes_on(scene, one, turns[-1].end)
            ]
            if not new:
                continue
            old = [
                one
                for one in scene.living_in(new[-1].born, *OF_A_MODEL)
                if turns[0].start <= one.born < turn.start and one.freed is not None and one.freed < turn.end
            ]
            if any(_is_weight(scene, one) for one in old):
                # As if they had gone when the turn before ended.
                early += [replace(one, born=turn.start - 1) for one in old]
                largest = max(largest, old, key=size_of)
                born = new[0].born
        if size_of(largest) < LEAST:
            continue
        highest, _ = scene.highest_without(early)
        saved = scene.report.peak.allocated - highest
        if saved < scene.part_of_peak(20):
            continue
        point = scene.tensors.statement_at(born) if scene.tensors is not None else None
        line = f" (line {point.line}, `{_short(point.statement)}`)" if point is not None else ""
        kinds = {scene.labels[one.index].category for one in largest}
        its = [LABELS[name] for name in OF_A_MODEL[1:] if name in kinds]
        code = _letting_go(scene, born)
        way = f"{code or 'Let go of it and of its optimizer'} at the end of each turn"
        makes, beside = "builds a model", "the one"
        if not code and all(one.index in scene.sources for one in largest if _is_weight(scene, one)):
            # No module has them, nor an optimizer: somebody keeps the best so far.
            makes, beside = "copies the weights", "the copy"
            way = "Copy them to the host (`.cpu()`)"
            made = [
                one for one in scene.timeline.allocations if one.index in scene.sources and one.born >= turns[0].start
            ]
            highest, _ = scene.highest_without(
                one for one in made if scene.labels[one.index].category in OF_A_MODEL and _is_beside(scene, one)
            )
        yield Cause(
            "built_beside",
            f"Each turn of the loop {makes}{line} while {beside} of the turn before is still on the device: "
            f"{human(size_of(largest))}{f' with its {listed(its)}' if its else ''}.",
            f"{way}: the peak would be {human(highest)}, not {human(scene.report.peak.allocated)}.",
            saved,
            describes=True,
        )
        return


def _is_weight(scene: Scene, one: Allocation) -> bool:
    return scene.labels[one.index].category == "parameters"


def _goes_on(scene: Scene, one: Allocation, end: int) -> bool:
    """Whether it is the copy of a weight that is gone by an event: ``p.data = p.data.clone()`` makes no other model."""
    source = scene.sources.get(one.index)
    gone = None if source is None else scene.timeline.allocations[source]
    return gone is not None and _is_weight(scene, gone) and gone.freed is not None and gone.freed <= end


def _letting_go(scene: Scene, born: int) -> str:
    """What to type so that a model that was made from an event on, and its optimizer, are gone, by their places at the end; else
    ""."""
    its = [
        one
        for one in scene.held
        if one.kind in ("parameter", "optimizer_state")
        and (made := scene.alive.get(one.address)) is not None
        and made.born >= born
    ]
    found = (next((each for each in one.trail if _WHOLE.intersection(each.bases)), None) for one in its)
    wholes = {whole.place for whole in found if whole is not None}
    # All who reach it have to let go: a pipeline that was given the model, too.
    roots = {scene.holdings.roots[number] for one in its for number in one.roots}
    owners = {place.partition(".")[0] for place in wholes}
    reached = {root.name for root in roots if root.kind == "variable" and _is_deleted(root)} - owners
    emptied = {root.name: root.statement for root in roots if root.statement and not _is_deleted(root)}
    names = sorted(place for place in (wholes | reached) - emptied.keys() if place.isidentifier())
    attributes = sorted(place for place in wholes if all(map(str.isidentifier, place.split("."))) and "." in place)
    code = [f"del {', '.join(names)}"] * bool(names) + [f"{' = '.join([*attributes, 'None'])}"] * bool(attributes)
    code += sorted(emptied.values())
    return f"`{'; '.join(code)}`" if code else ""


def _is_deleted(root: Root) -> bool:
    """Whether deleting it is what lets go of what it holds: a cached function is emptied, and stays."""
    return root.statement is None or root.statement.startswith("del ")


def left_over(scene: Scene) -> Iterator[Cause]:
    """At the peak, weights like the trained ones that an earlier turn of a loop made, to validate with them, say."""
    now = scene.turn_of(scene.moment - 1)
    if now is None or scene.tensors is None:
        return
    living = scene.living_in(scene.moment, "parameters")
    older = [
        one
        for one in living
        if one.born >= 0
        and (turn := scene.turn_of(one.born)) is not None
        and turn[0][0] == now[0][0]
        and turn[1][0] < now[1][0]
    ]
    # A loop that builds one model after the other has no other like them.
    others = (one.requested for one in living if one.born < 0 or scene.turn_of(one.born) is None)
    copies = partnered(older, requested, others)
    if size_of(copies) < scene.part_of_peak(8):
        return
    facts = scene.tensors.facts(copies[0])
    # The last that the line made may be another one than that at the peak: their names are the same.
    last = [
        one
        for one in scene.held
        if one.kind == "parameter"
        and (one.device, one.address) not in scene.holdings.optimized
        and one.address in scene.alive
        and scene.tensors.facts(scene.alive[one.address]).line == facts.line
    ]
    stays = all(one.freed is None for one in copies)
    if stays and any(_is_in_use(scene, one, now) for one in last):
        return
    roots = {scene.holdings.roots[number] for one in last for number in one.roots}
    names = sorted(root.name for root in roots if root.kind == "variable" and root.name.isidentifier())
    way = f"`del {', '.join(names)}` once it has done its work" if names else "Let go of it once it has done its work"
    yield Cause(
        "left_over_copy",
        f"A second copy of the weights, made in an earlier iteration (line {facts.line}, `{_short(facts.statement)}`), is still "
        f"there at the peak: {human(size_of(copies))}.",
        f"{way}, or keep it on the host (`.cpu()`).",
        size_of(copies),
        describes=True,
    )


def _is_in_use(scene: Scene, copy: Held, now: tuple[tuple[int, ...], tuple[int, ...]]) -> bool:
    """Whether a copy has done no work that is over: it follows the weights, or runs in the turn of now, too."""
    if scene.rewritten.get((copy.device, copy.address)):
        return True
    turns = (scene.turn_of(scene.start_of(one)) for one in _forwards_of(scene, copy))
    return any(turn is not None and turn[0][0] == now[0][0] and turn[1][0] >= now[1][0] for turn in turns)


def _in_common(places: Sequence[str], root: str) -> str:
    """The attribute in which all of them are, as ``trainer.snapshot``; the root where there is no such."""
    # (Of a dictionary's key or a list's number, what it is in; of an attribute, the object.)
    owners = [
        before.split(".") if key else before.split(".")[:-1]
        for before, key, _ in (one.partition("[") for one in places)
    ]
    return ".".join(in_common(owners)) or root


def second_copy(scene: Scene) -> Iterator[Cause]:
    """A copy of a model's weights, or of an optimizer's states, that the cell made and a variable keeps beside them."""
    tensors = scene.tensors
    if scene.report.error is not None or tensors is None:
        return
    copies: dict[tuple[str, str], list[Held]] = {}
    for one in scene.held:
        made = scene.alive.get(one.address)
        root = scene.holdings.roots[one.roots[0]]
        learns = (one.device, one.address) in scene.holdings.optimized
        if one.kind not in ("tensor", "parameter") or learns or root.kind != "variable" or made is None:
            continue
        category = scene.labels[made.index].category
        if made.born < scene.moment and category in _COPIED and (one.goes_through(_AVERAGE) or _is_beside(scene, made)):
            copies.setdefault((_COPIED[category], root.name), []).append(one)
    for (whose, _), its in sorted(copies.items(), key=lambda pair: -size_of(pair[1])):
        if size_of(its) < scene.part_of_peak(8):
            return
        spot, *others = together(spots(its))
        # (The first of many keys is no place for all.)
        place = _in_common([one.place for one in its], spot.root) if others or "[" in spot.place else spot.place
        largest = max(its, key=lambda one: one.size)
        facts = tensors.facts(scene.alive[largest.address])
        # (What an earlier cell made has no line here.)
        made_by = scene.program.adding(spot.root)
        at = f" (line {facts.line}, `{_short(facts.statement)}`)" if facts.line else ""
        at = f" ({made_by.words}, `{made_by.shown}`)" if not at and made_by is not None else at
        yield Cause(
            "second_copy",
            f"{quoted(place)} keeps a second copy of {whose} on the device{at}: {human(size_of(its))}.",
            _AVERAGE_ELSEWHERE if largest.goes_through(_AVERAGE) else _instead(scene, place, largest),
            size_of(its),
            describes=True,
        )
        return


def _is_beside(scene: Scene, made: Allocation) -> bool:
    """Whether what it was copied from, or what that was copied from, is there at the moment that the report is about, and stays
    (``model.half()`` lets go of each weight)."""
    source = scene.sources.get(made.index)
    while source is not None:
        copied = scene.timeline.allocations[source]
        if copied.freed is None and lives_at(copied, scene.moment):
            return True
        source = scene.sources.get(source)
    return False


def _instead(scene: Scene, place: str, copy: Held) -> str:
    """What helps against a second copy: not the host, where a model is to run."""
    turns = len(scene.iterations)
    follows = scene.rewritten.get((copy.device, copy.address), 0) >= max(2, turns // 2)
    if copy.kind == "parameter" and _forwards_of(scene, copy):
        if follows or copy.dtype != "float32":
            return ""
        # (A list of models has no `bfloat16`.)
        is_one = any(station.place == place and _WHOLE.intersection(station.bases) for station in copy.trail)
        code = f"`{place}.bfloat16()`" if is_one else "`.bfloat16()` of each"
        return f"It runs, too. In bfloat16 ({code}, and what it is given) it would take half of that."
    if follows:
        return (
            "It follows the weights. On the host (`.cpu()`) it would take nothing here, but each update would bring the weights "
            "there: an update every few steps makes that cheap."
        )
    return "Where that room is wanted, copy them to the host (`.cpu()`), or to a file (`torch.save`)."


def _forwards_of(scene: Scene, copy: Held) -> list[Span]:
    """The forwards of the model that has a copy of the weights: under its variable's name, or as the second of its class."""
    stations = [station for station in copy.trail if _WHOLE.intersection(station.bases)]
    names = {station.place for station in stations} | {f"{station.type} (2)" for station in stations}
    return [one for one in scene.spans(FORWARD) if one.label in names]


def _at(place: Written | None) -> str:
    return "" if place is None else f" ({place.words})"


def _works_on_a_model(scene: Scene, statement: str) -> bool:
    """Whether a statement gives new weights to a model that stays (pruning it, say): it names one and assigns nothing."""
    body = statements_in(textwrap.dedent(statement))
    return bool(body) and all(
        isinstance(one, ast.Expr)
        and any(isinstance(node, ast.Name) and node.id in scene.modules for node in ast.walk(one))
        for one in body
    )


def _keepers(scene: Scene, allocations: list[Allocation]) -> list[Root]:
    """Who keeps the old weights at the end, where it is no model: an optimizer, and what has it, such as a scheduler."""
    addresses = {one.address for one in allocations if one.freed is None}
    held = [one for one in scene.held if one.address in addresses]
    if not held or len(held) < len(addresses):
        return []
    # Two models that are meant to be there (a teacher, a target network) each have a variable of their own.
    if not all(".param_groups" in one.place for one in held):
        return []
    everyone = set().union(*(one.roots for one in held))
    common = set.intersection(*(set(one.roots) for one in held))
    return [scene.holdings.roots[number] for number in sorted(everyone)] if common else []


def _kept_beside(scene: Scene, old: Sequence[Allocation], new: Sequence[Allocation]) -> tuple[str, str, int] | None:
    """An object in whose list the old weights are beside the new ones (`Accelerator`), its method that empties that, and what it
    keeps of the former; None where the new ones have no other name."""
    before, now = ({one.address for one in each if one.freed is None} for each in (old, new))
    former = [one for one in scene.held if one.address in before]
    fresh = [one for one in scene.held if one.address in now]
    if not former or len(former) < len(before) or len(set().union(*(one.roots for one in former))) > 1:
        return None
    (holder,) = alone = former[0].roots
    if not all(holder in one.roots and len(one.roots) > 1 for one in fresh):
        return None
    method, first = emptied_by(scene, former, former[0].place), min(one.born for one in new)
    everything = [
        one
        for one in scene.held
        if one.roots == alone
        and one.kind in KINDS_OF_A_MODEL
        and (made := scene.alive.get(one.address)) is not None
        and made.born < first
    ]
    return (method.rpartition(".")[0], method, size_of(everything)) if method else None


def _shape(one: Held) -> tuple[str, tuple[int, ...]]:
    return one.dtype, one.shape


def _short(statement: str) -> str:
    line = statement.strip().partition("\n")[0]
    return line if len(line) <= 60 else f"{line[:59]}…"
