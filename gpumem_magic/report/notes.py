"""What a reader must know besides the figures: flushed caches, a growing context, repeating iterations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from gpumem_magic.attribution.ledger import Outside, gaps
from gpumem_magic.attribution.view import DeviceView
from gpumem_magic.devices.base import DeviceLog
from gpumem_magic.recording.model import OPTIMIZER, Checkpoint, CompiledCode, CompilerPlace, Recording, Span
from gpumem_magic.recording.repetition import longest_repetition, signature
from gpumem_magic.report.failure import caught_requests, failed_requests, peak_is_of_a_failed_attempt, steps
from gpumem_magic.snapshot.timeline import Timeline
from gpumem_magic.units import counted, human


def notes_of(view: DeviceView, peak_position: int) -> list[str]:
    """The notes of one device's report; the recorder's own stand first, in the primary device's."""
    recording, device, timeline = view.recording, view.device, view.timeline
    notes = list(recording.notes) if device == recording.primary else []
    if device == recording.primary:
        ended = recording.error is not None and recording.error.type.startswith("torch._dynamo.")
        notes += _compiled(recording.compiled, ended)
    notes += _retries(view)
    notes += _context_growth(recording, device)
    notes += _repetition(recording, device)
    notes += _estimated(recording.logs[device], timeline, peak_position)
    used = any(log.events or log.start for log in recording.logs.values())
    # (Where PyTorch keeps no figures, the driver's tell.)
    seen = [one.moment.counters[device].device_used for one in recording.checkpoints if device in one.moment.counters]
    used = used or len(set(seen)) > 1
    # A program that failed may have been about to.
    if recording.was_watched and device == recording.primary and not used and recording.error is None:
        notes.append(
            'Nothing was put on a device: the model and the data stayed on the host (`.to("cuda")` moves them).'
        )
    if timeline.unmatched:
        notes.append(
            f"{counted(timeline.unmatched, 'event refers', 'events refer')} to memory that the log does not contain."
        )
    return notes + _why_unknown(view, peak_position) + gaps_of(view)


def gaps_of(view: DeviceView) -> list[str]:
    """Where the recount differs from the device's own counters, at every checkpoint, shown or not; at most three."""
    device = view.device
    points = [point for point in view.recording.checkpoints if device in point.moment.counters]
    balances = view.ledger.at(point.moment.positions[device] for point in points)
    found = []
    for point in points:
        told = point.moment.counters[device]
        words = gaps(balances[point.moment.positions[device]].categories(Outside.of(told)), told)
        found += [f"The figures do not add up after {place_of(point)}: {gap}." for gap in words]
    return [*found[:3], f"{len(found) - 3:,} more gaps like these."] if len(found) > 4 else found


def _why_unknown(view: DeviceView, position: int) -> list[str]:
    sizes: Counter[str] = Counter()
    for one in view.timeline.live_at(position) if view.attribution.reasons else ():
        if one.index in view.attribution.reasons:
            sizes[view.attribution.reasons[one.index]] += one.requested
    return [f"Unknown at the peak: {human(size)} {why}." for why, size in sizes.most_common() if size]


def event_in_words(position: int, total: int) -> str:
    """A position in a recording whose statements are not known: ``event 12 of 300``."""
    if not total:
        return "the end (the file has no events)"
    return "the start" if position == 0 else f"event {position - 1:,} of {total:,}"


def place_of(point: Checkpoint, *, with_line: bool = True) -> str:
    """A row in words: ```optimizer.step()` in iteration 1, line 14``."""
    code = point.statement.strip().partition("\n")[0]
    words = (f"`{code}`" if "`" not in code else code) if code else point.label.strip() or point.kind
    if point.iteration:
        words += f" in iteration {'.'.join(str(number) for number in point.iteration)}"
    return f"{words}, line {point.line}" if point.line and with_line else words


def _compiled(done: CompiledCode, ended: bool) -> list[str]:
    """Where torch.compile's graphs break, which costs memory, what it could not compile, and what was compiled again.

    ended: the compiler's own error ended the program, so that nothing ran eagerly in its place."""
    found = []
    if done.failed:
        places = [f"{_given_up(one)} ({one.reason.rstrip('.')})" for one in done.failed]
        found.append(
            f"torch.compile could not compile {_few(places)}."
            if ended
            else f"torch.compile leaves to run eagerly: {_few(places)}."
            + " Functions of your own that are called there are still compiled, each by itself."
            * any(one.function for one in done.failed)
        )
    if done.breaks:
        reasons: dict[str, list[str]] = {}
        for one in done.breaks:
            reasons.setdefault(_named(one) if one.place else "places of its own", []).append(one.reason.rstrip("."))
        places = [f"{where} ({'; '.join(whys)})" for where, whys in reasons.items()]
        found.append(
            f"torch.compile's graphs break at {_few(places)}. Operators before and after a break are not fused, and every tensor "
            "that is needed behind it lies in memory meanwhile."
        )
    if done.again:
        places = [f"{_named(one)} {counted(one.count, 'time')} ({one.reason})" for one in done.again]
        found.append(f"torch.compile compiled again for inputs or settings unlike those before: {_few(places)}.")
    return found


def _named(one: CompilerPlace) -> str:
    line = _line(one.place)
    return f"{line}, `{one.text}`" if one.text else line or "a module of PyTorch's"


