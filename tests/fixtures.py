"""A measured run as a small file: numbers and a few words, no stacks, no names of people, computers or folders."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gpumem_magic.devices.base import Counters, DeviceFacts, DeviceLog
from gpumem_magic.recording.model import Checkpoint, Moment, Recording, Sighting, Span
from gpumem_magic.report.build import build
from gpumem_magic.report.model import LATER_CATEGORIES
from gpumem_magic.snapshot.model import Block, Segment, TraceEvent
from gpumem_magic.snapshot.rules import AllocatorSettings

SCHEMA = 1


@dataclass(frozen=True)
class Fixture:
    """told: for each row, what PyTorch's own functions said: allocated, reserved, highest allocated since the start.

    categories: for each row, what the report said when it was recorded.
    """

    recording: Recording
    told: list[tuple[int, int, int]]
    categories: list[dict[str, int | None]]


def save(recording: Recording, told: Sequence[Sequence[int]], path: Path) -> None:
    """Writes the run of a recording's primary device. Rows are those of the recording's statements."""
    log = recording.logs[recording.primary]
    points = [point for point in recording.checkpoints if recording.primary in point.moment.counters]
    report = build(recording)
    data = {
        "schema": SCHEMA,
        "torch": recording.torch,
        "facts": asdict(replace(log.facts, uuid=None)),
        "settings": asdict(log.settings),
        "start": [_segment_data(segment) for segment in log.start],
        "events": [list(event[:4]) for event in log.events],
        "origins": sorted(log.origins.items()),
        "checkpoints": [
            [point.kind, point.label, point.line, point.iteration, point.loops, _moment_data(point.moment)]
            for point in points
        ],
        "spans": [
            [span.kind, span.label, _moment_data(span.start), _moment_data(span.end), span.failed]
            for span in recording.spans
        ],
        "sightings": [
            [look.position, look.address, look.role, look.name]
            for look in recording.sightings
            if look.device == recording.primary
        ],
        "told": [list(one) for one in told],
        "categories": [dict(row.categories) for row in report.checkpoints],
    }
    path.write_bytes(gzip.compress(json.dumps(data, separators=(",", ":")).encode(), mtime=0))


def load(path: Path) -> Fixture:
    data = json.loads(gzip.decompress(path.read_bytes()))
    assert data["schema"] == SCHEMA
    facts = DeviceFacts(**data["facts"])
    index = facts.index
    log = DeviceLog(
        facts,
        tuple(_segment(one) for one in data["start"]),
        [TraceEvent(*event) for event in data["events"]],
        {int(event): str(origin) for event, origin in data["origins"]},
        settings=AllocatorSettings(**{key: _tuples(value) for key, value in data["settings"].items()}),
    )
    recording = Recording(
        data["torch"],
        index,
        {index: log},
        tuple(
            Checkpoint(kind, label, label, line, _moment(index, moment), tuple(iteration), tuple(loops))
            for kind, label, line, iteration, loops, moment in data["checkpoints"]
        ),
        tuple(
            Span(kind, label, _moment(index, start), _moment(index, end), failed)
            for kind, label, start, end, failed in data["spans"]
        ),
        tuple(Sighting(index, *look) for look in data["sightings"]),
    )
    categories = [{**LATER_CATEGORIES, **row} for row in data["categories"]]
    return Fixture(recording, [(one[0], one[1], one[2]) for one in data["told"]], categories)


def _tuples(value: Any) -> Any:
    """JSON has lists where settings have tuples."""
    return tuple(_tuples(one) for one in value) if isinstance(value, list) else value


def _segment_data(segment: Segment) -> list[Any]:
    blocks = [[block.address, block.size, block.requested_size, block.state] for block in segment.blocks]
    return [
        segment.device,
        segment.address,
        segment.total_size,
        segment.stream,
        segment.segment_type,
        blocks,
        segment.is_expandable,
        list(segment.segment_pool_id),
    ]


def _segment(data: Sequence[Any]) -> Segment:
    *first, blocks, is_expandable, pool = data
    return Segment(*first, tuple(Block(*block) for block in blocks), is_expandable, (pool[0], pool[1]))


def _moment_data(moment: Moment) -> list[Any]:
    (index,) = moment.positions
    counters = moment.counters[index]
    return [moment.tick, moment.positions[index], *counters]


def _moment(index: int, data: Sequence[Any]) -> Moment:
    return Moment({index: data[1]}, {index: Counters(*data[2:])}, data[0])
