"""Reading the loop: what is added up before one backward, kept through another one, or held while an error is handled."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from gpumem_magic.causes.alike import made_at
from gpumem_magic.causes.growth import leaving
from gpumem_magic.causes.model import EQUAL_ITERATIONS, LEAST, WORTH, Scene
from gpumem_magic.causes.places import quoted
from gpumem_magic.causes.turns import turns_of_lines, what_comes_and_goes
from gpumem_magic.causes.written import Written, name_given
from gpumem_magic.owners.model import ERROR, size_of
from gpumem_magic.recording.model import BACKWARD, FORWARD, KEPT_BY_LIST, KEPT_BY_NAME, OPTIMIZER, Checkpoint
from gpumem_magic.report.model import LABELS, OF_A_MODEL, Cause
from gpumem_magic.snapshot.timeline import Allocation
from gpumem_magic.units import human, listed

# Two are often meant: a real and a generated batch.
_PARTS = 3
# So many iterations that end alike; what they end with besides the model is at most one part in so many of the peak.
_REPEATS, _SMALL = 3, 8
# What to do about a graph that is retained, where nothing says which part of it the next loss shares.
SHARED = (
    "Where the next loss shares a part of it, add up both losses for one backward, or `.detach()` that part in the loss that "
    "need not train it; then leave out `retain_graph=True`."
)


def summed_losses(scene: Scene) -> Iterator[Cause]:
    """Losses of several batches are added up, and one backward runs for all: all their graphs live until then."""
    live = {one.address: one for one in scene.timeline.live_at(scene.saved_at)} if scene.saved else {}
    parts: dict[int, int] = {}
    for one in scene.saved:
        allocation = live.get(one.address)
        if one.part >= 0 and allocation is not None and allocation.born >= 0:
            parts[one.part] = parts.get(one.part, 0) + allocation.size
    total = sum(parts.values())
    if "log_prob" in scene.typed:
        # What the return of an episode weighs is known at its end only.
        return
    if len(parts) < _PARTS:
        return
    row = next((point for point, begin, end in scene.statements if begin <= scene.saved_at <= end), None)
    calls = [one for one in scene.program.calls("backward") if not one.where]
    call = next((one for one in calls if row is not None and one.line == row.line), None)
    function = None if call is not None else _running(scene)
    if function is not None:
        # The backward is in a function of the program's.
        call = next((one for one in scene.program.calls("backward") if one.words == function.words), None)
    name = "" if call is None else call.statement.partition(".backward")[0].strip()
    what = quoted(name) if name.isidentifier() else "The loss"
    place = (
        scene.program.adding(name, function="" if function is None else function.statement)
        if name.isidentifier()
        else None
    )
    lines = " and ".join(dict.fromkeys(one.words for one in (place, call) if one is not None))
    yield Cause(
        "summed_losses",
        f"{what}{f' ({lines})' if lines else ''} adds up the losses of {len(parts)} batches before one backward, so the graphs "
        f"of all {len(parts)} live until then: {human(total)}.",
        f"Call `.backward()` on each batch's loss (divided as now): gradients add up by themselves, and about "
        f"{human(total - max(parts.values()))} less is kept.",
        total - max(parts.values()),
    )


def _running(scene: Scene) -> Written | None:
    """Where the program's own function stood from which the first backward was called, with its name; None outside of all."""
    innermost = next(iter(scene.running), None)
    text = scene.program.text_of(innermost.file, scene.recording.own_file) if innermost is not None else None
    if innermost is None or text is None or not innermost.name:
        return None
    return Written(text.where, innermost.line, innermost.name)


def steady(scene: Scene) -> Iterator[Cause]:
    """The last iterations end with the same bytes, nearly all of which are a model and what trains it: nothing is left over."""
    ends = _ends_of_turns(scene)
    sizes = [scene.timeline.allocated_at(end) for end in ends]
    last = sizes[-_REPEATS:]
    if len(last) < _REPEATS or len(set(last)) > 1 or scene.report.error is not None:
        return
    if scene.timeline.peak(ends[-_REPEATS], ends[-1])[0] == last[-1]:
        # Nothing is made in them, as where weights are filled one by one.
        return
    later = [
        scene.end_of(span) for span in scene.spans(OPTIMIZER) if not span.failed and scene.start_of(span) >= ends[-1]
    ]
    if later and (scene.timeline.allocated_at(later[-1]) - last[-1]) * _SMALL > scene.report.peak.allocated:
        # Another training follows, and this one's memory stays beside it.
        return
    parts = Counter[str]()
    for one in scene.timeline.live_at(ends[-1]):
        parts[scene.labels[one.index].category] += one.size
    wholes = [name for name in (*OF_A_MODEL, "workspace") if parts[name]]
    rest = last[-1] - sum(parts[name] for name in wholes)
    if not wholes or rest * _SMALL > scene.report.peak.allocated or not last[-1]:
        return
    what = [LABELS[name] for name in wholes] + [f"{human(rest)} besides"] * (rest >= LEAST)
    yield Cause(
        "steady",
        f"Nothing piles up: the last iterations all end with the same {human(last[-1])} ({listed(what)}).",
        "",
        last[-1],
        describes=True,
    )


