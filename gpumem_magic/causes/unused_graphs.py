"""Graphs that go away unused: an evaluation that keeps nothing of them, and still has every layer's results while it runs."""

from __future__ import annotations

import ast
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from gpumem_magic.causes.alike import made_at
from gpumem_magic.causes.model import Scene
from gpumem_magic.causes.statements import last_name
from gpumem_magic.causes.without_backward import graph_without_backward, may_train, without_a_graph
from gpumem_magic.causes.written import Written, name_given
from gpumem_magic.devices.base import CodePlace
from gpumem_magic.looks.parsing import parsed
from gpumem_magic.owners.model import size_of
from gpumem_magic.recording.model import BACKWARD, FORWARD, Checkpoint
from gpumem_magic.report.model import Cause
from gpumem_magic.snapshot.timeline import Allocation
from gpumem_magic.units import human

# What a layer reads and what it makes live without a graph, too.
_IN_WORK = 2
# `torch.jit.trace`.
_TRACING = "trace"
# Losses of an input and a target of the same kind.
_COMPARING = ("mse_loss", "smooth_l1_loss", "huber_loss", "l1_loss", "kl_div")
# What a target keeps is worth a word from one part in so many of the peak on.
_TARGETS = 6
# (A module whose forward goes backward itself makes all of these on its way.)
_OF_A_FORWARD = frozenset({"activations", "temporaries"})
# What so many tensors of one call outlive the backward without being saved for it is no variable's.
_LAYERS = 3
# So many of the largest say where.
_LARGEST = 8


def missing_no_grad(scene: Scene) -> Iterator[Cause]:
    """Forwards that save for a backward that never comes: something keeps their graphs, or they fill the peak and go."""
    kept = graph_without_backward(scene)
    if kept is not None:
        yield kept
        return
    forwards = scene.spans(FORWARD)
    # (Where nothing is trained or evaluated, a cell may just try a forward, or a few, as long as there is room.)
    many = bool(forwards) and scene.report.error is not None and not may_train(scene, forwards)
    if (scene.spans(BACKWARD) or scene.evaluating or many) and not _was_to_go_backward(scene):
        yield from _at_the_peak(scene)


def passed_over(scene: Scene) -> Iterator[Cause]:
    """What runs with a graph beside what is trained, and is only read: no backward goes through it, and what it saved goes after
    each, with the function's last variable of it."""
    if scene.tensors is None or scene.report.error is not None or not scene.saved:
        return
    backwards = sorted((scene.start_of(one), scene.end_of(one)) for one in scene.spans(BACKWARD))
    births, saved = scene.recording.logs[scene.device].births, {one.address for one in scene.saved}
    passed = [one for one in _past_backwards(scene, backwards) if (birth := births.get(one.born)) and birth.place]
    first: Counter[CodePlace | None] = Counter(
        births[one.born].place
        for one in passed
        if one.born < scene.saved_at < (one.freed or 0) and one.address not in saved
    )
    for place, count in first.items():
        if count < _LAYERS:
            continue
        all_of_it = [one for one in passed if births[one.born].place == place]
        here = [one for one in all_of_it if one.born < scene.moment <= (one.freed or 0)]
        if size_of(here) < scene.part_of_peak(10):
            continue
        highest, _ = scene.highest_without(all_of_it)
        if 2 * (scene.report.peak.allocated - highest) < size_of(here):
            continue
        yield Cause(
            "missing_no_grad",
            f"{made_at(scene, here[-1])} saves {human(size_of(here))} for a backward, and none goes through it: only its numbers "
            "are used.",
            f"Run it inside `with torch.no_grad():`: the peak would be about {human(highest)}.",
            size_of(here),
        )
        return


def _past_backwards(scene: Scene, backwards: Sequence[tuple[int, int]]) -> Iterator[Allocation]:
    """What a forward made that lives through a backward, and goes in none."""
    for one in scene.timeline.allocations:
        if one.freed is not None and scene.labels[one.index].category in _OF_A_FORWARD:
            number = bisect_right(backwards, (one.freed, scene.end)) - 1
            if number >= 0 and one.born < backwards[number][0] and backwards[number][1] < one.freed:
                yield one


