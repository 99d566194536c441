"""What a timeline is made of: one device's allocations with their labels and stacks, from a file or a measured cell alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpumem_magic.attribution.view import DeviceView
from gpumem_magic.recording.model import Checkpoint

# More words than this over a chart say nothing.
_MOST_MARKS = 2000


@dataclass(frozen=True)
class TimelineMark:
    """A moment with a name. kind: "statement", "range" (where one, or a phase, starts), "error" (memory ran out)."""

    position: int
    words: str
    kind: str


@dataclass(frozen=True)
class TimelineSource:
    """One device's recording. opens_at: the position that the page shows first; None is the peak. answer: what its report says
    first."""

    name: str
    view: DeviceView
    marks: tuple[TimelineMark, ...] = ()
    opens_at: int | None = None
    answer: str = ""


def source_of(view: DeviceView, name: str) -> TimelineSource:
    """A device of a recording. name: what the reader calls it."""
    recording, device = view.recording, view.device
    if recording.was_watched:
        marks = _statements(recording.checkpoints, device)
    else:
        failed = [index for index, event in enumerate(view.log.events) if event.action == "oom"]
        marks = [TimelineMark(index, "out of memory", "error") for index in failed]
    marks += [
        TimelineMark(span.start.positions[device], span.label, "range")
        for span in recording.spans
        if device in span.start.positions
    ]
    errors = [mark for mark in marks if mark.kind == "error"][-_MOST_MARKS:]
    marks = sorted((mark for mark in marks if mark.kind != "error"), key=lambda mark: mark.position)
    if len(marks) > _MOST_MARKS:
        # What follows belongs to none of those that are kept.
        marks[_MOST_MARKS:] = [TimelineMark(marks[_MOST_MARKS].position, "", "statement")]
    return TimelineSource(name, view, tuple(sorted([*errors, *marks], key=lambda mark: mark.position)))


def _statements(checkpoints: Sequence[Checkpoint], device: int) -> list[TimelineMark]:
    """Where each statement starts in which the device's log grew, and where one failed. What ran without a row has no words."""
    marks = []
    start = 0
    for point in checkpoints:
        end = point.moment.positions[device]
        begin = start if point.begin is None else point.begin.positions[device]
        if begin > start:
            marks.append(TimelineMark(start, "", "statement"))
            start = begin
        if point.kind in ("statement", "error"):
            if end > start:
                marks.append(TimelineMark(start, point.label, "statement"))
            if point.kind == "error":
                marks.append(TimelineMark(end, f"failed: {point.label}", "error"))
        start = end
    return marks
