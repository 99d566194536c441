"""Where a snapshot comes from: the PyTorch that wrote it, how its recording began, and what was not recorded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from typing import Any

from gpumem_magic.snapshot.model import INACTIVE, Segment, TraceEvent
from gpumem_magic.units import human

_SAMPLE = 64


@dataclass(frozen=True)
class Beginning:
    """How the recording of one device began, and what it has.

    kind: "empty" (the allocator held nothing: the trace tells all), "middle", or "none" (no trace of use). overran: it began
    in the middle because a full ring buffer dropped the oldest events, as far as its length tells. has_frames: some event or
    block has a stack. missing: kinds of events that a whole trace has and this one lacks. in_use: bytes of the blocks in use at
    the end.
    """

    device: int
    kind: str
    events: int
    segments: int
    overran: bool
    has_frames: bool
    missing: tuple[str, ...]
    in_use: int

    def notes(self) -> list[str]:
        """What it lacks, one sentence each."""
        notes = []
        if self.kind == "none":
            notes.append(
                f"The recording has no trace, only the state at the end ({human(self.in_use)} in use): "
                "_record_memory_history was off, or on with enabled='state'."
            )
        elif self.overran:
            notes.append(
                f"The recording begins in the middle: it has exactly {self.events:,} events, so the ring buffer "
                "probably overran (max_entries) and dropped the oldest."
            )
        elif self.kind == "middle":
            notes.append("The recording begins in the middle: memory was in use before its first event.")
        if self.kind != "none" and self.missing:
            notes.append(f"The recording has no {' or '.join(self.missing)} events.")
        if not self.has_frames:
            notes.append("The recording has no stacks, so it does not say where memory was requested.")
        return notes


def beginning_of(device: int, final: Sequence[Segment], events: Sequence[TraceEvent]) -> Beginning:
    """How the recording of a device began, from its segments at the end and its events."""
    actions = {event.action for event in events}
    used = any(action != "snapshot" for action in actions) and len(events) > 1
    kind = "none"
    if used:
        kind = "empty" if _is_complete(final, events) else "middle"
    pairs = (("alloc", bool(final)), ("free_requested", "free_completed" in actions))
    missing = [action for action, expected in pairs if expected and action not in actions]
    if final and not actions & {"segment_alloc", "segment_map"} and kind == "middle" and "free_requested" in missing:
        missing.append("segment")
    stacks: Iterable[bool] = (bool(event.frames) for event in events)
    blocks = [block for segment in final for block in segment.blocks]
    return Beginning(
        device=device,
        kind=kind,
        events=len(events),
        segments=len(final),
        overran=kind == "middle" and _is_a_limit(len(events)),
        has_frames=any(stacks) or any(block.frames for block in blocks),
        missing=tuple(missing) if used else (),
        in_use=sum(block.size for block in blocks if block.state != INACTIVE),
    )


def _is_complete(final: Sequence[Segment], events: Sequence[TraceEvent]) -> bool:
    """Whether all that is freed, released or left was allocated and opened in the trace."""
    live: set[int] = set()
    waiting: set[int] = set()
    opened: set[int] = set()
    mapped = 0
    for event in events:
        action, address = event.action, event.address
        if action == "alloc":
            live.add(address)
        elif action == "free_requested":
            if address not in live:
                return False
            waiting.add(address)
        elif action == "free_completed":
            if address not in live:
                return False
            live.discard(address)
        elif action == "segment_alloc":
            opened.add(address)
        elif action == "segment_free":
            if address not in opened:
                return False
            opened.discard(address)
        elif action == "segment_map":
            mapped += event.size
        elif action == "segment_unmap":
            mapped -= event.size
            if mapped < 0:
                return False
    plain = [segment for segment in final if not segment.is_expandable]
    left = {block.address for segment in final for block in segment.blocks if block.state != INACTIVE}
    return (
        all(segment.address in opened for segment in plain)
        and sum(segment.total_size for segment in final if segment.is_expandable) == mapped
        and left <= live
    )


def _is_a_limit(events: int) -> bool:
    """Whether a number of events is one that a person gives as `max_entries`."""
    return events >= 1000 and (events % 1000 == 0 or events & (events - 1) == 0)


def version_of(data: Any, keys: Set[Any]) -> str:
    """The PyTorch versions that write these keys: ``2.5-2.7``, or ``unknown`` where too little is there to tell.

    keys: of the events.
    """
    segments = data if isinstance(data, list) else data.get("segments", ())
    blocks = [block for segment in islice(segments, _SAMPLE) for block in islice(segment["blocks"], _SAMPLE)]
    if any("history" in block for block in blocks) or (blocks and not any("address" in block for block in blocks)):
        return "2.0"
    if isinstance(data, list):
        return "2.1 or newer" if segments else "unknown"
    settings = data.get("allocator_settings") or {}
    if keys & {"pool_id", "forward_frames"}:
        return "2.13 or newer"
    if "max_round_threshold" in settings or "throw_on_cudamalloc_oom" in settings:
        return "2.13 or newer"
    if "user_metadata" in keys:
        return "2.10 or newer"
    if "graph_capture_record_stream_reuse" in settings:
        return "2.9" if "compile_context" in keys else "2.9 or newer"
    if "compile_context" in keys:
        return "2.8-2.9"
    if "external_annotations" in data:
        return "2.5-2.7" if keys else "2.5 or newer"
    if "allocator_settings" in data:
        return "2.3-2.4"
    if "time_us" in keys:
        return "2.2"
    return "2.1" if keys else "2.1-2.2" if segments else "unknown"
