"""Models and optimizers from before that a cell has no use for, while others compute in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile

from gpumem_magic.causes.model import Scene
from gpumem_magic.causes.places import MODULE, added, base, quoted, spots, variable_of, within
from gpumem_magic.causes.readings import is_read_again
from gpumem_magic.owners.holders import joined
from gpumem_magic.owners.model import KINDS_OF_A_MODEL, Held, Station, size_of
from gpumem_magic.recording.model import BACKWARD, FORWARD, OPTIMIZER
from gpumem_magic.report.failure import failed_request
from gpumem_magic.report.model import Cause
from gpumem_magic.units import human, listed

# Text of a program that is run by it is not read.
_RUNS_TEXT = frozenset({"exec", "run_line_magic", "run_cell"})
_MANY, _BOTH = 4, 2
# What no module has, by the kinds of `Held`.
_RESULTS = frozenset({"tensor", "graph"})
# So many models in a list are no teacher and student.
_SEVERAL = 3
# Such a part of all of them is not worth a name.
_SMALL = 100


def unused_models(scene: Scene) -> Iterator[Cause]:
    """What was on the device before, and which nothing that the cell names leads to."""
    if not _names_what_it_uses(scene):
        return
    roots = scene.holdings.roots
    ran = {span.label.partition(".")[0] for span in scene.spans(FORWARD, OPTIMIZER)}
    its: dict[int, list[Held]] = {}
    for one in scene.held:
        made = scene.alive.get(one.address)
        # (What was shown as a result is used by no cell.)
        holders = [number for number in one.roots if roots[number].kind != "out"]
        if one.kind not in KINDS_OF_A_MODEL or made is None or made.born >= 0 or not holders:
            continue
        if all(roots[number].kind == "variable" and roots[number].name not in scene.mentioned for number in holders):
            its.setdefault(holders[0], []).append(one)
    least = sum(map(size_of, its.values())) // _SMALL
    # (A parameter that a loop has left in its variable goes where its model goes.)
    its = {number: held for number, held in its.items() if roots[number].name not in ran and size_of(held) > least}
    everything = [one for held in its.values() for one in held]
    if size_of(everything) < scene.part_of_peak(4) or not 0 < len(its) <= _MANY:
        return
    numbers = sorted(its, key=lambda number: -size_of(its[number]))
    models = [number for number in numbers if _is_a_model(its[number], roots[number].name)]
    others = [number for number in numbers if number not in models]
    gone = [one for number in models for one in its[number]] + [
        one for one in scene.freed(others) if not any(number in models for number in one.roots)
    ]
    deleting = [statement for number in others if (statement := roots[number].statement) is not None]
    if len(deleting) < len(others):
        return
    code = [*joined(deleting), *(f"{roots[number].name}.cpu()" for number in models)]
    back = f", and `{roots[models[0]].name}.cuda()` brings the weights back" if models else ""
    states = any(one.kind == "optimizer_state" for number in others for one in its[number])
    lost = " An optimizer's states are lost then." if states else ""
    where = ""
    if others:
        where = f"Where no later cell needs {listed([quoted(roots[number].name) for number in others])}, "
    words = [f"{quoted(roots[number].name)} ({human(size_of(its[number]))})" for number in numbers]
    said = f"does not use {words[0]}, which is" if len(words) == 1 else f"uses none of {listed(words)}, which are"
    if len(words) == _BOTH:
        said = f"uses neither {words[0]} nor {words[1]}, which are"
    yield Cause(
        "unused_models",
        f"This cell {said} on the device from before.",
        f"{where}`{'; '.join(code)}` frees {human(size_of(gone))}{back}.{lost}",
        size_of(everything),
        describes=True,
    )


def _names_what_it_uses(scene: Scene) -> bool:
    """Whether models ran in a cell to its end, and the names that it uses are all in its text. (Of what would have helped a
    request that failed, `shortage` tells.)"""
    known = scene.report.error is None and scene.mentioned and not scene.mentioned & _RUNS_TEXT
    return bool(known and scene.spans(FORWARD, BACKWARD, OPTIMIZER))


def left_results(scene: Scene) -> Iterator[Cause]:
    """What earlier cells computed with a graph, as a loop's last output, and this one has no use for, while models run in it."""
    if not _names_what_it_uses(scene):
        return
    roots = scene.holdings.roots
    # (Data lead to no weights.)
    leading = {number for one in scene.held if one.kind == "parameter" for number in one.roots}
    numbers: dict[int, int] = {}
    for one in scene.held:
        made = scene.alive.get(one.address)
        if made is None or made.born >= 0 or one.kind not in _RESULTS or not leading.issuperset(one.roots):
            continue
        if all(roots[number].kind == "variable" and roots[number].name not in scene.mentioned for number in one.roots):
            for number in one.roots:
                numbers[number] = numbers.get(number, 0) + one.size
    numbers = {number: size for number, size in numbers.items() if size >= scene.part_of_peak(_SMALL)}
    freed = size_of(scene.freed(numbers))
    deleting = [statement for number in numbers if (statement := roots[number].statement) is not None]
    if freed < scene.part_of_peak(4) or not len(deleting) == len(numbers) <= _MANY:
        return
    names = listed([quoted(roots[number].name) for number in numbers])
    is_one = len(numbers) == 1
    yield Cause(
        "left_results",
        f"{names} {'is' if is_one else 'are'} left from an earlier cell, and this one does not use {'it' if is_one else 'them'}: "
        f"{human(freed)}.",
        f"Where no later cell needs {'it' if is_one else 'them'}, `{'; '.join(joined(deleting))}` before it frees that.",
        freed,
        describes=True,
    )


