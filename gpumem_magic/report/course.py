"""The course of the allocated memory through a run: a stretch for each iteration, so that a leak is seen in a second.

Each knows the lowest and the highest bytes in it. Those of a long run are put together, so that they fit on a strip; iterations
without figures are stretches of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from gpumem_magic.attribution.view import DeviceView
from gpumem_magic.recording.model import OPTIMIZER, Span
from gpumem_magic.report.model import SKIPPED, ReportData, Row

MOST = 120
ITERATION, STEP, LINE = "iteration", "step", "line"
# A statement that steps an optimizer so often is a loop of its own.
_STEPS = 3


@dataclass(frozen=True)
class Stretch:
    """`count` iterations (or statements) in a row, named from `first` to `last`. low: the least that was allocated at the end of
    a statement; high: the most at any time; after: at its end. All in bytes, and 0 where the figures are missing.

    unit: "iteration", "step" (of an optimizer, inside a statement) or "line".
    """

    unit: str
    first: str
    last: str
    count: int
    low: int
    high: int
    after: int
    missing: bool = False

    @property
    def words(self) -> str:
        """``iterations 3-17``, ``line 4``."""
        return f"{self.unit} {self.first}" if self.first == self.last else f"{self.unit}s {self.first}-{self.last}"


@dataclass(frozen=True)
class _Bit:
    """What one statement, or one step, did. loops: the lines of the loops around it; place: their counters."""

    unit: str
    name: str
    loops: tuple[int, ...]
    place: tuple[int, ...]
    low: int
    high: int


def course_of(report: ReportData) -> list[Stretch]:
    """The stretches in order. Of a report without its recording, those of its rows."""
    return _stretches(_of_rows(report.checkpoints) if report.source is None else _of_recording(report.source))


def _of_rows(rows: Sequence[Row]) -> Iterator[_Bit]:
    for row in rows:
        # Those without rows of their own are the gaps between the others.
        if row.kind not in ("before", "after", SKIPPED):
            loops = (0,) * len(row.iteration)
            yield _bit(row.line, loops, row.iteration, row.allocated, row.peak_allocated)


def _bit(line: int, loops: tuple[int, ...], place: tuple[int, ...], low: int, high: int) -> _Bit:
    unit, name = (ITERATION, ".".join(map(str, place))) if place else (LINE, str(line))
    return _Bit(unit, name, loops, place, low, high)


def _of_recording(view: DeviceView) -> Iterator[_Bit]:
    device, timeline = view.device, view.timeline
    points = [point for point in view.recording.checkpoints if device in point.moment.positions]
    spans = [span for span in view.recording.spans if device in span.end.positions]
    for before, point in pairwise(points):
        if point.kind == "after":
            continue
        start = (point.begin or before.moment).positions.get(device, 0)
        end = point.moment.positions[device]
        steps = [] if point.iteration else list(_steps(spans, device, start, end))
        if len(steps) < _STEPS:
            low, high = timeline.allocated_at(end), timeline.peak(start, end)[0]
            yield _bit(point.line, point.loops, point.iteration, low, high)
            continue
        for number, first, last in steps:
            low, high = timeline.allocated_at(last), timeline.peak(first, last)[0]
            yield _Bit(STEP, str(number), (point.line,), (number,), low, high)


def _steps(spans: Sequence[Span], device: int, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The steps of the first optimizer inside a statement: number, and the positions where they begin and end."""
    inside = [one for one in spans if start <= one.start.positions.get(device, -1) and one.end.positions[device] <= end]
    label = next((one.label for one in inside if one.kind == OPTIMIZER), None)
    number = 0
    for one in sorted(inside, key=lambda one: one.end.tick):
        if one.skipped:
            # What was left out of a long run is no part of the step that follows.
            number += one.skipped
            start = one.start.positions[device]
        if one.kind == OPTIMIZER and one.label == label and not one.failed:
            number += 1
            yield number, start, one.end.positions[device]
            start = one.end.positions[device]


def _stretches(bits: Iterable[_Bit]) -> list[Stretch]:
    """One for each iteration, and for each statement that is in none."""
    found: list[Stretch] = []
    last: _Bit | None = None
    for bit in bits:
        if last is not None and bit.place and (bit.loops, bit.place) == (last.loops, last.place):
            old = found[-1]
            found[-1] = replace(old, low=min(old.low, bit.low), high=max(old.high, bit.high), after=bit.low)
        else:
            if last is not None and (gap := _gap(last, bit)):
                found.append(gap)
            found.append(Stretch(bit.unit, bit.name, bit.name, 1, bit.low, bit.high, bit.low))
        last = bit
    return found


def _gap(last: _Bit, bit: _Bit) -> Stretch | None:
    """The iterations between two that are there."""
    if not bit.place or last.loops != bit.loops or last.place[:-1] != bit.place[:-1]:
        return None
    count = bit.place[-1] - last.place[-1] - 1
    if count < 1:
        return None
    outer = "".join(f"{number}." for number in bit.place[:-1])
    return Stretch(
        bit.unit, f"{outer}{last.place[-1] + 1}", f"{outer}{bit.place[-1] - 1}", count, 0, 0, 0, missing=True
    )


def shortened(found: Sequence[Stretch], most: int = MOST) -> Iterator[Stretch]:
    """Neighbours of one kind together, so that about `most` are left."""
    size = -(-len(found) // most) if found else 1
    run: list[Stretch] = []
    for one in found:
        if run and (len(run) == size or (one.unit, one.missing) != (run[0].unit, run[0].missing)):
            yield _together(run)
            run = []
        run.append(one)
    if run:
        yield _together(run)


def _together(run: Sequence[Stretch]) -> Stretch:
    return replace(
        run[0],
        last=run[-1].last,
        count=sum(one.count for one in run),
        low=min(one.low for one in run),
        high=max(one.high for one in run),
        after=run[-1].after,
    )
