"""Whether a recording can be replayed, and from which state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpumem_magic.allocator.adoption import check_adoptable
from gpumem_magic.snapshot.model import INACTIVE, Segment, TraceEvent
from gpumem_magic.snapshot.rules import DEFAULT_SETTINGS, AllocatorSettings
from gpumem_magic.snapshot.start import start_of
from gpumem_magic.snapshot.timeline import Timeline
from gpumem_magic.units import counted


@dataclass(frozen=True)
class Seed:
    """start: the segments when the trace began, () for an empty allocator. reason: why the trace can't be replayed, in words;
    None where it can. unsettled: addresses of blocks from before the trace whose size is a lower bound (by up to 1 MiB each),
    so that a replay may differ from the recording because of them. raised: how many of these are larger than their requests
    because of where the recording did not put blocks (see `settling`).
    """

    start: tuple[Segment, ...] = ()
    reason: str | None = None
    unsettled: frozenset[int] = frozenset()
    raised: int = 0

    @property
    def uncertain(self) -> int:
        """How many blocks are unsettled."""
        return len(self.unsettled)


def seed_of(
    final: Sequence[Segment], events: Sequence[TraceEvent], settings: AllocatorSettings = DEFAULT_SETTINGS
) -> Seed:
    """What one device's trace can be replayed from, given its segments at the end."""
    if not events:
        return Seed(reason="there is no trace: the memory history was not recorded")
    if not any(event.action == "alloc" for event in events):
        what = "its one event is" if len(events) == 1 else f"none of its {len(events):,} events is"
        return Seed(reason=f"{what} {'no' if len(events) == 1 else 'an'} allocation: only the state was recorded")
    try:
        check_adoptable(final, final)
    except ValueError as error:
        return Seed(reason=f"the segments at the end are not whole: {error}")
    missing = _missing_frees(events)
    if missing:
        what = counted(missing, "free is", "frees are")
        return Seed(reason=f"{what} missing: the trace was filtered, or its oldest events were dropped")
    found = start_of(final, events, settings)
    if found.orphans:
        what = counted(found.orphans, "block from before the trace lies", "blocks from before the trace lie")
        return Seed(reason=f"{what} in segments that are not known")
    try:
        check_adoptable(found.segments, found.segments)
    except ValueError as error:
        return Seed(reason=f"the segments at the start can't be worked out: {error}")
    timeline = Timeline(found.segments, events, settings)
    if timeline.unplaced:
        return Seed(
            reason=f"{counted(timeline.unplaced, 'allocation lies', 'allocations lie')} in no segment of the file"
        )
    if timeline.unmatched:
        what = counted(timeline.unmatched, "event is", "events are")
        return Seed(reason=f"{what} about blocks or segments that are not known")
    if _used(timeline.segments_at(len(timeline))) != _used(final):
        return Seed(reason="the trace does not lead to the segments that the file has at its end")
    return Seed(found.segments, None, found.unsettled)


def _missing_frees(events: Sequence[TraceEvent]) -> int:
    """How often an address was allocated again without having been freed."""
    used: set[int] = set()
    missing = 0
    for event in events:
        if event.action == "alloc":
            missing += event.address in used
            used.add(event.address)
        elif event.action == "free_completed":
            used.discard(event.address)
    return missing


def _used(segments: Sequence[Segment]) -> list[tuple[int, int, str]]:
    return sorted(
        (block.address, block.requested_size, block.state)
        for segment in segments
        for block in segment.blocks
        if block.state != INACTIVE
    )