def _given_up(one: CompilerPlace) -> str:
    """The function, and the line that it was given up for."""
    if not one.function:
        return _named(one)
    return f"`{one.function}` ({_line(one.around)}), because of {_named(one)}"


def _line(place: str) -> str:
    return f"line {place}" if place.isdecimal() else place


def _few(places: Sequence[str], behind: str = "; and ", noun: str = "more place") -> str:
    """The first three, and behind them how many more there are."""
    more = f"{behind}{counted(len(places) - 3, noun)}" if len(places) > 3 else ""
    return f"{'; '.join(places[:3])}{more}"


def _retries(view: DeviceView) -> list[str]:
    """Requests that failed until the cache was emptied, and those that failed all the same, where the program went on."""
    recording, device = view.recording, view.device
    failed = [point for point, *_ in failed_requests(recording, device)]
    tried = [(point, now.retries - before.retries) for point, _, before, now in steps(recording, device)]
    points = [point for point, count in tried if count > failed.count(point)]
    caught = [point for point, *_ in caught_requests(recording, device)]
    if failed != caught and failed[-1] not in points:
        # The last is the error that ended the program.
        points += failed[-1:]
    ran_out = []
    # (Of an attempt that reached the peak a cause tells.)
    if caught and not peak_is_of_a_failed_attempt(recording, device, view.timeline):
        ran_out = [f"Memory ran out{times(caught)}{_places(caught)}. The program caught the error and went on."]
    return ran_out + ([f"The allocator emptied its cache to make room{_places(points)}."] if points else [])


def times(caught: Sequence[object]) -> str:
    """How often, where it was more than once."""
    return "" if len(caught) == 1 else f" {counted(len(caught), 'time')}"


def _places(points: Sequence[Checkpoint]) -> str:
    """`` in: b(), line 3; c(), line 4``; "" where none has words."""
    places = list(dict.fromkeys(place_of(point) for point in points if point.statement or point.kind != "error"))
    return f" in: {_few(places, ', and in ', 'more row')}" if places else ""


def _context_growth(recording: Recording, device: int) -> list[str]:
    """The context is measured at the device's first use; what comes later is said, since no category shows it apart."""
    grown = [
        (now.context - before.context, place_of(point))
        for point, _, before, now in steps(recording, device)
        if before.context and now.context is not None and now.context > before.context
    ]
    if not grown:
        return []
    most, where = max(grown)
    more = (
        f" by {human(sum(size for size, _ in grown))}, most of it ({human(most)})"
        if grown[1:]
        else f" by {human(most)}"
    )
    return [f"The CUDA context grew{more} in {where}."]


_ESTIMATES = (
    (
        ("estimate",),
        "cuDNN's scratch memory for convolutions is an estimate: {share}, and at most {largest} at a time "
        "(add cudnn=none to the device's name to leave it out, cudnn=256MiB to set it).",
    ),
    (
        ("recurrent_scratch", "recurrent_kept"),
        "What cuDNN takes for recurrent layers beside weights and results is an estimate: {share}, and at most {largest} "
        "at a time.",
    ),
)


def _estimated(log: DeviceLog, timeline: Timeline, peak_position: int) -> list[str]:
    """What is only an estimate, which no category shows apart; where it never was, nothing."""
    found = []
    for origins, sentence in _ESTIMATES:
        estimated = [one for one in timeline.allocations if log.origins.get(one.born) in origins]
        at_peak = sum(
            one.size
            for one in estimated
            if one.born < peak_position <= (len(timeline) if one.freed is None else one.freed)
        )
        share = f"{human(at_peak)} of the peak" if at_peak else "none at the peak"
        largest = max((one.size for one in estimated), default=0)
        if largest:
            found.append(sentence.format(share=share, largest=human(largest)))
    return found


def _repetition(recording: Recording, device: int) -> list[str]:
    """Iterations are from one step of the first optimizer to its next, over the whole recording."""
    events = recording.logs[device].events
    steps = [span for span in recording.spans if span.kind == OPTIMIZER and not span.failed]
    steps = [step for step in steps if step.label == steps[0].label and device in step.end.positions]
    ends = [step.end.positions[device] for step in steps]
    if len(ends) < 2 or not events:
        return []
    left_out = _left_out(recording.spans, steps)
    # What is before a step with iterations left out is not one iteration: it is like no other.
    signatures = [
        b"%d left out before %d" % (gone, end) if gone else signature(events[start:end])
        for start, end, gone in zip([0, *ends], ends, left_out, strict=False)
    ]
    found = longest_repetition(signatures)
    if found is None or ends[found.first] == ends[found.last]:
        return []
    numbers = list(accumulate(1 + gone for gone in left_out))
    period = f", with the same addresses every {found.period}" if found.period > 1 else ""
    first, last, total = numbers[found.first], numbers[found.last], numbers[-1]
    return [f"Iterations {first:,}-{last:,} of {total:,} repeat exactly{period}."]


def _left_out(spans: Sequence[Span], steps: Sequence[Span]) -> list[int]:
    """For each of the steps, how many were left out of a long run since the one before it."""
    marks = sorted((span.start.tick, span.steps_left_out) for span in spans if span.steps_left_out)
    found = []
    number = 0
    for step in steps:
        count = 0
        while number < len(marks) and marks[number][0] <= step.end.tick:
            count += marks[number][1]
            number += 1
        found.append(count)
    return found