def unused_of_several(scene: Scene) -> Iterator[Cause]:
    """Models from before in a list or dictionary that the cell names, neither run nor trained while another is."""
    steps = scene.spans(FORWARD, BACKWARD, OPTIMIZER)
    if scene.report.error is not None or not scene.mentioned or not any(one.kind == OPTIMIZER for one in steps):
        return
    its: dict[str, dict[str, list[Held]]] = {}
    known = set()
    for one in scene.held:
        model = next((each.place for each in one.trail if MODULE in each.bases), "")
        known.add(model)
        made = scene.alive.get(one.address)
        if one.kind in KINDS_OF_A_MODEL and made is not None and made.born < 0 and model.endswith("]"):
            its.setdefault(model.rpartition("[")[0], {}).setdefault(model, []).append(one)
    ran = {one.label for one in steps if one.kind == FORWARD}
    if not ran <= known:
        # (What ran by a name that leads to no model now may be one of them.)
        return
    for container, models in its.items():
        resting = [
            [one for one in held if (one.device, one.address) not in scene.holdings.optimized]
            for model, held in models.items()
            if model not in ran and all(one.kind in ("parameter", "buffer") for one in held)
        ]
        count, idle = sum(map(bool, resting)), [one for held in resting for one in held]
        if count < _SEVERAL or container.partition("[")[0] not in scene.mentioned:
            continue
        if size_of(idle) < scene.part_of_peak(4):
            continue
        made_at = scene.program.adding(container) if container.isidentifier() else None
        at = f" ({made_at.words}, `{made_at.shown}`)" if made_at is not None else ""
        yield Cause(
            "unused_models",
            f"{quoted(container)}{at} has {count} models on the device that this cell neither runs nor trains: "
            f"{human(size_of(idle))}.",
            "Put there what makes a model, and build the one that is asked for; or keep the others on the host (`.cpu()`).",
            size_of(idle),
            describes=True,
        )
        return


