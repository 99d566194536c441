"""What a training step itself costs: gradients that are kept too long, the optimizer's states and its temporaries."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from gpumem_magic.causes.model import Scene, partnered, requested
from gpumem_magic.causes.places import quoted
from gpumem_magic.looks.optimizers import FUSED, OPTIMIZERS
from gpumem_magic.owners.model import size_of
from gpumem_magic.recording.model import BACKWARD, FORWARD, OPTIMIZER
from gpumem_magic.report.model import Cause
from gpumem_magic.snapshot.timeline import Allocation
from gpumem_magic.units import counted, human

_FOREACH = re.compile("_multi_tensor_")
_TO_ZERO = re.compile(r"set_to_none\s*=\s*False")
_ZEROED = re.compile(r"\.grad(?:\.data)?\.zero_\(")
# So many backwards show what gradients from before cost.
_AGAIN = 2
# The optimizer with a history, how long that usually is, and what is short.
_WITH_HISTORY, _USUAL_HISTORY, _SHORT_HISTORY = "LBFGS", 100, 10
_HAS_NONE = "with `fused=True` it has none"
_HAVE_FUSED = frozenset({"_multi_tensor_adam", "_multi_tensor_adamw", "_multi_tensor_sgd"})


# How many numbers these keep for each weight as they are by default (torch/optim/adam.py and the others, 2.0 to 2.13).
_STATES = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Adadelta": 2, "RMSprop": 1, "Rprop": 2}

_AMSGRAD = re.compile(r"\bamsgrad\s*=\s*True\b")


def late_zero_grad(scene: Scene) -> Iterator[Cause]:
    """Gradients of one iteration that are there during the next one's forward, and are dropped before its backward.

    Only where they are there at the peak, too (or as the request fails): elsewhere an earlier call would change nothing.
    """
    backwards = [(scene.start_of(span), scene.end_of(span)) for span in scene.spans(BACKWARD)]
    worst = 0
    early: list[Allocation] = []
    forwards = scene.spans(FORWARD)
    starts = sorted(scene.start_of(forward) for forward in forwards)
    for forward in forwards:
        begin, end = scene.start_of(forward), scene.end_of(forward)
        following = next((start for start, _ in backwards if start >= end), None)
        if following is not None and any(end <= start < following for start in starts):
            # Another forward comes before that backward: this one was an evaluation, or a part.
            continue
        if following is None or not any(stop <= begin for _, stop in backwards):
            continue
        late = [
            one
            for one in scene.living_in(begin, "gradients")
            if one.freed is not None
            and end <= one.freed < following
            and one.born < begin
            # (A copy of one is no business of `zero_grad`.)
            and any(start <= one.born < stop for start, stop in backwards)
        ]
        # An input's gradient goes with its input; what zero_grad drops is as large as a parameter.
        if late:
            late = partnered(late, requested, map(requested, scene.living_in(begin, "parameters")))
        # As if they had gone when the forward began.
        early += [replace(one, born=begin) for one in late]
        if begin <= scene.moment and any(scene.moment < (one.freed or 0) for one in late):
            worst = max(worst, size_of(late))
    if not worst:
        return
    then = ""
    if scene.report.error is None:
        # The backward makes as many anew: where the peak lies there, too, little comes back.
        highest, _ = scene.highest_without(early)
        worst = min(worst, scene.report.peak.allocated - highest)
        then = f": the peak would be {human(highest)}"
    name = _optimizer(scene)
    yield Cause(
        "late_zero_grad",
        f"Gradients of the previous iteration ({human(size_of(_at(early, scene.moment)))}) were still allocated during forward: "
        "`zero_grad` was called late.",
        f"Call `{name}.zero_grad()` before forward, or right after `{name}.step()`{then}.",
        worst,
    )


def _at(allocations: list[Allocation], position: int) -> list[Allocation]:
    return [one for one in allocations if one.born <= position < (one.freed or position + 1)]


def missing_zero_grad(scene: Scene) -> Iterator[Cause]:
    """Gradients that stay from one step through the next forward and backward, which adds to them, as nothing clears them."""
    if not scene.never_clears:
        return
    backwards = scene.spans(BACKWARD)
    worst = 0
    times = 0
    for step in scene.spans(OPTIMIZER):
        done = scene.end_of(step)
        following = next((one for one in backwards if scene.start_of(one) >= done), None)
        if step.failed or following is None:
            continue
        begin, end = scene.start_of(following), scene.end_of(following)
        stayed = [one for one in scene.living_in(done, "gradients") if one.freed is None or one.freed >= end]
        new = [one for one in scene.living_in(end, "gradients") if one.born >= begin]
        # Another model's backward leaves these as they are, and its own stay: what adds makes each anew, and drops it.
        if (
            stayed
            and 10 * size_of(new) < size_of(stayed)
            and 2 * size_of(added_to(scene, stayed, begin, end)) >= size_of(stayed)
        ):
            worst = max(worst, size_of(stayed))
            times += 1
    name = _optimizer(scene)
    yield Cause(
        "missing_zero_grad",
        f"Gradients ({human(worst)}) were kept from each step through the next forward and backward, which added "
        f"to them ({counted(times, 'time')}): the cell never calls `zero_grad`.",
        f"Call `{name}.zero_grad()` right after `{name}.step()`: it frees them; without it, gradients add "
        "up over all steps.",
        worst,
    )


def zeroed_gradients(scene: Scene) -> Iterator[Cause]:
    """Gradients that are filled with zeros after a step, and so are there during the next iteration's forward."""
    calls = [one for one in scene.program.calls("zero_grad") if _TO_ZERO.search(one.statement)]
    calls = calls or [one for one in scene.program.calls("zero_") if _ZEROED.search(one.statement)]
    backwards = sorted((scene.start_of(one), scene.end_of(one)) for one in scene.spans(BACKWARD) if not one.failed)
    if not calls or len(backwards) < _AGAIN or scene.report.error is not None:
        return
    first = backwards[0][1]
    there = [one for one in scene.living_in(scene.moment, "gradients") if 0 <= one.born < first]
    if scene.moment <= backwards[1][0] or size_of(there) < scene.part_of_peak(10):
        return
    # In the first iteration they were made anew, as they would be in each; the optimizer's states came after it.
    states = size_of(scene.living_in(scene.moment, "optimizer_state"))
    then = scene.timeline.peak(0, first)[0] + states - size_of(scene.living_in(first, "optimizer_state"))
    # (A step has them beside it in any case.)
    steps = [(scene.start_of(one), scene.end_of(one)) for one in scene.spans(OPTIMIZER)]
    behind = max((scene.timeline.peak(begin, end)[0] for begin, end in steps), default=0)
    saved = scene.report.peak.allocated - max(then, behind)
    if saved < scene.part_of_peak(20):
        return
    call = calls[0]
    instead = (
        "`set_to_none=True`, the default," if _TO_ZERO.search(call.statement) else "`p.grad = None` (`zero_grad()`)"
    )
    yield Cause(
        "zeroed_gradients",
        f"`{call.shown}` ({call.words}) fills gradients with zeros, so {human(size_of(there))} of them are there during the next "
        "forward, and until backward is done.",
        f"{instead} lets go of them: the peak would be about {human(max(then, behind))}, as the first iteration's was"
        f"{' with the states' if states else ''}.",
        saved,
    )