def _ends_of_turns(scene: Scene) -> list[int]:
    """Where iterations end, as rows and charts tell them: at the end of the loop around the steps, which may clear gradients."""
    steps = [one.end for one in scene.iterations]
    for loop in scene.loops:
        turns = [one.end for one in loop]
        # Each step, its turn's end, and the next turn's step.
        order = [end for both in zip(steps, turns, strict=False) for end in both]
        if len(turns) == len(steps) and order == sorted(order):
            return turns
    return steps


def held_over(scene: Scene) -> Iterator[Cause]:
    """At the peak, what a name keeps of the iteration before, beside what this one has made in its place."""
    ends = [one.end for one in scene.iterations]
    now = bisect_right(ends, scene.moment - 1)
    if scene.tensors is None or not 0 < now < len(ends):
        return
    births = scene.recording.logs[scene.device].births
    born: dict[int, list[Allocation]] = {now - 1: [], now: []}
    for one in scene.timeline.live_at(scene.moment):
        label = scene.labels[one.index]
        birth = births.get(one.born)
        # What is computed; a batch that is made or moved is worth a word where it is much.
        computed = label.category in ("activations", "temporaries")
        moved = label.category == "inputs" and one.size >= max(WORTH, scene.part_of_peak(4))
        if birth is not None and birth.inputs and (computed or moved):
            born.setdefault(bisect_right(ends, one.born), []).append(one)
    fresh = Counter((one.requested, scene.tensors.facts(one).line) for one in born[now])
    old = [
        one
        for one in born[now - 1]
        if fresh[one.requested, scene.tensors.facts(one).line]
        # What stays is kept for another reason.
        and (one.freed is not None and one.freed <= ends[now])
        and scene.tensors.keeper(one, scene.moment)[0] in (KEPT_BY_NAME, KEPT_BY_LIST)
    ]
    sizes: Counter[str] = Counter()
    for one in old:
        sizes[re.split(r"[.\[]", scene.tensors.keeper(one, scene.moment)[1])[0]] += one.size
    if not sizes or sum(sizes.values()) < scene.part_of_peak(10):
        return
    names = [name for name, _ in sizes.most_common(3)]
    line = scene.tensors.facts(max(old, key=lambda one: one.size)).line
    hold = "holds" if len(names) == 1 else "hold"
    yield Cause(
        "held_over",
        f"While an iteration computes, {' and '.join(map(quoted, names))} (line {line}) still {hold} "
        f"the previous one's result: {human(sum(sizes.values()))} twice at the peak.",
        f"`del {', '.join(names)}` at the end of each iteration frees it before the next one begins.",
        sum(sizes.values()),
    )


