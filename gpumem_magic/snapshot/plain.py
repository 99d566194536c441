"""A snapshot from plain data (what PyTorch, a pickle or a JSON text gives), and back, with every value checked.

The data may be anybody's: an error says where in it something is wrong. Thousands of events share few stacks, so each stack is
converted once, in both directions. What is written has PyTorch's own keys (the schema of 2.10), so its `_memory_viz.py` reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpumem_magic.snapshot.events import EventReader
from gpumem_magic.snapshot.model import (
    ACTIVE,
    INACTIVE,
    LARGE_POOL,
    PENDING_FREE,
    SMALL_POOL,
    Block,
    Frame,
    Segment,
    Snapshot,
    TraceEvent,
)
from gpumem_magic.snapshot.values import PlainDataError, dict_of, int_of, list_of, pool_id_of, wrong

# Devices are counted from 0, and a list is as long as the highest.
_MOST_DEVICES = 4096
# Events (and blocks, and segments) that are one object in the file and stand for several.
_MOST_REPEATED = 10_000
_STATES = {
    ACTIVE: ACTIVE,
    PENDING_FREE: PENDING_FREE,
    "active_awaiting_free": PENDING_FREE,
    INACTIVE: INACTIVE,
}


# What a segment says of itself under PyTorch's own names.
_OF_A_SEGMENT = "device address total_size allocated_size active_size requested_size stream segment_type"


def snapshot_from_data(data: Any, reader: EventReader | None = None) -> Snapshot:
    """The snapshot in the dictionary of `torch.cuda.memory._snapshot()`, or in the list of `torch.cuda.memory_snapshot()`.

    Any PyTorch from 2.0 on. A dictionary may lack its segments or its traces, not both. reader: where it made the events
    already, as the data were read. Raises PlainDataError.
    """
    if isinstance(data, list):
        if data and not any(isinstance(one, dict) for one in data):
            raise PlainDataError("it holds a list, but not one of segments: it is no snapshot")
        data = {"segments": data}
    if isinstance(data, dict) and "schema" in data and ("checkpoints" in data or "files" in data):
        raise PlainDataError(
            "it is a report that gpumem wrote, not a snapshot: gpumem_magic.Report.load reads that of one file"
        )
    if not isinstance(data, dict) or not ("segments" in data or "device_traces" in data):
        raise PlainDataError("it holds neither 'segments' nor 'device_traces'")
    reader, parts = reader or EventReader(), _RepeatGuard()
    segments = parts.take(list_of(data.get("segments", []), "segments"), "segments")
    traces = list_of(data.get("device_traces", []), "device_traces")
    if len(traces) > _MOST_DEVICES:
        wrong("device_traces", f"a list of at most {_MOST_DEVICES:,}", traces)
    annotations = list_of(data.get("external_annotations") or [], "external_annotations")
    return Snapshot(
        tuple(_segment(segment, f"segments[{number}]", reader, parts) for number, segment in enumerate(segments)),
        tuple(_trace(trace, f"device_traces[{number}]", reader, parts) for number, trace in enumerate(traces)),
        dict(dict_of(data.get("allocator_settings") or {}, "allocator_settings")),
        tuple(dict(dict_of(note, f"external_annotations[{number}]")) for number, note in enumerate(annotations)),
    )


def segments_from_data(segments: Sequence[Any]) -> tuple[Segment, ...]:
    """Segments as PyTorch lists them. Raises PlainDataError."""
    reader, parts = EventReader(), _RepeatGuard()
    return tuple(_segment(segment, f"segments[{number}]", reader, parts) for number, segment in enumerate(segments))


def events_from_data(events: Sequence[Any]) -> tuple[TraceEvent, ...]:
    """Events of one device, as PyTorch lists them. Raises PlainDataError."""
    return _trace(events, "device_traces", EventReader(), _RepeatGuard())


def snapshot_to_data(snapshot: Snapshot) -> dict[str, Any]:
    """The dictionary of `torch.cuda.memory._snapshot()`, with equal stacks as one list each, so that a pickle stays small."""
    shared: dict[tuple[Frame, ...], list[dict[str, Any]]] = {}
    single: dict[Frame, dict[str, Any]] = {}

    def stack(frames: tuple[Frame, ...]) -> list[dict[str, Any]]:
        known = shared.get(frames)
        if known is None:
            for frame in frames:
                if frame not in single:
                    single[frame] = {"filename": frame.filename, "name": frame.name, "line": frame.line}
            known = shared[frames] = [single[frame] for frame in frames]
        return known

    def segment_data(segment: Segment) -> dict[str, Any]:
        return {
            **{key: getattr(segment, key) for key in _OF_A_SEGMENT.split()},
            "segment_pool_id": tuple(segment.segment_pool_id),
            "is_expandable": segment.is_expandable,
            "frames": stack(segment.frames),
            "blocks": [
                {
                    "address": block.address,
                    "size": block.size,
                    "requested_size": block.requested_size,
                    "state": block.state,
                    "frames": stack(block.frames),
                }
                for block in segment.blocks
            ],
        }

    def event_data(event: TraceEvent) -> dict[str, Any]:
        data: dict[str, Any] = {
            "action": event.action,
            "device_free" if event.action == "oom" else "addr": event.address,
            "size": event.size,
            "stream": event.stream,
            "time_us": event.time_us,
            "compile_context": "N/A",
            "user_metadata": event.metadata,
        }
        if event.frames:  # only where a stack was recorded, as in PyTorch
            data["frames"] = stack(event.frames)
        if event.pool_id is not None:
            data["pool_id"] = event.pool_id
        return data

    return {
        "segments": [segment_data(segment) for segment in snapshot.segments],
        "device_traces": [[event_data(event) for event in trace] for trace in snapshot.device_traces],
        "allocator_settings": dict(snapshot.allocator_settings),
        "external_annotations": [dict(note) for note in snapshot.external_annotations],
    }


class _RepeatGuard:
    """The events, blocks and segments that were taken. In a recording each is its own object; a small file in which a few stand
    for very many was made to take long."""

    def __init__(self) -> None:
        self._taken: set[int] = set()
        self._repeated = 0

    def take(self, parts: Sequence[Any], where: str) -> Sequence[Any]:
        expected = len(self._taken) + len(parts)
        self._taken.update(map(id, parts))
        self._repeated += expected - len(self._taken)
        if self._repeated > _MOST_REPEATED:
            raise PlainDataError(f"{where} names the same things again, {self._repeated:,} times so far")
        return parts


def _segment(data: Any, where: str, reader: EventReader, parts: _RepeatGuard) -> Segment:
    dict_of(data, where)
    start = address = int_of(data, "address", where)
    blocks = []
    for number, block in enumerate(parts.take(list_of(data.get("blocks"), f"{where}.blocks"), f"{where}.blocks")):
        inside = f"{where}.blocks[{number}]"
        dict_of(block, inside)
        address = int_of(block, "address", inside, address)
        size = int_of(block, "size", inside)
        state = block.get("state")
        if type(state) is not str or state not in _STATES:
            wrong(f"{inside}.state", "a state of a block", state)
        requested = int_of(block, "requested_size", inside, size)
        frames = block.get("frames")
        history = block.get("history")
        if history:  # 2.0: the block's last tenant comes first
            newest = dict_of(list_of(history, f"{inside}.history")[0], f"{inside}.history[0]")
            frames = newest.get("frames")
            if "requested_size" not in block:
                requested = int_of(newest, "real_size", f"{inside}.history[0]", size)
        blocks.append(Block(address, size, requested, _STATES[state], reader.stack(frames, f"{inside}.frames")))
        address += size
    pool = data.get("segment_type")
    if type(pool) is not str or pool not in (SMALL_POOL, LARGE_POOL):
        wrong(f"{where}.segment_type", "'small' or 'large'", pool)
    device = int_of(data, "device", where, 0)
    if device >= _MOST_DEVICES:
        wrong(f"{where}.device", f"below {_MOST_DEVICES:,}", device)
    return Segment(
        device,
        start,
        int_of(data, "total_size", where),
        int_of(data, "stream", where, 0),
        pool,
        tuple(blocks),
        data.get("is_expandable", False) is True,
        pool_id_of(data.get("segment_pool_id", (0, 0)), where),
        reader.stack(data.get("frames"), f"{where}.frames"),
    )


def _trace(trace: Any, where: str, reader: EventReader, parts: _RepeatGuard) -> tuple[TraceEvent, ...]:
    return reader.trace(parts.take(list_of(trace, where), where), where)