def _was_to_go_backward(scene: Scene) -> bool:
    """Whether it failed on the way to a backward, which would have gone through what went with the failure."""
    return scene.report.error is not None and (scene.left.called_back or scene.program.goes_on_backward(scene.left.way))


def _at_the_peak(scene: Scene) -> Iterator[Cause]:
    unused = [one for its in _saved_in_vain(scene) for one in its[:-_IN_WORK]]
    here = [one for one in unused if one.born < scene.moment and (one.freed is None or one.freed >= scene.moment)]
    if size_of(here) < scene.part_of_peak(10):
        return
    point = scene.tensors.statement_at(here[-1].born) if scene.tensors is not None else None
    highest, _ = scene.highest_without(unused)
    # (Tracing runs the model again and again, and what runs inside the tracer is no module's forward.)
    traced = point is not None and any(
        one.line == point.line and not one.where for one in scene.program.calls(_TRACING)
    )
    if not traced and 2 * (scene.report.peak.allocated - highest) < size_of(here):
        return
    places = {made_at(scene, one) for one in sorted(here, key=lambda one: -one.size)[:_LARGEST]}
    # Where these are of several lines of a model's own, it goes by the statement that called it.
    made = places.pop()
    if places and point is not None:
        called = Written("", point.line, point.statement)
        made = f"`{called.shown}` ({called.words})"
    remedy = "Run it inside `with torch.no_grad():`."
    if point is not None and _goes_backward_within(scene, point):
        remedy = "Run the part of it that no backward follows inside `with torch.no_grad():`."
    elif _goes_backward_elsewhere(scene, here):
        remedy = "Choose inside `with torch.no_grad():`, and run what goes backward once more with its graph."
    elif traced and point is not None and "check_trace" not in point.statement:
        remedy = f"{remedy[:-1]} and with `check_trace=False`: the check runs it again, which takes memory, too."
    yield Cause(
        "missing_no_grad",
        f"{made} saves {human(size_of(here))} for a backward that never comes: autograd is on there.",
        without_a_graph(scene, remedy, point.line if point is not None else 0),
        size_of(here),
    )


def target_graphs(scene: Scene) -> Iterator[Cause]:
    """`F.mse_loss(q, reward + net(following).max(1).values)`: what a loss compares with has a graph of its own."""
    backward = next((one for one in scene.spans(BACKWARD) if scene.end_of(one) >= scene.moment), None)
    if backward is None or backward.failed or scene.tensors is None:
        return
    begin, end = scene.start_of(backward), scene.end_of(backward)
    living = [
        one
        for one in scene.living_in(min(begin, scene.moment), "activations")
        if one.freed is not None and begin <= one.freed <= end
    ]
    written: dict[Written, list[Allocation]] = defaultdict(list)
    for one in living:
        row, birth = scene.tensors.statement_at(one.born), scene.tensors.birth_of(one)
        if row is not None:
            written[Written("", row.line, row.statement)].append(one)
        # (In a function of the program's own no rows tell which line made what.)
        if birth is not None and birth.place is not None and (inside := _inside(scene, birth.place)) is not None:
            written[inside].append(one)
    calls = [(called, one) for called in _COMPARING for one in scene.program.calls(called)]
    for line, its in written.items():
        name = line.shown.partition(" = ")[0].strip()
        call = next(
            (
                one
                for called, one in calls
                if name in _only_compared_with(one.statement, called) and _are_together(scene, line, one)
            ),
            None,
        )
        if call is not None and size_of(its) >= scene.part_of_peak(_TARGETS):
            yield Cause(
                "target_graphs",
                f"`{line.shown}` ({line.words}) has a graph of its own, {human(size_of(its))} kept for backward, though "
                f"`{call.shown}` ({call.words}) only compares with it.",
                f"Unless something is to be learned through `{name}`, compute it inside `with torch.no_grad():`.",
                size_of(its),
            )
            return