def grown_in_call(scene: Scene) -> Iterator[Cause]:
    """What each iteration of a loop left behind, until a statement after the loop let go of it: the end of the function that it
    is in, or ``del``."""
    trained = [scene.start_of(one) for one in scene.spans(BACKWARD)]
    for turns in (scene.forwards_of_a_statement, scene.iterations, *scene.loops, *turns_of_lines(scene)):
        iterations = scene.finished(turns)
        last = scene.left_evenly(iterations)
        if not last:
            continue
        over = iterations[-1].end
        made = [
            one
            for one in scene.timeline.live_at(over)
            if iterations[-EQUAL_ITERATIONS].start <= one.born < iterations[-1].start and one.freed is not None
        ]
        if not _lines_of(scene, made).isdisjoint(_in_cycles(scene)):
            # Python's collector let go of it, and what is left of it waits for that still.
            continue
        for point, begin, stop in scene.statements:
            gone = [one for one in made if one.freed is not None and max(begin, over) <= one.freed <= stop]
            # A backward before it, or in it, needs what the loop gathered.
            if 2 * size_of(gone) < sum(last[:-1]) or any(over <= one <= stop for one in trained):
                continue
            first = iterations[0].end
            # (What happens before it in the same statement, a function's loop, is not yet its end.)
            living = scene.timeline.live_at(max(begin, over))
            held = [
                one
                for one in living
                if one.born >= first
                and one.freed is not None
                and one.freed <= stop
                and scene.labels[one.index].category not in OF_A_MODEL
            ]
            following = (one for one in scene.timeline.allocations if over <= one.born <= stop)
            if any(2 * one.size >= size_of(held) for one in following):
                # They were needed as one.
                continue
            if begin >= over and what_comes_and_goes(scene).issuperset(one.index for one in gone):
                # Others work with them, and do so in each turn of a loop around.
                continue
            saved = [one for one in gone if scene.labels[one.index].category == "activations"]
            graph = 2 * size_of(saved) > size_of(gone)
            graph &= any(span.graph for span in scene.spans(FORWARD))
            graph &= not any(iterations[-1].start <= one < over for one in trained)
            way = "`with torch.no_grad():` where no backward follows; else keep" if graph else "Keep"
            its_end = point.label.endswith(f"end of {_first(point)}") or begin < over
            ends = f"`{_first(point)}` (line {point.line}) lets go of it{' only as it ends' if its_end else ''}"
            ours = f": {human(size_of(held))} that its variables held" if its_end else f": {human(size_of(held))}"
            largest = max(held, key=lambda one: one.size)
            made_there = made_at(scene, largest) if not its_end or begin < over else ""
            what = f", made by {made_there}," if made_there else ""
            if graph:
                what = f", saved for a backward that never comes{what or ','}"
            birth = scene.tensors.birth_of(largest) if scene.tensors is not None else None
            put = (
                scene.program.putting(name_given(birth.place.text), birth.place, scene.recording.own_file)
                if birth and birth.place
                else None
            )
            if put is not None:
                what = f": it is put into `{put[0]}` at {put[1].words} (`{put[1].shown}`),"
            view = (
                "; a slice keeps all of its tensor: `.clone()` it" if made_there and scene.reads_last_position else ""
            )
            each = sum(last) // len(last)
            yield Cause(
                "growth",
                f"Each iteration leaves {human(each)} more allocated than the previous one"
                f"{scene.how_many(leaving(scene.left_by(iterations), each))}{what or ','} and {ends}{ours}.",
                f"{way} only what is used later, on the host (`.detach().cpu()`){view}.",
                size_of(held),
            )
            return


def _lines_of(scene: Scene, made: Iterable[Allocation]) -> set[tuple[str, int]]:
    births = (scene.tensors.birth_of(one) for one in made if scene.tensors is not None)
    return {(one.place.own_file, one.place.own_line) for one in births if one is not None and one.place is not None}


def _in_cycles(scene: Scene) -> set[tuple[str, int]]:
    """The lines that made what only reference cycles hold."""
    roots = scene.holdings.roots
    its = (scene.alive.get(one.address) for one in scene.held if roots[one.roots[0]].kind == "cycle")
    return _lines_of(scene, [one for one in its if one is not None and one.born >= 0])


def given_back_by_the_error(scene: Scene) -> Iterator[Cause]:
    """What each iteration left behind until a request failed, and the error let go of on its way out, as an `ExitStack` does that
    is open around the loop."""
    error = scene.report.error
    if error is None or not error.wanted:
        return
    for iterations in map(scene.finished, scene.loops):
        if len(iterations) <= EQUAL_ITERATIONS:
            continue
        # (What the last one made goes by the loop's own names still.)
        turns = iterations[1:-1]
        held = [
            one
            for one in scene.living_in(scene.moment, "inputs", "temporaries", "other", "unknown")
            if turns[0].start <= one.born < turns[-1].end and one.freed is not None and one.freed >= scene.moment
        ]
        of_turns = [[one for one in held if turn.start <= one.born < turn.end] for turn in turns]
        sizes = [size_of(its) for its in of_turns]
        if min(sizes) < LEAST or max(sizes) > 1.5 * min(sizes):
            continue
        largest = max(held, key=lambda one: one.size)
        birth = scene.tensors.birth_of(largest) if scene.tensors is not None else None
        place = birth.place if birth is not None else None
        put = (
            scene.program.putting(name_given(place.text), place, scene.recording.own_file)
            if place is not None
            else None
        )
        what = f"made by {made_at(scene, largest)}"
        if put is not None:
            what = f"it is put into `{put[0]}` at {put[1].words} (`{put[1].shown}`)"
        yield Cause(
            "growth",
            f"Each iteration leaves {human(sizes[-1])} more allocated than the previous one{scene.how_many(iterations)}: {what}, "
            f"and only the error let go of it: {human(size_of(held))}.",
            "Let go of it in each turn, or keep there only what is used later, on the host (`.detach().cpu()`).",
            size_of(held),
        )
        return


def _first(point: Checkpoint) -> str:
    return point.statement.strip().partition("\n")[0]