def _optimizer(scene: Scene) -> str:
    """The name of the one that steps, as the program has it; where there are several, or none is known, what they are called."""
    names = {step.label for step in scene.spans(OPTIMIZER) if step.label in scene.holdings.optimizers}
    return names.pop() if len(names) == 1 else "optimizer"


def added_to(scene: Scene, stayed: list[Allocation], begin: int, end: int) -> list[Allocation]:
    """Those for which an interval made, and dropped again, something of the same size."""
    made = (one for one in scene.timeline.allocations if begin <= one.born < end)
    return partnered(stayed, requested, (one.requested for one in made if one.freed is not None and one.freed < end))


def optimizer_states(scene: Scene) -> Iterator[Cause]:
    """The first step brings the optimizer's states, which stay; or it failed, as there was no room for them."""
    if (unfinished := _states_without_room(scene)) is not None:
        yield unfinished
        return
    for step in scene.spans(OPTIMIZER):
        begin, end = scene.start_of(step), scene.end_of(step)
        new = [one for one in scene.living_in(end, "optimizer_state") if begin <= one.born < end]
        if size_of(new) < scene.part_of_peak(10):
            continue
        its = scene.holdings.optimizers.get(step.label, frozenset())
        living = scene.living_in(end, "parameters")
        # Of an optimizer that a name is known of, its own: another model may be there, too.
        ours = [one for one in living if not its or (scene.device, one.address) in its]
        parameters = size_of(ours)
        # What has moved since is not among them.
        all_of_them = not its or len(ours) == len(its)
        # A step of one's own may make its states anew each time.
        instead = (
            one for one in scene.living_in(begin, "optimizer_state") if one.freed is not None and one.freed < end
        )
        if size_of(new) - size_of(instead) < scene.part_of_peak(10) or not parameters:
            continue
        times = round(size_of(new) / parameters)
        near = all_of_them and times >= 1 and _is_near(size_of(new), times * parameters) and _are_alike(new, ours)
        # (Beside copies that are whole for a moment, or parameters that nobody steps, it would be a figure of its own.)
        of_all = _is_near(parameters, size_of(scene.living_in(scene.moment, "parameters")))
        whole = (
            f", {times} x the {human(parameters)} of the parameters{'' if of_all else ' that it steps'}" if near else ""
        )
        yield Cause(
            "optimizer_states",
            f"The first step of {quoted(step.label)} allocated its states, which stay: {human(size_of(new))}{whole}.",
            _fewer_states(scene, times) if near and times > 2 else "",
            size_of(new),
            describes=True,
        )
        return


