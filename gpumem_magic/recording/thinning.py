"""What is kept of a long run: its beginning, its end, and in between the iterations with the highest peak and the largest growth.

A report shows no more of a loop (`report.folding`), and an hour of training has millions of moments. Iterations go as a whole.
They are those of the cell's own loops; inside a statement that trains for long, they end with the steps of its first optimizer,
or, where nothing steps, with its forwards.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from gpumem_magic.recording.model import BACKWARD, FORWARD, OPTIMIZER, Checkpoint, Moment, Sighting, Span

MOST = 30_000
"""Moments kept of a run, before it is thinned: some 60 MB with what belongs to them."""

_SIGHTINGS_PER_MOMENT = 4


@dataclass
class Seen:
    """What is there of a run. left_out: the line of a loop -> how many of its iterations have no rows any more."""

    checkpoints: list[Checkpoint]
    spans: list[Span]
    sightings: list[Sighting]
    left_out: Counter[int] = field(default_factory=Counter)

    @property
    def weight(self) -> int:
        """In moments, as `MOST` is."""
        return len(self.checkpoints) + 2 * len(self.spans) + len(self.sightings) // _SIGHTINGS_PER_MOMENT

    def positions(self, open_moments: Iterable[Moment]) -> dict[int, set[int]]:
        """By device, the positions that something refers to. open_moments: beginnings whose ends are still to come."""
        moments = [*open_moments]
        for point in self.checkpoints:
            moments += [point.moment] if point.begin is None else [point.begin, point.moment]
        for span in self.spans:
            moments += [span.start, span.end]
        found: dict[int, set[int]] = {}
        for moment in moments:
            for device, position in moment.positions.items():
                found.setdefault(device, set()).add(position)
        for look in self.sightings:
            found.setdefault(look.device, set()).add(look.position)
        return found


@dataclass(frozen=True)
class _RecordedIteration:
    """An iteration, or some that follow each other: what came after `begin`, up to `end`. in_rows: whether it has rows of its
    own."""

    begin: Moment
    end: Moment
    in_rows: bool
    weight: int


def thin(seen: Seen, device: int, most: int = MOST) -> None:
    """Leaves out iterations from the middle, such that about half of `most` is kept. device: whose peaks and growth count."""
    units = _units(seen, max(most // 64, 24))
    first = _reach(units, most // 4)
    last = len(units) - _reach(units[::-1], most // 4)
    if last - first < 2:
        return
    middle = range(first, last)
    moments = _moments(seen)
    ticks = [moment.tick for moment in moments]
    records = {
        max(middle, key=lambda number: _peak(units[number], moments, ticks, device)),
        max(middle, key=lambda number: _growth(units[number], device)),
    }
    _leave_out(seen, _joined(units[number] for number in middle if number not in records))


# ---- iterations


def _units(seen: Seen, large: int) -> list[_RecordedIteration]:
    """The iterations, in order. One of more than `large` moments is cut up by the steps in it."""
    spans = sorted(seen.spans, key=lambda span: span.end.tick)
    ends = [span.end.tick for span in spans]
    points = seen.checkpoints
    units: list[_RecordedIteration] = []
    begin = 0
    for number in range(1, len(points)):
        following = points[number + 1] if number + 1 < len(points) else None
        if following is not None and _place(following) == _place(points[number]):
            continue
        start, end = points[begin].moment, points[number].moment
        if points[begin + 1].begin is not None:
            start = points[begin + 1].begin or start
        inside = spans[bisect_right(ends, start.tick) : bisect_right(ends, end.tick)]
        weight = number - begin + 2 * len(inside)
        if weight > large:
            units += _steps_of(inside)
        elif points[number].iteration:
            units.append(_RecordedIteration(start, end, True, weight))
        begin = number
    # The statement that runs now.
    if points:
        units += _steps_of(spans[bisect_right(ends, points[-1].moment.tick) :])
    return units


def _place(point: Checkpoint) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return point.loops, point.iteration


def _steps_of(spans: Sequence[Span]) -> list[_RecordedIteration]:
    """The iterations inside a statement. spans: those that ended in it, in order of their ends."""
    steps = [span for span in spans if span.kind == OPTIMIZER and not span.failed]
    if steps:
        ends = [span.end for span in steps if span.label == steps[0].label]
    else:
        ends = [span.end for span in spans if span.kind == FORWARD]
    ticks = [span.end.tick for span in spans]
    units = []
    for begin, end in pairwise(ends):
        count = bisect_right(ticks, end.tick) - bisect_right(ticks, begin.tick)
        units.append(_RecordedIteration(begin, end, False, 2 * count))
    return units


def _reach(units: Sequence[_RecordedIteration], weight: int) -> int:
    """How many of the first units weigh that much together, but at least three of them."""
    total = 0
    for number, unit in enumerate(units):
        if total >= weight and number >= 3:
            return number
        total += unit.weight
    return len(units)


def _moments(seen: Seen) -> list[Moment]:
    moments = [point.moment for point in seen.checkpoints]
    for span in seen.spans:
        moments += [span.start, span.end]
    return sorted(moments, key=lambda moment: moment.tick)


def _peak(unit: _RecordedIteration, moments: Sequence[Moment], ticks: Sequence[int], device: int) -> int:
    inside = moments[bisect_right(ticks, unit.begin.tick) : bisect_right(ticks, unit.end.tick)]
    highest = max((moment.counters[device].allocated for moment in inside if device in moment.counters), default=0)
    before, after = unit.begin.counters.get(device), unit.end.counters.get(device)
    if before is not None and after is not None and after.peak_allocated > before.peak_allocated:
        return max(highest, after.peak_allocated)
    return highest


def _growth(unit: _RecordedIteration, device: int) -> int:
    before, after = unit.begin.counters.get(device), unit.end.counters.get(device)
    return 0 if before is None or after is None else after.allocated - before.allocated


# ---- leaving out


def _joined(units: Iterable[_RecordedIteration]) -> list[_RecordedIteration]:
    """Those that follow each other as one, in order."""
    runs: list[_RecordedIteration] = []
    for unit in units:
        if runs and runs[-1].end.tick == unit.begin.tick and runs[-1].in_rows == unit.in_rows:
            runs[-1] = replace(runs[-1], end=unit.end)
        else:
            runs.append(unit)
    return runs


def _around(runs: Sequence[_RecordedIteration], tick: int) -> _RecordedIteration | None:
    number = bisect_left(runs, tick, key=lambda run: run.begin.tick) - 1
    return runs[number] if number >= 0 and tick <= runs[number].end.tick else None


def _leave_out(seen: Seen, runs: Sequence[_RecordedIteration]) -> None:
    _leave_out_rows(seen, runs)
    spans: list[Span] = []
    skipped: Counter[int] = Counter()
    steps_gone: Counter[int] = Counter()
    steps = [span for span in seen.spans if span.kind == OPTIMIZER and not span.failed]
    first = min(steps, key=lambda span: span.start.tick).label if steps else None
    for span in seen.spans:
        run = _around(runs, span.start.tick)
        if run is None or span.end.tick > run.end.tick:
            spans.append(span)
            continue
        is_step = span.kind == OPTIMIZER and not span.failed and span.label == first
        steps_gone[run.end.tick] += span.steps_left_out + is_step
        if not run.in_rows:
            skipped[run.end.tick] += span.skipped + is_step
    seen.spans[:] = _numbered(spans, skipped, steps_gone)
    seen.sightings[:] = _outside(seen.sightings, runs)


def _leave_out_rows(seen: Seen, runs: Sequence[_RecordedIteration]) -> None:
    points: list[Checkpoint] = []
    gone: list[Checkpoint] = []
    left: _RecordedIteration | None = None
    for point in seen.checkpoints:
        run = _around(runs, point.moment.tick)
        if run is not None and run.in_rows:
            gone.append(point)
            left = run
            continue
        points.append(point if left is None else replace(point, begin=left.end))
        left = None
    there = {iteration for point in points for iteration in _iterations_of(point)}
    for loops, _ in {iteration for point in gone for iteration in _iterations_of(point)} - there:
        seen.left_out[loops[-1]] += 1
    seen.checkpoints[:] = points


def _iterations_of(point: Checkpoint) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The iterations that a row belongs to, of its outermost loop first."""
    depths = range(1, len(point.iteration) + 1)
    return [(point.loops[:depth], point.iteration[:depth]) for depth in depths]


