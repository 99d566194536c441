"""What a timeline is made of: one device's allocations with their labels and stacks, from a file or a measured cell alike."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpumem_magic.devices.base import Label
from gpumem_magic.files.loaded import FileView
from gpumem_magic.recording.model import Recording
from gpumem_magic.report.build import DeviceView
from gpumem_magic.snapshot.model import Frame, TraceEvent
from gpumem_magic.snapshot.timeline import Allocation, Timeline

# More words than this over a chart say nothing.
_MOST_MARKS = 2000
_MOST_WORDS = 80


@dataclass(frozen=True)
class Mark:
    """A moment with a name. kind: "statement" (after it), "error" (memory ran out), "range" (where it or a phase starts)."""

    position: int
    words: str
    kind: str


@dataclass(frozen=True)
class TimelineSource:
    """One device's recording. labels: of the timeline's allocations, in order. reasons: why one is unknown, by its index.

    frames_at_end: address -> stack, of blocks whose alloc event is not in the trace. notes: what the recording lacks. opens_at:
    the position that the page shows first; None is the peak.
    """

    name: str
    timeline: Timeline
    events: Sequence[TraceEvent]
    labels: Sequence[Label]
    reasons: Mapping[int, str] = field(default_factory=dict)
    frames_at_end: Mapping[int, tuple[Frame, ...]] = field(default_factory=dict)
    marks: tuple[Mark, ...] = ()
    notes: tuple[str, ...] = ()
    opens_at: int | None = None

    @property
    def peak(self) -> int:
        """The first position with the highest allocated bytes."""
        return self.timeline.peak(0, len(self.timeline))[1]

    def frames_of(self, one: Allocation) -> tuple[Frame, ...]:
        """The stack that asked for it, innermost first; () where none was recorded."""
        if one.born >= 0:
            return self.events[one.born].frames
        return self.frames_at_end.get(one.address, ()) if one.freed is None else ()


def of_file(view: FileView, name: str) -> TimelineSource:
    """A device of a snapshot file. name: what the reader calls it."""
    failures = [
        Mark(index, "out of memory", "error") for index, event in enumerate(view.events) if event.action == "oom"
    ]
    marks = [*failures[-_MOST_MARKS:], *_ranges(view)]
    return TimelineSource(
        name,
        view.timeline,
        view.events,
        view.labels,
        view.reasons,
        {block.address: block.frames for segment in view.final for block in segment.blocks if block.frames},
        tuple(sorted(marks, key=lambda mark: mark.position)[:_MOST_MARKS]),
        (*view.beginning.notes(), *view.notes),
    )


def of_recording(recording: Recording, device: int) -> TimelineSource:
    """A device of a measured cell. Raises KeyError where the recording has no such device."""
    view = DeviceView(recording, device)
    marks = [
        Mark(
            point.moment.positions[device],
            point.label if point.kind != "error" else f"failed: {point.label}",
            "error" if point.kind == "error" else "statement",
        )
        for point in recording.checkpoints
        if point.kind in ("statement", "error")
    ]
    marks += [
        Mark(span.start.positions[device], span.label, "range")
        for span in recording.spans
        if device in span.start.positions
    ]
    marks.sort(key=lambda mark: mark.position)
    facts = view.log.facts
    name = f"{facts.name} (cuda:{facts.index})"
    return TimelineSource(
        name, view.timeline, view.log.events, view.labels, marks=tuple(marks[:_MOST_MARKS]), notes=recording.notes
    )


def _ranges(view: FileView) -> list[Mark]:
    """The user's own ranges (`torch.profiler.record_function`), which PyTorch keeps beside the trace with their times."""
    times = [event.time_us for event in view.events]
    found = []
    for note in view.loaded.snapshot.external_annotations:
        when, words = _number(note.get("time_us")), note.get("name")
        if note.get("stage") == "START" and note.get("device") == view.device and when and isinstance(words, str):
            place = bisect_left(times, when)
            if times and times[0] <= when <= times[-1]:
                found.append(Mark(place, words[:_MOST_WORDS], "range"))
    return found[:_MOST_MARKS]


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0