def retry_while_handling(scene: Scene) -> Iterator[Cause]:
    """Work inside an ``except`` block, while the error's traceback still holds what the failed attempt made."""
    error, retry = scene.report.error, scene.left.retry
    if error is not None and error.wanted and retry is not None:
        # What the error was handling is behind it.
        behind = [one for one in scene.held if sum(ERROR in station.bases for station in one.trail) > 1]
        roots = [scene.holdings.roots[number].kind for one in behind for number in one.roots]
        if size_of(behind) >= scene.part_of_peak(10) and {*roots} == {"traceback"}:
            yield _retried(f"{retry.words[0].upper()}{retry.words[1:]} (`{retry.shown}`)", size_of(behind))
            return
    for tried, first, last in scene.program.handlers():
        inside = (place for place, (point, _, _) in enumerate(scene.points) if first <= point.line <= last)
        for places in _runs(inside):
            line, held = scene.points[places[-1]][0], _held_while(scene, places, tried, first)
            if line.kind != "error" and size_of(held) >= scene.part_of_peak(10):
                yield _retried(f"Line {line.line}", size_of(held))
                return


def _held_while(scene: Scene, places: Sequence[int], tried: int, first: int) -> list[Allocation]:
    """What an attempt (from line `tried` on) had made and its error held until the ``except`` block (from line `first` on; its
    rows are at `places`) had ended; nothing where the block itself asked for no memory."""
    attempt = places[0]
    while attempt and tried <= scene.points[attempt - 1][0].line < first:
        attempt -= 1
    begin, end = scene.points[attempt][1], scene.points[places[-1]][2]
    # The block's end lets go of the error.
    after = scene.points[places[-1] + 1 :]
    stop = after[0][2] if after else scene.end
    held = [
        one for one in scene.timeline.live_at(end) if one.born >= begin and one.freed is not None and one.freed <= stop
    ]
    # Where a request failed, what the attempt asked for and gave back was before that.
    events = scene.recording.logs[scene.device].events
    failed = (place for place in range(begin, end) if events[place].action == "oom")
    latest = next(failed, max((one.born for one in held), default=end))
    work = [one for one in scene.timeline.allocations if latest < one.born < end]
    return held if size_of(work) >= LEAST else []


def _runs(numbers: Iterable[int]) -> list[list[int]]:
    """Each time that an ``except`` block was run: numbers that follow one another."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def _retried(line: str, held: int) -> Cause:
    return Cause(
        "retry_in_except",
        f"{line} runs inside the `except` block, where the caught error's traceback still holds what the failed attempt made: "
        f"{human(held)} (local variables of the functions that it left).",
        "Retry after the `except` block: set a flag in it (`failed = True`); the memory is free again once it has ended.",
        held,
    )


def kept_by_retain_graph(scene: Scene) -> Iterator[Cause]:
    """A backward keeps a graph that no further backward of its turn uses."""
    calls = scene.program.calls("backward", "retain_graph")
    backwards = scene.spans(BACKWARD)
    if not calls or not backwards:
        return
    lines = {one.line for one in calls if not one.where}
    # (Which call of a function a backward was is not known: there the only one that keeps its graph is meant.)
    only = calls[0] if len(calls) == 1 and calls[0].where and len(scene.program.calls("backward")) > 1 else None
    ranges = [(scene.start_of(one), scene.end_of(one)) for one in backwards]
    # The last of a turn of the outermost loop has no other after it that may use a part of the same graph.
    last = {scene.outermost_turn(start): (start, done) for start, done in ranges}
    rows = {done: next((p for p, begin, stop in scene.statements if begin <= done <= stop), None) for _, done in ranges}
    keeping = ranges
    if only is None:
        # Of several of a turn that keep theirs the last: what it shares with those before is in use, though nobody lets go of it.
        those = (each for each in ranges if (row := rows[each[1]]) is not None and row.line in lines)
        keeping = list({scene.outermost_turn(each[0]): each for each in those}.values())
    worst, words, is_last = 0, "", False
    for start, done in keeping:
        row = rows[done]
        is_saved_only = only is not None or (start, done) not in last.values()
        left = [
            one
            for one in scene.living_in(done, "activations")
            if one.born < start
            and one.born >= 0
            and (one.freed is None or one.freed > done)
            # What goes inside a later backward was used by that one, and a name keeps what it names in any case.
            and not (scene.tensors is not None and scene.tensors.keeper(one, done)[0] in (KEPT_BY_NAME, KEPT_BY_LIST))
            and not any(one.freed is not None and begin <= one.freed <= stop for begin, stop in ranges)
            and not (is_saved_only and (scene.tensors is None or not scene.tensors.is_saved(one)))
        ]
        if size_of(left) > worst:
            worst, is_last = size_of(left), (start, done) in last.values()
            words = only.words if only is not None else f"line {row.line}" if row is not None else ""
    if not worst:
        return
    remedy = "Without `retain_graph=True` it is freed as backward runs; a state that is carried on needs `.detach()` instead."
    yield Cause(
        "retained_graph",
        f"`backward(retain_graph=True)` ({words}) keeps the graph, {human(worst)} of activations, though no further "
        "backward of that iteration uses it.",
        remedy if is_last else SHARED,
        worst,
    )