def _are_alike(states: Sequence[Allocation], parameters: Iterable[Allocation]) -> bool:
    """Whether nearly all states have a parameter's size, in a type as wide, or wider: else they are of something else (an image
    that is optimized, say)."""
    sizes = {one.requested * times for one in parameters for times in (1, 2, 4)}
    return 10 * size_of(one for one in states if one.requested in sizes) >= 9 * size_of(states)


def _fewer_states(scene: Scene, times: int) -> str:
    """What has fewer than so many numbers for each weight, which is more than most have."""
    without = (
        "`amsgrad=True` keeps one of them: without it there are two. " if scene.program.matches_any(_AMSGRAD) else ""
    )
    return f"{without}SGD with momentum keeps one number for each weight in place of {times}."


def _states_without_room(scene: Scene) -> Cause | None:
    """What the first step of an optimizer whose states are known would have taken, where memory ran out in it."""
    steps = scene.spans(OPTIMIZER)
    wanted = scene.report.error is not None and scene.report.error.wanted
    if not wanted or not steps or not steps[-1].failed or sum(one.label == steps[-1].label for one in steps) > 1:
        return None
    kind = next((root.type for root in scene.holdings.roots if root.name == steps[-1].label), steps[-1].label)
    parameters = size_of(scene.living_in(scene.moment, "gradients"))
    if kind not in _STATES or not parameters:
        return None
    there = size_of(scene.living_in(scene.moment, "optimizer_state"))
    numbers, needed = _STATES[kind], _STATES[kind] * parameters
    half = "8-bit states (bitsandbytes) take a quarter of that, and weights in bfloat16 half of all"
    fewer = "; SGD with momentum keeps one number for each weight" if numbers > 1 else ""
    return Cause(
        "optimizer_states",
        f"The first step of {quoted(steps[-1].label)} makes its states, {'two numbers' if numbers > 1 else 'one'} for each "
        f"weight: {human(needed)}, of which {human(there)} were there when memory ran out.",
        f"{half}{fewer}; or train fewer weights (LoRA).",
        needed,
        describes=True,
    )


