"""A snapshot from plain data (what PyTorch, a pickle or a JSON text gives), and back, with every value checked.

The data may be anybody's: an error says where in it something is wrong. Thousands of events share few stacks, so each stack is
converted once, in both directions. What is written has PyTorch's own keys (the schema of 2.10), so its `_memory_viz.py` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

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

# 64-bit figures; a bigger one is damage. Devices are counted from 0, and a list is as long as the highest.
_LIMIT = 1 << 64
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


class PlainDataError(ValueError):
    """The data are not a snapshot; the text says where they differ from one."""


def snapshot_from_data(data: Any) -> Snapshot:
    """The snapshot in the dictionary of `torch.cuda.memory._snapshot()`, or in the list of `torch.cuda.memory_snapshot()`.

    Any PyTorch from 2.0 on. A dictionary may lack its segments or its traces, not both. Raises PlainDataError.
    """
    if isinstance(data, list):
        data = {"segments": data}
    if not isinstance(data, dict) or not ("segments" in data or "device_traces" in data):
        raise PlainDataError("it holds neither 'segments' nor 'device_traces'")
    stacks, parts = _Stacks(), _RepeatGuard()
    segments = parts.take(_list(data.get("segments", []), "segments"), "segments")
    traces = _list(data.get("device_traces", []), "device_traces")
    if len(traces) > _MOST_DEVICES:
        _wrong("device_traces", f"a list of at most {_MOST_DEVICES:,}", traces)
    annotations = _list(data.get("external_annotations") or [], "external_annotations")
    return Snapshot(
        tuple(_segment(segment, f"segments[{number}]", stacks, parts) for number, segment in enumerate(segments)),
        tuple(_trace(trace, f"device_traces[{number}]", stacks, parts) for number, trace in enumerate(traces)),
        dict(_dict(data.get("allocator_settings") or {}, "allocator_settings")),
        tuple(dict(_dict(note, f"external_annotations[{number}]")) for number, note in enumerate(annotations)),
    )


def segments_from_data(segments: Sequence[Any]) -> tuple[Segment, ...]:
    """Segments as PyTorch lists them. Raises PlainDataError."""
    stacks, parts = _Stacks(), _RepeatGuard()
    return tuple(_segment(segment, f"segments[{number}]", stacks, parts) for number, segment in enumerate(segments))


def events_from_data(events: Sequence[Any]) -> tuple[TraceEvent, ...]:
    """Events of one device, as PyTorch lists them. Raises PlainDataError."""
    return _trace(events, "device_traces", _Stacks(), _RepeatGuard())


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
            "user_metadata": "",
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


class _Stacks:
    """Lists of frames to tuples. A list is recognised by its identity, which holds as long as the data are there."""

    def __init__(self) -> None:
        self._stacks: dict[int, tuple[Frame, ...]] = {}
        self._frames: dict[int, Frame] = {}
        self._equal: dict[tuple[Frame, ...], tuple[Frame, ...]] = {}

    def of(self, frames: Any, where: str) -> tuple[Frame, ...]:
        if frames is None:
            return ()
        known = self._stacks.get(id(frames))
        if known is None:
            # JSON has no shared lists: equal ones become one here.
            converted = tuple(self._frame(frame, where) for frame in _list(frames, where))
            known = self._stacks[id(frames)] = self._equal.setdefault(converted, converted)
        return known

    def _frame(self, data: Any, where: str) -> Frame:
        known = self._frames.get(id(data))
        if known is None:
            _dict(data, where)
            filename, name, line = data.get("filename"), data.get("name"), data.get("line")
            if type(filename) is not str or type(name) is not str or type(line) is not int:
                _wrong(where, "a frame of filename, name and line", data)
            known = self._frames[id(data)] = Frame(readable(filename), readable(name), line)
        return known


def readable(text: str) -> str:
    """The text, with what no encoding can carry (half of a surrogate pair) replaced."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _segment(data: Any, where: str, stacks: _Stacks, parts: _RepeatGuard) -> Segment:
    _dict(data, where)
    start = address = _int(data, "address", where)
    blocks = []
    for number, block in enumerate(parts.take(_list(data.get("blocks"), f"{where}.blocks"), f"{where}.blocks")):
        inside = f"{where}.blocks[{number}]"
        _dict(block, inside)
        address = _int(block, "address", inside, address)
        size = _int(block, "size", inside)
        state = block.get("state")
        if type(state) is not str or state not in _STATES:
            _wrong(f"{inside}.state", "a state of a block", state)
        requested = _int(block, "requested_size", inside, size)
        frames = block.get("frames")
        history = block.get("history")
        if history:  # 2.0: the block's last tenant comes first
            newest = _dict(_list(history, f"{inside}.history")[0], f"{inside}.history[0]")
            frames = newest.get("frames")
            if "requested_size" not in block:
                requested = _int(newest, "real_size", f"{inside}.history[0]", size)
        blocks.append(Block(address, size, requested, _STATES[state], stacks.of(frames, f"{inside}.frames")))
        address += size
    pool = data.get("segment_type")
    if type(pool) is not str or pool not in (SMALL_POOL, LARGE_POOL):
        _wrong(f"{where}.segment_type", "'small' or 'large'", pool)
    device = _int(data, "device", where, 0)
    if device >= _MOST_DEVICES:
        _wrong(f"{where}.device", f"below {_MOST_DEVICES:,}", device)
    return Segment(
        device,
        start,
        _int(data, "total_size", where),
        _int(data, "stream", where, 0),
        pool,
        tuple(blocks),
        data.get("is_expandable", False) is True,
        _pool_id(data.get("segment_pool_id", (0, 0)), where),
        stacks.of(data.get("frames"), f"{where}.frames"),
    )


