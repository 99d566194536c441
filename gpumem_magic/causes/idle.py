"""What nobody needs, or not so often: states of an optimizer that is done, gradients during an evaluation or of inputs, the same
buffer in every layer."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from gpumem_magic.causes.filled import positions_used, with_less_room
from gpumem_magic.causes.model import LEAST, Scene, partnered, requested
from gpumem_magic.causes.places import quoted, spots, told
from gpumem_magic.causes.written import Written
from gpumem_magic.owners.model import Held, size_of
from gpumem_magic.recording.model import BACKWARD, FORWARD, OPTIMIZER
from gpumem_magic.report.model import Cause
from gpumem_magic.snapshot.timeline import Allocation
from gpumem_magic.units import counted, human, listed, shape_words

_OPTIMIZER = "torch.optim.optimizer.Optimizer"
_READS_GRADIENTS = re.compile(r"\.grad\b(?!\s*\()|retain_grad")
# ``self.k[:, t] = key``, ``self.k[:, t].copy_(key)``, ``self.k.index_copy_(2, t, key)``.
_WRITTEN_TO = r"\.{name}(?:\[[^\n=]*\])?(?:\.\w+_\(|(?<=\])\s*[-+*/]?=(?!=))"
_DRAWN = re.compile(r"\brand(?:n|int|perm)?(?:_like)?\(")
# Of a table, one row in so many.
_ROWS_TAKEN = 4
# So many buffers of one name are one for each layer.
_LAYERS = 3


def idle_states(scene: Scene) -> Iterator[Cause]:
    """States of an optimizer that steps no more: another one has gone on with its parameters, or they have left the device."""
    by_optimizer: dict[str, list[Held]] = defaultdict(list)
    for one in scene.held:
        station = next((each for each in one.trail if _OPTIMIZER in each.bases), None)
        made = scene.alive.get(one.address)
        if one.kind == "optimizer_state" and station is not None and made is not None and made.born < scene.moment:
            by_optimizer[station.place].append(one)
    steps = [span for span in scene.spans(OPTIMIZER) if not span.failed]
    # A step goes by the name that the optimizer had then: where one has another now, nobody knows whose it was.
    begun = {one.label: scene.start_of(one) for one in reversed(steps)}
    begun = begun if begun.keys() <= scene.holdings.optimizers.keys() else {}
    for name, states in by_optimizer.items():
        number = scene.holdings.number(name)
        known = scene.holdings.optimizers.get(name)
        if number is None or known is None or size_of(states) < LEAST:
            continue
        last = max((scene.end_of(one) for one in steps if one.label == name), default=0)
        # One that steps in turn with it has begun before.
        after = next(
            (
                label
                for label, start in begun.items()
                if label != name and start >= last and known <= scene.holdings.optimizers.get(label, frozenset())
            ),
            "",
        )
        if not known:
            why = "though the parameters that they are for are not on this device any more"
        elif after:
            why = f"though `{after}` has gone on with the same parameters"
        else:
            continue
        place = scene.program.adding(name)
        at = f" ({place.words})" if place is not None else ""
        freed = size_of(scene.freed([number]))
        remedy = f"`del {name}` frees {human(freed)}" if freed >= LEAST else "Let go of it"
        if last:
            # As if they had gone right after its last step.
            its = (scene.alive[one.address] for one in states)
            highest, _ = scene.highest_without(replace(one, born=max(one.born, last)) for one in its)
            if highest < scene.report.peak.allocated:
                remedy += f"; right after its last step, the peak would be at most {human(highest)}"
        yield Cause(
            "idle_states",
            f"{quoted(name)}{at} keeps its states, {human(size_of(states))}, {why}.",
            f"{remedy}.",
            size_of(states),
        )


def gradients_in_evaluation(scene: Scene) -> Iterator[Cause]:
    """The peak is in a forward without a graph, after a step whose gradients are still there."""
    forward = next(
        (one for one in scene.spans(FORWARD) if scene.start_of(one) < scene.moment <= scene.end_of(one)), None
    )
    if forward is None:
        return
    begin = scene.start_of(forward)
    spans = [one for one in scene.spans(BACKWARD, OPTIMIZER) if scene.end_of(one) <= begin]
    before = max(spans, key=scene.end_of, default=None)
    if (
        before is None
        or before.kind != OPTIMIZER
        or any(one.born >= begin for one in scene.living_in(scene.moment, "activations"))
    ):
        return
    spent = [one for one in scene.living_in(scene.moment, "gradients") if one.born < scene.start_of(before)]
    spent = partnered(spent, requested, map(requested, scene.living_in(scene.moment, "parameters")))
    if size_of(spent) < scene.part_of_peak(10):
        return
    row = next((point for point, start, end in scene.statements if start < scene.moment <= end), None)
    calls = [one for one in scene.program.calls("zero_grad") if re.search(r"set_to_none\s*=\s*False", one.statement)]
    zeros = f": `{calls[0].shown}` ({calls[0].words}) fills them with zeros" if calls else ""
    highest, _ = scene.highest_without(_after_their_step(scene))
    if 2 * (scene.report.peak.allocated - highest) < size_of(spent):
        return
    yield Cause(
        "gradients_in_evaluation",
        f"The gradients of the step before, {human(size_of(spent))}, are still there during the evaluation"
        f"{f' (line {row.line})' if row is not None else ''}, which needs none{zeros}.",
        f"`{before.label}.zero_grad()` before it frees them: the peak would be at most {human(highest)}.",
        size_of(spent),
        describes=True,
    )


def _after_their_step(scene: Scene) -> Iterator[Allocation]:
    """All gradients for the time that they stay after the step that used them: a later evaluation may be as high."""
    steps = sorted((scene.start_of(one), scene.end_of(one)) for one in scene.spans(OPTIMIZER) if not one.failed)
    for one in scene.timeline.allocations:
        number = bisect_right(steps, (one.born, scene.end))
        if scene.labels[one.index].category == "gradients" and number < len(steps):
            done = steps[number][1]
            if one.freed is None or done < one.freed:
                yield replace(one, born=done)


def input_gradients(scene: Scene) -> Iterator[Cause]:
    """Inputs that require gradients, in which every backward leaves one, though the program reads no ``.grad``."""
    calls = scene.program.calls("requires_grad_")
    if not scene.spans(BACKWARD) or not calls or scene.program.matches(_READS_GRADIENTS, calls[0]):
        return
    known = scene.holdings.optimized
    weights = {one.place for one in scene.held if one.kind == "parameter" or (one.device, one.address) in known}
    made = [
        one
        for one in scene.held
        if one.kind == "gradient"
        and one.place.endswith(".grad")
        and one.place.removesuffix(".grad") not in weights
        and (allocation := scene.alive.get(one.address)) is not None
        and allocation.born >= 0
    ]
    if size_of(made) < scene.part_of_peak(10):
        return
    owners = told(spots(made)).replace(".grad`", "`")
    yield Cause(
        "input_gradients",
        f"Each backward leaves a gradient in {owners}, which requires one since `{calls[0].shown}` ({calls[0].words}): "
        f"{human(size_of(made))}, and the program reads none of it.",
        "Give a tensor of its own the gradient, `x.detach().requires_grad_()`, and it goes with that one.",
        size_of(made),
    )


def retained_gradients(scene: Scene) -> Iterator[Cause]:
    """`retain_grad()` of activations: each keeps its gradient for as long as it is there."""
    calls = scene.program.calls("retain_grad")
    weights = {one.place for one in scene.held if one.kind == "parameter"}
    ends = [(scene.start_of(one), scene.end_of(one)) for one in scene.spans(BACKWARD) if not one.failed]
    named = {
        one.index
        for one in scene.living_in(scene.moment, "activation_gradients")
        if scene.tensors is not None
        and (place := scene.tensors.keeper(one, scene.moment)[1]).endswith(".grad")
        and place.removesuffix(".grad") not in weights
    }
    # (Whatever nobody asked to keep is gone when its backward is.)
    everything = [
        one
        for one in scene.timeline.allocations
        if scene.labels[one.index].category == "activation_gradients"
        and (
            one.index in named
            or any(begin <= one.born < end and (one.freed is None or one.freed > end) for begin, end in ends)
        )
    ]
    kept = [one for one in everything if one.born < scene.moment and (one.freed is None or one.freed >= scene.moment)]
    if not calls or size_of(kept) < scene.part_of_peak(10):
        return
    call, owner = calls[0], calls[0].statement.strip().partition(".retain_grad")[0]
    highest, _ = scene.highest_without(everything)
    yield Cause(
        "retained_gradients",
        f"`{call.shown}` ({call.words}) keeps the gradients of {counted(len(kept), 'activation')}: {human(size_of(kept))} at the "
        "peak.",
        f"A hook sees each and keeps none (`{owner if owner.isidentifier() else 'x'}.register_hook(lambda g: "
        f"norms.append(g.norm()))`): the peak would be about {human(highest)}.",
        size_of(kept),
        describes=True,
    )


def long_tables(scene: Scene) -> Iterator[Cause]:
    """Buffers of which the program only takes the first rows (``self.cos[:n]``), and few of them."""
    its: dict[str, tuple[Held, int, Written]] = {}
    for one in scene.held:
        name = one.place.rpartition(".")[2]
        if one.kind != "buffer" or not one.shape or not name.isidentifier() or one.size < scene.part_of_peak(20):
            continue
        reads = [each for each in scene.program.mentioned(name) if "register_buffer" not in each.statement]
        first = re.compile(rf"(?:\w\.|\b){name}\b(?!\s*\[\s*:\s*[\w.]+(?:\[[^\n\]]*\])?\s*\])")
        if not reads or any(first.search(each.statement) for each in reads):
            continue
        taken = [
            shape[0]
            for _, birth in scene.births
            for shape, _ in birth.inputs
            if shape and shape[1:] == one.shape[1:] and shape[0] < one.shape[0]
        ]
        if taken and _ROWS_TAKEN * max(taken) <= one.shape[0]:
            its[one.place] = one, max(taken), reads[0]
    size = size_of(one for one, _, _ in its.values())
    if size < scene.part_of_peak(4):
        return
    (table, rows, place), *_ = its.values()
    least = sum(one.size * rows // one.shape[0] for one, rows, _ in its.values())
    have, they = ("have", "they") if len(its) > 1 else ("has", "it")
    yield Cause(
        "long_tables",
        f"{listed([quoted(one) for one in its])} {have} {table.shape[0]:,} rows, of which the program takes the first ones "
        f"(`{place.shown}`, {place.words}), {rows:,} here: {human(size)}.",
        f"As long as the longest input that there is, {rows:,} positions, {they} would take {human(least)}.",
        size - least,
    )


def alike_buffers(scene: Scene) -> Iterator[Cause]:
    """Buffers of one name and size in many layers."""
    births = scene.recording.logs[scene.device].births
    groups: dict[tuple[str, int], list[Allocation]] = defaultdict(list)
    for one in scene.living_in(scene.moment, "buffers"):
        groups[(scene.labels[one.index].name or "").rpartition(".")[2], one.requested].append(one)
    for (name, _), its in groups.items():
        if len(its) < _LAYERS or not name or size_of(its) < scene.part_of_peak(3):
            continue
        birth = births.get(its[0].born)
        each = f" of {shape_words(birth.shape)} {birth.dtype}" if birth is not None and birth.shape is not None else ""
        registers = re.compile(rf"register_buffer\(\s*['\"]{re.escape(name)}['\"]")
        place = next((one for one in scene.program.calls("register_buffer") if registers.search(one.statement)), None)
        if place is not None and _DRAWN.search(place.statement):
            # (No two of them are alike.)
            continue
        at = f" ({place.words}, `{place.shown}`)" if place is not None else ""
        remedy = (
            f"Where they are alike, give all layers one and the same tensor ({human(its[0].size)}), or make it in `forward` for "
            "the length at hand."
        )
        if place is not None and scene.program.matches(re.compile(_WRITTEN_TO.format(name=re.escape(name))), place):
            remedy = "The program writes to it, so each layer needs its own: half as long, they would take half."
            addresses = {one.address for one in its}
            filled = positions_used(scene, (one for one in scene.held if one.address in addresses))
            if filled is not None:
                room, used = filled
                remedy = (
                    f"The program writes to it, so each layer needs its own: {used:,} of {room:,} positions were written to. "
                    + with_less_room(size_of(its), filled, "they")
                )
        yield Cause(
            "alike_buffers",
            f"{len(its)} layers have a buffer `{name}`{each}{at}: {human(size_of(its))}.",
            remedy,
            size_of(its) - its[0].size,
            describes=True,
        )
        return