def finished_models(scene: Scene) -> Iterator[Cause]:
    """Models that the cell has run for the last time before the statement at the peak, which works with others."""
    point = scene.tensors.statement_at(scene.moment - 1) if scene.tensors is not None else None
    if scene.report.error is not None or point is None or not scene.program.cells or scene.spans(BACKWARD, OPTIMIZER):
        return
    begin = scene.start_of_row(scene.moment - 1)
    forwards = scene.spans(FORWARD)
    ran = {one.label for one in forwards} - {one.label for one in forwards if scene.end_of(one) > begin}
    its: dict[str, list[Held]] = {}
    for one in scene.held:
        name = one.trail[0].place if one.trail and MODULE in one.trail[0].bases else ""
        # (What others hold, too, stays where it is when this name lets go.)
        alone = all(
            scene.holdings.roots[number].kind != "variable" or scene.holdings.roots[number].name == name
            for number in one.roots
        )
        if one.kind in ("parameter", "buffer") and name in ran and alone and one.address in scene.alive:
            its.setdefault(name, []).append(one)
    for name, held in its.items():
        if size_of(held) < scene.part_of_peak(5) or is_read_again(scene.program.cells[0], name, point.line):
            continue
        highest, _ = scene.highest_without(replace(scene.alive[one.address], born=begin) for one in held)
        if scene.report.peak.allocated - highest < scene.part_of_peak(10):
            continue
        yield Cause(
            "unused_models",
            f"`{name}` has run for the last time before line {point.line}, where the peak is, and its {human(size_of(held))} "
            "are still on the device.",
            f"`{name}.cpu()` before `{point.statement}` (line {point.line}) makes the peak {human(highest)}; `{name}.cuda()` "
            "brings it back.",
            size_of(held),
            describes=True,
        )
        return


def models_in_a_list(scene: Scene) -> Iterator[Cause]:
    """Models of one kind in a list or dictionary of the program's, which are trained one after the other: none while another is.
    (What only answers may do so for each batch: an ensemble. It is told where memory ran out.)"""
    here = [one for one in scene.held if one.kind in KINDS_OF_A_MODEL and one.address in scene.alive]
    for spot in spots(one for one in here if one.kind == "parameter"):
        if spot.container is None or any(MODULE in at.bases for at in _before(spot.held[0], spot.container.node)):
            continue
        place = spot.container.place
        number = spot.held[0].roots[0]
        # (Its optimizers may be in a list of their own, which leads to the weights, too.)
        reach = {each for one in spot.held for each in one.roots}
        everything = [
            one
            for one in here
            if number in one.roots or (one.kind == "optimizer_state" and not reach.isdisjoint(one.roots))
        ]
        of_models = {(within(base(one), place) or "").partition("]")[0] for one in spot.held}
        # (One of them has a name of its own besides, as a loop's variable.)
        by_names = {
            one.roots[0]
            for one in here
            if one.kind == "parameter" and one.roots[0] != number and number in one.roots and _is_whole(one)
        }
        models = len(of_models) + len(by_names)
        steps = [span for span in scene.spans(FORWARD, BACKWARD, OPTIMIZER) if not span.failed]
        # (Models that one backward goes through work together.)
        trained = sum(span.kind == BACKWARD for span in steps)
        graded = {(within(base(one), place) or "").partition("]")[0] for one in here if one.kind == "gradient"}
        needed = len(graded & of_models) if scene.report.error is not None and graded else models
        apart = trained >= needed or (not trained and failed_request(scene.report) is not None)
        if models < _SEVERAL or 2 * size_of(everything) < scene.report.peak.allocated or not apart:
            continue
        states = " with their gradients and states" if any(one.kind == "optimizer_state" for one in everything) else ""
        each = size_of(everything) // models
        made = added(scene, spot) if "." in place else scene.program.adding(spot.root)
        if made is None and (own := variable_of(spot.held[0])) is not None:
            made = scene.program.giving(*own)
        at = f" ({made.words}, `{made.shown}`)" if made is not None else ""
        yield Cause(
            "models_in_a_list",
            f"{quoted(place)}{at} keeps {models} models{states} on the device: {human(size_of(everything))}, {human(each)} each.",
            "Where they work one after the other, one at a time there (`.cpu()` for the others, and for what their optimizers "
            f"keep) takes {human(each)}.",
            size_of(everything) - each,
            describes=True,
        )
        return


def _is_whole(one: Held) -> bool:
    """Whether a variable is the module that has it."""
    return bool(one.trail) and MODULE in one.trail[0].bases


def _before(one: Held, node: int) -> list[Station]:
    """The stations of its trail up to an object."""
    return list(takewhile(lambda station: station.node != node, one.trail))


def _is_a_model(held: list[Held], name: str) -> bool:
    """Whether the variable is a module itself, which `.cpu()` moves with all that is in it."""
    return all(_is_whole(one) and one.trail[0].place == name for one in held)