def optimizer_history(scene: Scene) -> Iterator[Cause]:
    """LBFGS keeps two vectors as long as all parameters for each of its last iterations, many of which are in one step."""
    labels = {root.name for root in scene.holdings.roots if root.type == _WITH_HISTORY} | {_WITH_HISTORY}
    step = next((one for one in scene.spans(OPTIMIZER) if one.label in labels), None)
    kept = scene.living_in(scene.moment, "optimizer_state")
    if step is None or size_of(kept) < scene.part_of_peak(5):
        return
    vector = max(one.requested for one in kept)
    pairs = sum(one.requested == vector for one in kept) // 2
    if pairs <= _SHORT_HISTORY:
        return
    given = re.findall(r"\bhistory_size\s*=\s*(\d+)", scene.typed)
    most = int(given[-1]) if given else _USUAL_HISTORY
    yield Cause(
        "optimizer_history",
        f"{quoted(step.label)} (LBFGS) keeps two vectors as long as all parameters ({human(vector)}) for each of its last "
        f"iterations, up to `history_size` ({most}): {human(size_of(kept))}.",
        f"`history_size={_SHORT_HISTORY}` keeps at most {human(2 * _SHORT_HISTORY * vector)} of these.",
        size_of(kept),
        describes=True,
    )


def optimizer_temporaries(scene: Scene) -> Iterator[Cause]:
    """The peak lies inside an optimizer's step, and a good part of it is what the step works with."""
    steps = scene.spans(OPTIMIZER)
    starts, ends = [scene.start_of(one) for one in steps], [scene.end_of(one) for one in steps]
    place = bisect_left(starts, scene.peak) - 1
    if place < 0 or scene.peak > ends[place]:
        return
    used = [one for one in scene.living_in(scene.peak, "temporaries") if one.born >= starts[place]]
    if size_of(used) < scene.part_of_peak(10):
        return

    def is_a_steps(one: Allocation) -> bool:
        number = bisect_right(starts, one.born) - 1
        return scene.labels[one.index].category == "temporaries" and number >= 0 and one.born < ends[number]

    ways = _without_temporaries(scene, used, steps[place].label)
    remedy, worth = ", and ".join(ways), size_of(used)
    if ways:
        highest, at = scene.highest_without(filter(is_a_steps, scene.timeline.allocations))
        saved = scene.report.peak.allocated - highest
        if 2 * saved < worth:
            worth = saved
            point = scene.tensors.statement_at(at - 1) if scene.tensors is not None else None
            where = "elsewhere" if point is None else f"at line {point.line}"
            where += (
                f" in iteration {'.'.join(map(str, point.iteration))}" if point is not None and point.iteration else ""
            )
            remedy += f", but {human(highest)} are reached {where} all the same"
        elif ways[0] is _HAS_NONE:
            remedy = ", and ".join([f"{_HAS_NONE}: {human(highest)} is the highest then", *ways[1:]])
        remedy = f"{remedy[0].upper()}{remedy[1:]}."
    yield Cause(
        "optimizer_temporaries",
        f"The peak is inside the step of {quoted(steps[place].label)}: its temporaries take {human(size_of(used))}.",
        remedy,
        worth,
        describes=True,
    )


def _without_temporaries(scene: Scene, used: list[Allocation], label: str) -> list[str]:
    """Which of an optimizer's settings are without these. In a file, its functions' names say which it has; a step of the user's
    own has none."""
    one_by_one = "with `foreach=False` it has those of one parameter at a time"
    if scene.recording.file is not None:
        events = scene.recording.logs[scene.device].events
        running = {name for one in used for frame in events[one.born].frames if _FOREACH.match(name := frame.name)}
        if not running:
            return []
        return [_HAS_NONE, one_by_one] if running <= _HAVE_FUSED else [one_by_one]
    # (A step of no known variable's goes by its class.) Of a name that the cell has lost nothing is known.
    kinds = {root.type for root in scene.holdings.roots if root.name == label and root.type} or {
        label.partition(" (")[0]
    }
    ways = [_HAS_NONE] if kinds <= FUSED else []
    if kinds <= OPTIMIZERS and "foreach=False" not in scene.typed:
        ways.append(one_by_one)
    return ways


def _is_near(one: int, other: int) -> bool:
    return abs(one - other) <= 0.02 * other
