"""What a timeline is made of: one device's allocations with their labels and stacks, from a file or a measured cell alike."""

from __future__ import annotations

from dataclasses import dataclass

from gpumem_magic.attribution.view import DeviceView

# More words than this over a chart say nothing.
_MOST_MARKS = 2000


@dataclass(frozen=True)
class TimelineMark:
    """A moment with a name. kind: "statement" (after it), "error" (memory ran out), "range" (where it or a phase starts)."""

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
        marks = [
            TimelineMark(
                point.moment.positions[device],
                point.label if point.kind != "error" else f"failed: {point.label}",
                "error" if point.kind == "error" else "statement",
            )
            for point in recording.checkpoints
            if point.kind in ("statement", "error")
        ]
    else:
        failed = [index for index, event in enumerate(view.log.events) if event.action == "oom"]
        marks = [TimelineMark(index, "out of memory", "error") for index in failed[-_MOST_MARKS:]]
    marks += [
        TimelineMark(span.start.positions[device], span.label, "range")
        for span in recording.spans
        if device in span.start.positions
    ]
    marks.sort(key=lambda mark: mark.position)
    return TimelineSource(name, view, tuple(marks[:_MOST_MARKS]))