def _numbered(spans: list[Span], skipped: Mapping[int, int], steps_gone: Mapping[int, int]) -> list[Span]:
    """With what was left out noted at the phase that follows. skipped, steps_gone: tick -> how many were left out before it."""
    phases = sorted(
        (span.start.tick, number) for number, span in enumerate(spans) if span.kind in (FORWARD, BACKWARD, OPTIMIZER)
    )
    for tick, count in steps_gone.items():
        rank = bisect_right(phases, (tick, len(spans)))
        if rank < len(phases):
            number = phases[rank][1]
            span = spans[number]
            more = skipped.get(tick, 0)
            spans[number] = replace(span, skipped=span.skipped + more, steps_left_out=span.steps_left_out + count)
    return spans


def _outside(sightings: Sequence[Sighting], runs: Sequence[_RecordedIteration]) -> list[Sighting]:
    """The looks that were not in a run, and of those in one the last at each address: what is kept for long is seen once."""
    edges: dict[int, tuple[list[int], list[int]]] = {}
    last = {(look.device, look.address, look.role): number for number, look in enumerate(sightings)}
    found = []
    for number, look in enumerate(sightings):
        if look.device not in edges:
            edges[look.device] = (
                [run.begin.positions.get(look.device, 0) for run in runs],
                [run.end.positions.get(look.device, 0) for run in runs],
            )
        begins, ends = edges[look.device]
        rank = bisect_left(begins, look.position) - 1
        if rank < 0 or look.position >= ends[rank] or last[look.device, look.address, look.role] == number:
            found.append(look)
    return found
