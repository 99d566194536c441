"""A snapshot file becomes a recording like a measured cell's, and is turned into a report in the same way.

There are no objects left, so categories rest on stacks, lifetimes and sizes, or on labels that were kept with a saved
recording; what the file lacks is said in the notes. Rows are at events: the start, the last failed request, and the end.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from gpumem_magic.allocator.settings import settings_from_dict
from gpumem_magic.allocator.verdict import last_failure, needed_from_driver
from gpumem_magic.attribution.places import place_in_program
from gpumem_magic.attribution.view import DeviceView
from gpumem_magic.causes.from_files import explained
from gpumem_magic.devices.base import DeviceFacts, DeviceLog
from gpumem_magic.files.extra import saved_labels, saved_start
from gpumem_magic.files.failing import elsewhere
from gpumem_magic.files.ranges import named_ranges
from gpumem_magic.recording.model import Checkpoint, Failure, Moment, Recording, Span
from gpumem_magic.recording.quiet import no_automatic_collection
from gpumem_magic.report import build
from gpumem_magic.report.contents import contents_of
from gpumem_magic.report.model import ReportData
from gpumem_magic.report.notes import event_in_words
from gpumem_magic.report.schema import report_from_dict
from gpumem_magic.snapshot.files import LoadedSnapshot, SnapshotFileError, read
from gpumem_magic.snapshot.model import Segment, TraceEvent
from gpumem_magic.snapshot.rules import DEFAULT_SETTINGS, AllocatorSettings
from gpumem_magic.snapshot.start import start_of
from gpumem_magic.snapshot.unpickle import one_line
from gpumem_magic.units import counted, human

# Settings are tried on a recorded failure for some seconds at most.
_MOST_STEPS = 4_000_000
# More ranges than this say nothing, nor do more words.
_MOST_RANGES = 2000
_MOST_WORDS = 80


def load(path: str | os.PathLike[str]) -> ReportData:
    """The report of a snapshot file: a recording that this package saved, or anybody's (see `snapshot.files.read`).

    Raises SnapshotFileError (a ValueError, in one line) for what is not one, OSError where it can't be opened.
    """
    with no_automatic_collection():
        return report_of(read(path))


def report_of(
    loaded: LoadedSnapshot, device: int | None = None, at: str | None = None, views: Sequence[DeviceView] = ()
) -> ReportData:
    """The report of one device (by default the first of `views_of`; the others are under `devices`).

    at: as `position_of` has it; the state after an event is a row of its own. views: what `views_of` gave for the same
    file and device, so that nothing is recounted. A file that was saved with its report gives that one back. Raises
    SnapshotFileError where there is no such device or event.
    """
    saved = (loaded.extra or {}).get("report")
    if isinstance(saved, dict) and device is None and at in (None, "peak"):
        try:
            report = report_from_dict(saved)
        except ValueError as error:
            raise SnapshotFileError(f"{one_line(loaded.path)}: the report in it is damaged: {error}") from None
        there = {one.device for one in loaded.devices}
        found = [
            replace(one, source=DeviceView(recording_of(loaded, one.device.index), one.device.index))
            if one.device.index in there
            else one
            for one in (report, *report.devices)
        ]
        found = [_with_contents(one, at) for one in found]
        return replace(found[0], devices=tuple(found[1:]))
    first, *others = views or views_of(loaded, device)
    report = build.report_of(first, _points(first, position_of(first, at)), most_steps=_MOST_STEPS)
    more = [build.report_of(view, most_steps=_MOST_STEPS) for view in others]
    report, *more = (
        _with_last_words(explained(one, view, named_ranges(loaded, view.device, view.log.events)), view)
        for one, view in zip((report, *more), (first, *others), strict=True)
    )
    # An event's number is one of the first device's.
    rest = tuple(_with_contents(one, at if at in ("peak", "end") else None) for one in more)
    return replace(_with_contents(report, at), devices=rest)


def _with_last_words(report: ReportData, view: DeviceView) -> ReportData:
    words = []
    if outside := view.timeline.outside:
        lie = counted(outside, "block lies", "blocks lie")
        words.append(f"What PyTorch reserved is a lower bound: {lie} in no segment of the file.")
    if view.end and view.recording.error is None:
        words.append("No out-of-memory error is among the device's events.")
    return replace(report, remarks=(*report.remarks, *words))


def _with_contents(report: ReportData, at: str | None) -> ReportData:
    view = report.source
    if view is None:
        return report
    position = position_of(view, at)
    return replace(report, contents=contents_of(view, position, event_in_words(position, view.end)))


def views_of(loaded: LoadedSnapshot, device: int | None = None) -> list[DeviceView]:
    """The device's view, or all devices': where memory ran out first, then by their peaks. Raises SnapshotFileError where there
    is none."""
    if device is None and not loaded.devices:
        raise SnapshotFileError(
            f"{one_line(loaded.path)}: it holds no segments and no events. There is nothing to report."
        )
    devices = [found.device for found in loaded.devices] if device is None else [device]
    views = [DeviceView(recording_of(loaded, one), one) for one in devices]
    return sorted(views, key=lambda view: (view.recording.error is None, -view.peak[0]))


def moment_of(view: DeviceView, at: str | None) -> str:
    """What `position_of` means, in words."""
    failed = at is None and _failure(view) is not None
    words = {None: "at the peak", "peak": "at the peak", "end": "at the end"}
    return "at the failure" if failed else words.get(at, f"after event {at}")


def _failure(view: DeviceView) -> int | None:
    """The position of the request that failed last."""
    points = view.recording.checkpoints
    return next((one.moment.positions[view.device] for one in points if one.kind == "error"), None)


def position_of(view: DeviceView, at: str | None) -> int:
    """The position that "peak", "end" or an event's number means: after that event; without one, that of the request that failed,
    or else the peak. Raises SnapshotFileError."""
    failed = _failure(view)
    if at is None and failed is not None:
        return failed
    if at is None or at == "peak":
        return view.peak[1]
    if at == "end":
        return view.end
    number = int(at) if at.isascii() and at.isdecimal() and len(at) < 19 else -1
    if not 0 <= number < view.end:
        assert view.recording.file is not None
        name = one_line(view.recording.file.path)
        there = f"Give peak, end, or a number from 0 to {view.end - 1}" if view.end else "It has none: give peak or end"
        raise SnapshotFileError(f"{name}: no event {at!r}. {there}.")
    return number + 1


def recording_of(loaded: LoadedSnapshot, device: int) -> Recording:
    """One device of a file. Raises SnapshotFileError where the file has none of that number, or can't be recounted."""
    beginning = next((one for one in loaded.devices if one.device == device), None)
    if beginning is None:
        there = ", ".join(str(one.device) for one in loaded.devices) or "none"
        raise SnapshotFileError(f"{one_line(loaded.path)}: it has no device {device}. It has: {there}.")
    notes = beginning.notes()
    final = tuple(segment for segment in loaded.snapshot.segments if segment.device == device)
    # A trace of one event was recorded with enabled="state": it leads nowhere.
    events = loaded.snapshot.device_traces[device] if beginning.kind != "none" else ()
    settings = _settings(loaded, notes)
    start = () if events and beginning.kind == "empty" else _start(loaded, device, final, events, settings, notes)
    name = f"GPU {device} of {one_line(os.path.basename(loaded.path))}"
    failed = last_failure(events)
    total = len(events)
    # A state without a trace is one moment.
    points = [_point(device, 0, "before", "the start")] if total else []
    if failed is not None:
        points.append(_point(device, failed + 1, "error", f"out of memory at event {failed:,}"))
    points.append(_point(device, total, "after", f"the end, after {total:,} events" if total else event_in_words(0, 0)))
    labels = saved_labels((loaded.extra or {}).get("labels"), device)
    return Recording(
        torch=loaded.torch,
        primary=device,
        logs={
            device: DeviceLog(
                DeviceFacts(name, "cuda", device, None, None, None), start, events, settings=settings, final=final
            )
        },
        checkpoints=tuple(points),
        spans=tuple(_ranges(loaded, device, events)),
        error=None if failed is None else _error(loaded, events, failed, device, settings),
        notes=tuple(notes),
        file=loaded,
        labels={} if labels is None else {device: labels},
    )