def _inside(scene: Scene, place: CodePlace) -> Written | None:
    """The line of a function of the program's, where it gives a name its value."""
    text = scene.program.text_of(place.own_file, scene.recording.own_file)
    if text is None or not name_given(place.text) or text.loops_around(place.own_line - text.ahead)[0] is None:
        return None
    return Written(text.where, place.own_line, place.text)


def _are_together(scene: Scene, line: Written, call: Written) -> bool:
    """Whether both are in the same function, or outside of all, of the same text."""
    text = next((one for one in scene.program.texts if one.where == line.where), None)
    functions = [text.loops_around(one.line - text.ahead)[0] for one in (line, call)] if text is not None else []
    return line.where == call.where and functions[:1] == functions[1:]


def _only_compared_with(statement: str, called: str) -> set[str]:
    """The names in a loss' second argument, its target, that are not in its first."""
    for node in ast.walk(parsed(statement.strip())):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == called:
            given = [*node.args, *(one.value for one in node.keywords if one.arg == "target")][:2]
            # (Of what is detached the loss compares with the numbers alone, and the graph is for something else.)
            names = [
                {each.id for each in ast.walk(one) if isinstance(each, ast.Name)} if not _is_detached(one) else set()
                for one in given
            ]
            return names[1] - names[0] if len(names) > 1 else set()
    return set()


def _is_detached(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and last_name(node.func) == "detach"


def _goes_backward_elsewhere(scene: Scene, unused: Sequence[Allocation]) -> bool:
    """Whether a backward goes through what the same statement made at the same places in another iteration: the best of several,
    say."""
    births = scene.recording.logs[scene.device].births
    places = {birth.place for one in unused if (birth := births.get(one.born)) is not None}
    lines = {_line_of(scene, one) for one in unused}
    backwards = [(scene.start_of(one), scene.end_of(one)) for one in scene.spans(BACKWARD)]
    return any(
        birth.place in places
        and one.freed is not None
        and scene.labels[one.index].category == "activations"
        and _line_of(scene, one) in lines
        and any(begin <= one.freed <= end for begin, end in backwards)
        for one in scene.timeline.allocations
        if (birth := births.get(one.born)) is not None
    )


def _goes_backward_within(scene: Scene, point: Checkpoint) -> bool:
    """Whether a statement, which may call what trains and what evaluates, goes backward itself."""
    end = point.moment.positions.get(scene.device, 0)
    if point.begin is not None:
        begin = point.begin.positions.get(scene.device, 0)
    else:
        ends = [one.moment.positions.get(scene.device, 0) for one in scene.recording.checkpoints]
        begin = max((one for one in ends if one < end), default=0)
    return any(begin <= scene.start_of(one) < end for one in scene.spans(BACKWARD))


def _line_of(scene: Scene, one: Allocation) -> int:
    row = None if scene.tensors is None else scene.tensors.statement_at(one.born)
    return 0 if row is None else row.line


def _saved_in_vain(scene: Scene) -> list[list[Allocation]]:
    """Of each forward that autograd recorded, what outlived it, had no name in the cell, and went before any backward began; as
    it was made."""
    recorded = sorted((scene.start_of(one), scene.end_of(one)) for one in scene.spans(FORWARD) if one.graph)
    begins = [begin for begin, _ in recorded]
    backwards = sorted(map(scene.start_of, scene.spans(BACKWARD)))
    found: dict[int, list[Allocation]] = defaultdict(list)
    for one in scene.timeline.allocations if recorded else ():
        label = scene.labels[one.index]
        caches = label.category == "kv_cache"
        if not (label.category == "activations" or caches) or (label.name and not caches) or one.freed is None:
            continue
        number = bisect_right(begins, one.born) - 1
        if number < 0 or not one.born < recorded[number][1] < one.freed:
            continue
        # (What a cache held before it grew is there for the graph alone, once the forward has ended that made the next.)
        if caches and not (number + 1 < len(recorded) and recorded[number + 1][1] <= min(scene.moment, one.freed)):
            continue
        following = bisect_left(backwards, recorded[number][1])
        if following == len(backwards) or backwards[following] >= one.freed:
            found[number].append(one)
    return list(found.values())
