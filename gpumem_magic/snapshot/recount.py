"""One walk through a trace: when each block lived, how big it was, and the bytes allocated, requested and reserved."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpumem_magic.snapshot.addresses import SortedAddresses
from gpumem_magic.snapshot.model import ACTIVE, BLOCK_ADDRESS, INACTIVE, Segment, TraceEvent
from gpumem_magic.snapshot.rules import AllocatorSettings, pool_of, pool_of_segment, round_size, should_split


@dataclass(slots=True, unsafe_hash=True)
class Allocation:
    """One block's life. Sizes are bytes; born, freed and completed are indices of events. Only `Recount` changes it.

    index: its place in `Timeline.allocations`. size: the block's, requested: the program's. born: of the alloc event, -1
    for one that was there at the start. freed: of free_requested (-1: before the start), None where that never came.
    completed: of free_completed, when the memory could be used again. requested is 0 where it is not known.
    """

    index: int
    address: int
    requested: int
    size: int
    stream: int
    born: int
    freed: int | None = None
    completed: int | None = None


@dataclass(slots=True)
class Extent:
    """Memory from the driver in one piece: a segment, or a mapped range of an expandable one.

    It is there at the positions after event `born` (-1: from the start) up to event `gone` (None: to the end).
    """

    device: int
    address: int
    size: int
    stream: int
    pool: str
    expandable: bool
    born: int
    gone: int | None = None
    pool_id: tuple[int, int] = (0, 0)

    def holds(self, position: int) -> bool:
        return self.born < position and (self.gone is None or self.gone >= position)

    def joins(self, other: Extent) -> bool:
        return (
            self.expandable
            and other.expandable
            and self.stream == other.stream
            and self.pool == other.pool
            and self.pool_id == other.pool_id
            and self.address + self.size == other.address
        )


class Recount:
    """Lives, extents, and for each position the bytes; see `Timeline`."""

    def __init__(self, start: Sequence[Segment], events: Sequence[TraceEvent], settings: AllocatorSettings) -> None:
        self.lives: list[Allocation] = []
        self.extents: list[Extent] = []
        self.unmatched = 0
        self.unplaced = 0
        self.outside = 0
        self.allocated = array("q")
        self.reserved = array("q")
        self.requested = array("q")
        self._settings = settings
        self._device = start[0].device if start else 0
        # What is there now: extents by their address, and the blocks in use by theirs, each with their addresses in order.
        self._extents: dict[int, Extent] = {}
        self._extent_starts = SortedAddresses()
        self._used: dict[int, Allocation] = {}
        self._used_starts = SortedAddresses()
        self._unknown_frees: set[int] = set()
        # What blocks have outside every segment, by the block's index.
        self._around: dict[int, list[Extent]] = {}
        self._now_allocated = self._now_reserved = self._now_requested = 0
        for segment in start:
            self._begin(segment)
        for life in list(self._used.values()):
            self._surround(life, -1)
        self._note()
        steps = {
            "alloc": self._alloc,
            "free_requested": self._free_requested,
            "free_completed": self._free_completed,
            "segment_alloc": self._map,
            "segment_map": self._map,
            "segment_free": self._unmap,
            "segment_unmap": self._unmap,
        }
        for index, event in enumerate(events):
            step = steps.get(event.action)
            if step is not None:
                step(index, event)
            self._note()

    def _note(self) -> None:
        self.allocated.append(self._now_allocated)
        self.reserved.append(self._now_reserved)
        self.requested.append(self._now_requested)

    def _begin(self, segment: Segment) -> None:
        if segment.total_size <= 0 or self._extents_within(segment.address, segment.total_size):
            # Two segments can't be in one place; the first stays.
            self.unmatched += 1
            return
        self._add_extent(
            Extent(
                segment.device,
                segment.address,
                segment.total_size,
                segment.stream,
                segment.segment_type,
                segment.is_expandable,
                -1,
                pool_id=segment.segment_pool_id,
            )
        )
        for block in segment.blocks:
            if block.state == INACTIVE:
                continue
            if block.size <= 0 or self._overlapping(block.address, block.size):
                self.unmatched += 1
                continue
            life = Allocation(len(self.lives), block.address, block.requested_size, block.size, segment.stream, -1)
            self._add_life(life)
            if block.state != ACTIVE:
                self._end_allocation(life, -1)

    # Blocks.

    def _alloc(self, index: int, event: TraceEvent) -> None:
        rounded = round_size(event.size, self._settings)
        for life in self._overlapping(event.address, rounded):
            # Its free is missing (a filtered trace, or one whose oldest events were dropped): it ended here at the latest.
            self.unmatched += 1
            self._end(life, index)
        extent = self._extent_of(event.address)
        remaining = -1 if extent is None else self._free_end(extent, event.address) - event.address - rounded
        size = rounded if extent is None else self._block_size(extent, remaining, rounded)
        life = Allocation(len(self.lives), event.address, event.size, size, event.stream, index)
        self._add_life(life)
        self.unplaced += extent is None
        if remaining < 0:
            self._surround(life, index)

    def _block_size(self, extent: Extent, remaining: int, rounded: int) -> int:
        """The block that a request was given: the free piece that it lies in, or the part cut off for it."""
        # While expandable segments are on, other segments of the default pools are cut as they are.
        expandable = extent.expandable or (self._settings.expandable_segments and extent.pool_id == (0, 0))
        if remaining <= 0 or should_split(remaining, rounded, pool_of(rounded), self._settings, expandable=expandable):
            return rounded
        return rounded + remaining

    def _free_end(self, extent: Extent, address: int) -> int:
        """Where the free piece that starts at an address ends: at the next block in use, or with its extents."""
        end = extent.address + extent.size
        while extent.expandable and (following := self._extents.get(end)) is not None and extent.joins(following):
            extent = following
            end += following.size
        following_block = self._used_starts.above(address)
        return end if following_block is None else min(end, following_block)

    def _free_requested(self, index: int, event: TraceEvent) -> None:
        life = self._used.get(event.address)
        if life is None or life.freed is not None:
            self.unmatched += 1
            self._unknown_frees.add(event.address)
            return
        self._end_allocation(life, index)

    def _free_completed(self, index: int, event: TraceEvent) -> None:
        life = self._used.get(event.address)
        if life is None:
            # One free is two events; its first was counted already, unless the trace starts between the two.
            if event.address in self._unknown_frees:
                self._unknown_frees.remove(event.address)
            else:
                self.unmatched += 1
            return
        self._end(life, index)

    def _end_allocation(self, life: Allocation, index: int) -> None:
        life.freed = index
        self._now_allocated -= life.size
        self._now_requested -= life.requested

    def _end(self, life: Allocation, index: int) -> None:
        """The block's memory is free. A trace without free_requested events has the moment of that here too."""
        if life.freed is None:
            self._end_allocation(life, index)
        life.completed = index
        if self._around:
            self._lay_bare(life, index)
        del self._used[life.address]
        self._used_starts.remove(life.address)

    def _add_life(self, life: Allocation) -> None:
        self.lives.append(life)
        self._used[life.address] = life
        self._used_starts.add(life.address)
        self._now_allocated += life.size
        self._now_requested += life.requested

    def _overlapping(self, address: int, size: int) -> list[Allocation]:
        starts = self._used_starts.touching(address, size, lambda start: self._used[start].size)
        return [self._used[start] for start in starts]

    # Segments.

    def _surround(self, life: Allocation, index: int) -> None:
        """What a block has where the file has no segment came from the driver, too: it is reserved for as long as the block is
        there, since no more is known of it."""
        place, end = life.address, life.address + life.size
        if place >= BLOCK_ADDRESS:
            # It lies somewhere within the segments that there are, if these have room.
            end = place + min(life.size, max(0, self._now_allocated - self._now_reserved))
        gaps = []
        for extent in self._extents_within(place, life.size):
            gaps.append((place, extent.address - place))
            place = max(place, extent.address + extent.size)
        pool = pool_of(life.size)
        around = [
            Extent(self._device, address, size, life.stream, pool, False, index)
            for address, size in [*gaps, (place, end - place)]
            if size > 0
        ]
        for extent in around:
            self._add_extent(extent)
        if around:
            self.outside += 1
            self._around[life.index] = around

    def _lay_bare(self, life: Allocation, index: int) -> None:
        for extent in self._around.pop(life.index, ()):
            self._drop_extent(extent, index)

    def _map(self, index: int, event: TraceEvent) -> None:
        if event.size <= 0:
            self.unmatched += 1
            return
        found = self._overlapping(event.address, event.size) if self._around else []
        for life in found:
            self._lay_bare(life, index)
        if self._extents_within(event.address, event.size):
            # A segment_free is missing, or this trace and its start do not belong together.
            self.unmatched += 1
            self._remove(index, event.address, event.size)
        expandable = event.action == "segment_map"
        pool = pool_of_segment(event.size)
        pool_id = event.pool_id or (0, 0)
        if expandable and event.pool_id is None:
            for near in (self._extent_of(event.address - 1), self._extents.get(event.address + event.size)):
                if near is not None and near.expandable and (near.stream, near.pool) == (event.stream, pool):
                    pool_id = near.pool_id
        self._add_extent(
            Extent(self._device, event.address, event.size, event.stream, pool, expandable, index, None, pool_id)
        )
        for life in found:
            if life.completed is None:
                self._surround(life, index)

    def _unmap(self, index: int, event: TraceEvent) -> None:
        if not self._extents_within(event.address, event.size):
            self.unmatched += 1
            return
        self._remove(index, event.address, event.size)

    def _remove(self, index: int, address: int, size: int) -> None:
        """Takes a range away. What is left of an extent at either side goes on as one of its own."""
        end = address + size
        for life in self._overlapping(address, size):
            self.unmatched += 1
            self._end(life, index)
        for extent in self._extents_within(address, size):
            self._drop_extent(extent, index)
            stop = extent.address + extent.size
            if extent.address < address:
                self._add_extent(replace(extent, size=address - extent.address, born=index, gone=None))
            if stop > end:
                self._add_extent(replace(extent, address=end, size=stop - end, born=index, gone=None))

    def _add_extent(self, extent: Extent) -> None:
        self.extents.append(extent)
        self._extents[extent.address] = extent
        self._extent_starts.add(extent.address)
        self._now_reserved += extent.size

    def _drop_extent(self, extent: Extent, index: int) -> None:
        extent.gone = index
        del self._extents[extent.address]
        self._extent_starts.remove(extent.address)
        self._now_reserved -= extent.size

    def _extent_of(self, address: int) -> Extent | None:
        start = self._extent_starts.at_or_below(address)
        if start is None:
            return None
        extent = self._extents[start]
        return extent if address < extent.address + extent.size else None

    def _extents_within(self, address: int, size: int) -> list[Extent]:
        starts = self._extent_starts.touching(address, size, lambda start: self._extents[start].size)
        return [self._extents[start] for start in starts]