def _point(device: int, position: int, kind: str, words: str) -> Checkpoint:
    return Checkpoint(kind, words, words, 0, Moment({device: position}, {}))


def _points(view: DeviceView, position: int) -> list[Checkpoint]:
    """The recording's checkpoints, and one at another position; every report shows the peak and the end."""
    points = list(view.recording.checkpoints)
    taken = {view.peak[1], *(point.moment.positions[view.device] for point in points)}
    if position not in taken:
        points.append(_point(view.device, position, "statement", event_in_words(position, view.end)))
    return sorted(points, key=lambda point: point.moment.positions[view.device])


def _settings(loaded: LoadedSnapshot, notes: list[str]) -> AllocatorSettings:
    try:
        return settings_from_dict(loaded.snapshot.allocator_settings)
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        notes.append(f"The allocator's settings in the file are not understood ({error}); defaults are used.")
        return DEFAULT_SETTINGS


def _start(
    loaded: LoadedSnapshot,
    device: int,
    final: tuple[Segment, ...],
    events: Sequence[TraceEvent],
    settings: AllocatorSettings,
    notes: list[str],
) -> tuple[Segment, ...]:
    """The segments when the recording began."""
    if not events:
        return final
    saved = saved_start((loaded.extra or {}).get("start"), device)
    if saved is not None:
        return saved
    try:
        state = start_of(final, events, settings)
    except ValueError as error:
        raise SnapshotFileError(
            f"{one_line(loaded.path)}: its segments and events do not fit together: {error}."
        ) from None
    if state.uncertain:
        one = state.uncertain == 1
        whose = "size of a block" if one else f"sizes of {state.uncertain:,} blocks"
        bounds = "is a lower bound (by up to 1 MiB)" if one else "are lower bounds (by up to 1 MiB each)"
        notes.append(f"The {whose} from before the recording {bounds}.")
    if state.orphans:
        which = "A block" if state.orphans == 1 else f"{state.orphans:,} blocks"
        notes.append(f"{which} from before the recording lay in unknown segments.")
    return state.segments


def _error(
    loaded: LoadedSnapshot, events: Sequence[TraceEvent], index: int, device: int, settings: AllocatorSettings
) -> Failure:
    """The last request that failed, at an event. A trace knows the rounded request only: it stands for both."""
    rounded = events[index].size
    count = sum(event.action == "oom" for event in events)
    times = "" if count == 1 else f" (the last of {count:,})"
    free = human(events[index].address)
    return Failure(
        "torch.OutOfMemoryError",
        f"event {index:,}{times}: {human(rounded)} could not be allocated; the driver had {free} free",
        None,
        requested=rounded,
        rounded=rounded,
        segment=needed_from_driver(rounded, settings),
        device=device,
        place=place_in_program(events[index].frames),
        elsewhere=elsewhere(loaded, device, index),
    )


def _ranges(loaded: LoadedSnapshot, device: int, events: Sequence[TraceEvent]) -> list[Span]:
    """Where the program's own ranges begin."""
    found = []
    for one in named_ranges(loaded, device, events)[:_MOST_RANGES]:
        moment = Moment({device: one.begin}, {})
        found.append(Span("annotation", one.name[:_MOST_WORDS], moment, moment))
    return found
