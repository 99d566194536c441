"""The model of PyTorch's memory snapshot (`torch.cuda.memory._snapshot()`): segments, their blocks, and trace events.

Every source of memory produces these, and whatever stands above never asks which source it was. All sizes are bytes. The
dictionaries that `to_dict` makes have PyTorch's own keys (the schema of 2.10), so its `_memory_viz.py` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

SMALL_POOL = "small"
LARGE_POOL = "large"

ACTIVE = "active_allocated"
PENDING_FREE = "active_pending_free"
INACTIVE = "inactive"


class Frame(NamedTuple):
    """One line of a stack, innermost first in a stack."""

    filename: str
    name: str
    line: int


class TraceEvent(NamedTuple):
    """One thing that the allocator did.

    action: alloc, free_requested, free_completed, segment_alloc, segment_free, segment_map, segment_unmap, snapshot or oom.
    address: of the block or segment; for oom the device's free bytes at that moment (PyTorch's `device_free`).
    size: alloc and free_* carry the *requested* bytes, segment_* real bytes, oom the rounded request.
    pool_id: of the private pool that it is about, (0, 0) for the default one; None where the trace does not say (up to 2.12).
    """

    action: str
    address: int
    size: int
    stream: int = 0
    time_us: int = 0
    frames: tuple[Frame, ...] = ()
    pool_id: tuple[int, int] | None = None


@dataclass(frozen=True)
class Block:
    """A piece of a segment. `requested_size` of an inactive block is its last tenant's, and means nothing."""

    address: int
    size: int
    requested_size: int
    state: str
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True)
class Segment:
    """Memory that the allocator got from the driver in one piece, cut into blocks that touch each other."""

    device: int
    address: int
    total_size: int
    stream: int
    segment_type: str
    blocks: tuple[Block, ...]
    is_expandable: bool = False
    segment_pool_id: tuple[int, int] = (0, 0)
    frames: tuple[Frame, ...] = ()

    @property
    def allocated_size(self) -> int:
        return sum(block.size for block in self.blocks if block.state == ACTIVE)

    @property
    def active_size(self) -> int:
        return sum(block.size for block in self.blocks if block.state != INACTIVE)

    @property
    def requested_size(self) -> int:
        return sum(block.requested_size for block in self.blocks if block.state != INACTIVE)


@dataclass(frozen=True)
class Snapshot:
    """All segments of all devices, and one trace per device index, oldest event first."""

    segments: tuple[Segment, ...]
    device_traces: tuple[tuple[TraceEvent, ...], ...]
    allocator_settings: Mapping[str, Any] = field(default_factory=dict)
    external_annotations: tuple[Mapping[str, Any], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "segments": [segment_to_dict(segment) for segment in self.segments],
            "device_traces": [[event_to_dict(event) for event in trace] for trace in self.device_traces],
            "allocator_settings": dict(self.allocator_settings),
            "external_annotations": [dict(note) for note in self.external_annotations],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Snapshot:
        """Reads a snapshot dictionary of any PyTorch from 2.1 on (2.0's blocks without addresses too).

        Raises ValueError, naming the key, where the data is not one.
        """
        try:
            return cls(
                segments=tuple(segment_from_dict(segment) for segment in data["segments"]),
                device_traces=tuple(
                    tuple(event_from_dict(event) for event in trace) for trace in data.get("device_traces", ())
                ),
                allocator_settings=dict(data.get("allocator_settings", {})),
                external_annotations=tuple(dict(note) for note in data.get("external_annotations", ())),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a PyTorch memory snapshot: {type(error).__name__}: {error}") from None


def _frames_to_list(frames: Sequence[Frame]) -> list[dict[str, Any]]:
    return [{"filename": frame.filename, "name": frame.name, "line": frame.line} for frame in frames]


def _frames_from_list(frames: Sequence[Mapping[str, Any]] | None) -> tuple[Frame, ...]:
    return tuple(Frame(str(frame["filename"]), str(frame["name"]), int(frame["line"])) for frame in frames or ())


def segment_to_dict(segment: Segment) -> dict[str, Any]:
    return {
        "device": segment.device,
        "address": segment.address,
        "total_size": segment.total_size,
        "allocated_size": segment.allocated_size,
        "active_size": segment.active_size,
        "requested_size": segment.requested_size,
        "stream": segment.stream,
        "segment_type": segment.segment_type,
        "segment_pool_id": tuple(segment.segment_pool_id),
        "is_expandable": segment.is_expandable,
        "frames": _frames_to_list(segment.frames),
        "blocks": [
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested_size,
                "state": block.state,
                "frames": _frames_to_list(block.frames),
            }
            for block in segment.blocks
        ],
    }


def segment_from_dict(data: Mapping[str, Any]) -> Segment:
    address = int(data["address"])
    blocks = []
    for block in data["blocks"]:
        address = int(block.get("address", address))
        state = "active_pending_free" if block["state"] == "active_awaiting_free" else str(block["state"])
        size = int(block["size"])
        blocks.append(
            Block(address, size, int(block.get("requested_size", size)), state, _frames_from_list(block.get("frames")))
        )
        address += size
    first, second = data.get("segment_pool_id", (0, 0))
    return Segment(
        device=int(data.get("device", 0)),
        address=int(data["address"]),
        total_size=int(data["total_size"]),
        stream=int(data["stream"]),
        segment_type=str(data["segment_type"]),
        blocks=tuple(blocks),
        is_expandable=bool(data.get("is_expandable", False)),
        segment_pool_id=(int(first), int(second)),
        frames=_frames_from_list(data.get("frames")),
    )


def event_to_dict(event: TraceEvent) -> dict[str, Any]:
    """PyTorch's form of an event; `frames` is there only where a stack was recorded, as in PyTorch."""
    data: dict[str, Any] = {
        "action": event.action,
        "device_free" if event.action == "oom" else "addr": event.address,
        "size": event.size,
        "stream": event.stream,
        "time_us": event.time_us,
        "compile_context": "N/A",
        "user_metadata": "",
    }
    if event.frames:
        data["frames"] = _frames_to_list(event.frames)
    if event.pool_id is not None:
        data["pool_id"] = event.pool_id
    return data


def event_from_dict(data: Mapping[str, Any]) -> TraceEvent:
    action = str(data["action"])
    pool_id = data.get("pool_id")
    return TraceEvent(
        action,
        int(data["device_free" if action == "oom" else "addr"]),
        int(data["size"]),
        int(data.get("stream", 0)),
        int(data.get("time_us", 0)),
        _frames_from_list(data.get("frames")),
        None if pool_id is None else (int(pool_id[0]), int(pool_id[1])),
    )