def _trace(trace: Any, where: str, stacks: _Stacks, parts: _RepeatGuard) -> tuple[TraceEvent, ...]:
    events = []
    stack_of = stacks.of
    for index, data in enumerate(parts.take(_list(trace, where), where)):
        try:
            action = data["action"]
            address = data["device_free" if action == "oom" else "addr"]
            size = data["size"]
            stream = data.get("stream", 0)
            time_us = data.get("time_us", 0)
            frames = data.get("frames")
        except KeyError as error:
            _wrong(f"{where}[{index}].{error.args[0]}", "there")
        except (TypeError, AttributeError):
            _wrong(f"{where}[{index}]", "a dictionary", data)
        if (
            type(address) is not int
            or type(size) is not int
            or type(stream) is not int
            or type(time_us) is not int
            or not (0 <= address < _LIMIT and 0 <= size < _LIMIT and 0 <= stream < _LIMIT and 0 <= time_us < _LIMIT)
            or type(action) is not str
        ):
            _wrong_event(data, f"{where}[{index}]")
        event = TraceEvent(
            action, address, size, stream, time_us, stack_of(frames, f"{where}[..].frames") if frames else ()
        )
        if "pool_id" in data:
            event = event._replace(pool_id=_pool_id(data["pool_id"], where))
        events.append(event)
    return tuple(events)


def _wrong_event(data: Mapping[str, Any], where: str) -> NoReturn:
    """Says which of an event's values it is."""
    action = data["action"]
    if type(action) is not str:
        _wrong(f"{where}.action", "a word", action)
    for key in ("device_free" if action == "oom" else "addr", "size", "stream", "time_us"):
        _int(data, key, where, 0)
    raise AssertionError("one of them is wrong")


def _pool_id(value: Any, where: str) -> tuple[int, int]:
    if not isinstance(value, (tuple, list)) or len(value) != 2 or any(type(part) is not int for part in value):
        _wrong(f"{where}: the pool id", "two whole numbers", value)
    return value[0], value[1]


def _int(data: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = data.get(key, default)
    if type(value) is not int or not 0 <= value < _LIMIT:
        _wrong(f"{where}.{key}", "there" if value is None else "a whole number of up to 64 bits", value)
    return value


def _list(value: Any, where: str) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        _wrong(where, "a list", value)
    return value


def _dict(value: Any, where: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        _wrong(where, "a dictionary", value)
    return value


def _wrong(where: str, expected: str, value: Any = None) -> NoReturn:
    found = "" if value is None else f", but {_short(value)}"
    raise PlainDataError(f"{where} is not {expected}{found}") from None


def _short(value: Any) -> str:
    if isinstance(value, (dict, list, tuple)):
        return f"a {type(value).__name__} of {len(value):,}"
    if isinstance(value, int) and value.bit_length() > 128:
        return "a huge number"
    return repr(value)[:60]
