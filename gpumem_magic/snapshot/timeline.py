"""What a device's memory looked like at any event of a trace, recounted from the segments at its start and the events.

Nothing here reads an allocator's counters, so it can be held against them. "Position p" is the moment after the first p
events. Traces carry requested sizes only; how big a block really was follows from the free piece that it was cut from.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from gpumem_magic.snapshot.model import ACTIVE, INACTIVE, PENDING_FREE, Block, Segment, TraceEvent, with_free_space
from gpumem_magic.snapshot.rangemax import RangeMax
from gpumem_magic.snapshot.recount import Allocation as Allocation
from gpumem_magic.snapshot.recount import Extent, Recount
from gpumem_magic.snapshot.rules import DEFAULT_SETTINGS, AllocatorSettings

# A list of the blocks in use is kept every so many events, or as many as it has blocks where those are more: so all lists
# but the last are no longer together than the trace. What lies between is counted up from there.
_STRIDE = 512


class Timeline:
    """The state at every position of one device's trace.

    start: the segments when the trace began, () for an empty allocator. A trace that begins in the middle without its start
    is counted as far as it goes. unmatched: the frees of blocks, and releases of segments, that are not known, and blocks
    whose free is missing. unplaced: the allocations in segments that are not known; they count with their rounded size.
    outside: the blocks that lie in no known segment, or reach out of theirs; what they have there counts as reserved.
    """

    def __init__(
        self,
        start: Sequence[Segment],
        events: Sequence[TraceEvent],
        settings: AllocatorSettings = DEFAULT_SETTINGS,
    ) -> None:
        recount = Recount(start, events, settings)
        self.allocations = recount.lives
        self.unmatched = recount.unmatched
        self.unplaced = recount.unplaced
        self.outside = recount.outside
        self._allocated = recount.allocated
        self._reserved = recount.reserved
        self._requested = recount.requested
        self._extents = recount.extents
        self._highest_allocated = RangeMax(self._allocated)
        self._highest_reserved = RangeMax(self._reserved)
        self._births, self._ends = self._index_lives()
        # Positions, and the blocks in use there.
        self._waypoints: list[int] = []
        self._live_at_waypoints: list[tuple[Allocation, ...]] = []
        self._keep_lists()

    def __len__(self) -> int:
        """The number of events; positions run from 0 to this."""
        return len(self._allocated) - 1

    @property
    def extents(self) -> Sequence[Extent]:
        """All memory that ever came from the driver, in pieces, each with the events that brought it and took it."""
        return self._extents

    def allocated_at(self, position: int) -> int:
        """Bytes of the blocks between their alloc and their free_requested."""
        return self._allocated[self._checked(position)]

    def reserved_at(self, position: int) -> int:
        """Bytes of the segments."""
        return self._reserved[self._checked(position)]

    def requested_at(self, position: int) -> int:
        """What the program asked for, of the same blocks as `allocated_at`."""
        return self._requested[self._checked(position)]

    def peak(self, begin: int, end: int) -> tuple[int, int]:
        """The highest allocated bytes at positions begin..end, both included, and the first position that has them."""
        return self._highest_allocated.highest(self._checked(begin), self._checked(end))

    def peak_reserved(self, begin: int, end: int) -> tuple[int, int]:
        """The same of the reserved bytes."""
        return self._highest_reserved.highest(self._checked(begin), self._checked(end))

    def live_at(self, position: int) -> list[Allocation]:
        """The allocations that `allocated_at` counts, oldest first."""
        return [life for life in self._used_at(position) if life.freed is None or life.freed >= position]

    def segments_at(self, position: int) -> tuple[Segment, ...]:
        """The segments and blocks then, by address. What no block uses is one free piece, as the allocator merges them."""
        alive = sorted(
            (extent for extent in self._extents if extent.holds(self._checked(position))),
            key=lambda extent: extent.address,
        )
        used = sorted(self._used_at(position), key=lambda life: life.address)
        addresses = [life.address for life in used]
        segments = []
        for joined in _joined(alive):
            first = bisect_right(addresses, joined.address - 1)
            last = bisect_right(addresses, joined.address + joined.size - 1)
            segments.append(_segment(joined, used[first:last], position))
        return tuple(segments)

    def largest_free_at(self, position: int, stream: int | None = None) -> int:
        """Bytes of the largest cached free block, of one stream or of all; 0 where there is none."""
        return max(
            (
                block.size
                for segment in self.segments_at(position)
                if stream is None or segment.stream == stream
                for block in segment.blocks
                if block.state == INACTIVE
            ),
            default=0,
        )

    def _checked(self, position: int) -> int:
        if not 0 <= position < len(self._allocated):
            raise IndexError(f"position {position} is not within 0..{len(self)}")
        return position

    def _index_lives(self) -> tuple[dict[int, Allocation], dict[int, list[Allocation]]]:
        births: dict[int, Allocation] = {}
        ends: dict[int, list[Allocation]] = {}
        for life in self.allocations:
            if life.born >= 0:
                births[life.born] = life
            if life.completed is not None:
                ends.setdefault(life.completed, []).append(life)
        return births, ends

    def _keep_lists(self) -> None:
        used = {life.index: life for life in self.allocations if life.born < 0}
        due = 0
        for position in range(len(self) + 1):
            if position:
                self._step(used, position - 1)
            if position >= due:
                self._waypoints.append(position)
                self._live_at_waypoints.append(tuple(used.values()))
                due = position + max(_STRIDE, len(used))

    def _step(self, used: dict[int, Allocation], event: int) -> None:
        for life in self._ends.get(event, ()):
            used.pop(life.index, None)
        if event in self._births:
            life = self._births[event]
            used[life.index] = life

    def _used_at(self, position: int) -> list[Allocation]:
        """Allocations whose memory is not free at a position: live ones and those that wait for a stream."""
        nearest = bisect_right(self._waypoints, self._checked(position)) - 1
        used = {life.index: life for life in self._live_at_waypoints[nearest]}
        for event in range(self._waypoints[nearest], position):
            self._step(used, event)
        return list(used.values())


def _joined(extents: Sequence[Extent]) -> list[Extent]:
    """Mapped ranges that touch are one segment in a snapshot; segments from cudaMalloc stay apart."""
    joined: list[Extent] = []
    for extent in extents:
        last = joined[-1] if joined else None
        if last is not None and last.joins(extent):
            joined[-1] = replace(last, size=last.size + extent.size)
        else:
            joined.append(extent)
    return joined


def _segment(extent: Extent, used: Sequence[Allocation], position: int) -> Segment:
    blocks = [
        Block(
            life.address,
            life.size,
            life.requested,
            ACTIVE if life.freed is None or life.freed >= position else PENDING_FREE,
        )
        for life in used
    ]
    return Segment(
        extent.device,
        extent.address,
        extent.size,
        extent.stream,
        extent.pool,
        with_free_space(extent.address, extent.size, blocks),
        extent.expandable,
        extent.pool_id,
    )
