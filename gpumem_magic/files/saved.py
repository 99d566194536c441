"""A measured cell's recording as a snapshot file, which PyTorch's own tools open and which loads to the same report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from gpumem_magic.allocator.settings import settings_to_dict
from gpumem_magic.attribution.view import DeviceView
from gpumem_magic.files.extra import labels_to_save, start_to_save
from gpumem_magic.recording.model import Recording
from gpumem_magic.report.model import ReportData
from gpumem_magic.report.schema import report_to_dict
from gpumem_magic.snapshot.files import write
from gpumem_magic.snapshot.model import INACTIVE, Segment, Snapshot, TraceEvent


def save_snapshot(report: ReportData, path: str | os.PathLike[str]) -> None:
    """Writes the recording behind a report. Raises ValueError where the report has none, OSError where it can't be written."""
    recording = report.recording
    if recording is None:
        raise ValueError("this report has no recording: measure the cell again, or use the snapshot file")
    if recording.file is not None:
        # As it was read.
        write(recording.file.snapshot, path, recording.file.extra)
        return
    made = {one.device.index: one.source for one in (report, *report.devices)}
    views = {device: made.get(device) or DeviceView(recording, device) for device in sorted(recording.logs)}
    extra = {
        "torch": recording.torch,
        "report": report_to_dict(report),
        "start": {str(device): start_to_save(_of_device(view.log.start, device)) for device, view in views.items()},
        "labels": {str(device): labels_to_save(view.timeline, view.labels) for device, view in views.items()},
    }
    write(snapshot_of(recording, views), path, extra)


def snapshot_of(recording: Recording, views: dict[int, DeviceView]) -> Snapshot:
    """The segments at the recording's end and its events, one trace for each device number, as PyTorch has them."""
    traces: list[tuple[TraceEvent, ...]] = [() for _ in range(max(views) + 1)]
    segments: list[Segment] = []
    for device, view in views.items():
        traces[device] = tuple(view.log.events)
        segments += _with_stacks(view)
    settings = views[recording.primary].log.settings
    return Snapshot(tuple(segments), tuple(traces), settings_to_dict(settings))


def _of_device(segments: Sequence[Segment], device: int) -> list[Segment]:
    """A log's own segments name the device as its allocator does, which may be another number."""
    return [replace(segment, device=device) for segment in segments]


def _with_stacks(view: DeviceView) -> Sequence[Segment]:
    """The segments at the end, their blocks with the stacks of the events that made them."""
    end = len(view.timeline)
    births = {one.address: one.born for one in view.timeline.allocations if one.born >= 0}
    return [
        replace(
            segment,
            device=view.device,
            blocks=tuple(
                replace(block, frames=view.log.events[births[block.address]].frames)
                if block.state != INACTIVE and block.address in births
                else block
                for block in segment.blocks
            ),
        )
        for segment in view.timeline.segments_at(end)
    ]
