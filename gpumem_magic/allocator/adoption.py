"""Taking over a recorded state: segments at their addresses, with their blocks."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise

from gpumem_magic.allocator.blocks import (
    ALLOCATED,
    FREE,
    PENDING,
    UNMAPPED,
    CachedBlock,
    CachedSegment,
    Pool,
    PoolGroup,
    PoolId,
)
from gpumem_magic.allocator.expandable import ExpandableHeap
from gpumem_magic.allocator.statistics import FREE_REQUESTED, TAKEN
from gpumem_magic.snapshot.model import ACTIVE, INACTIVE, Block, Segment
from gpumem_magic.snapshot.rules import page_size

_NO_END = 1 << 64
# Mapped ranges of one expandable segment have these in common: stream, pool, pool id, and their place within a page.
RangeKey = tuple[int, str, PoolId, int]


def range_key(segment: Segment, page: int) -> RangeKey:
    return segment.stream, segment.segment_type, segment.segment_pool_id, segment.address % page


class AdoptingHeap(ExpandableHeap):
    """A heap that can begin in the middle."""

    def adopt(self, segments: Sequence[Segment], bases: Mapping[RangeKey, int] | None = None) -> None:
        """Takes over a recorded state, without events. Current figures and peaks include it.

        Blocks that wait for a stream wait for their own here, which `complete_pending` finishes. Mapped ranges of one
        stream and pool are put in one expandable segment, which begins at the lowest of them or at the address that
        `bases` gives. Raises ValueError, and changes nothing, where segments overlap or are not tiled by their blocks.
        """
        check_adoptable([*self.segments(), *segments], segments)
        ranges: dict[RangeKey, list[Segment]] = {}
        for segment in sorted(segments, key=lambda one: one.address):
            if segment.is_expandable:
                key = range_key(segment, page_size(segment.segment_type, self.settings))
                ranges.setdefault(key, []).append(segment)
                continue
            pool = self._group_of(segment.segment_pool_id).pool(segment.segment_type)
            self.memory.adopt(segment.address, segment.total_size)
            cached = self._add_segment(pool, segment.address, segment.total_size, segment.stream, segment.frames)
            self._adopt_blocks(cached.first, segment)
        starts = sorted(segment.address for segment in segments)
        for key, mapped in ranges.items():
            base = (bases or {}).get(key, mapped[0].address)
            for part, end in _apart(mapped, starts):
                first = part[0].address
                # A base below something else is another segment's.
                is_own = first == mapped[0].address and bisect_left(starts, base) == bisect_left(starts, first)
                self._adopt_ranges(part, base if is_own else first, end)
        self._note_reserved()

    def _group_of(self, pool_id: PoolId) -> PoolGroup:
        group = self._groups.get(pool_id)
        if group is None:
            group = self._groups[pool_id] = PoolGroup(pool_id)
            group.users = 1
        return group

    def _adopt_ranges(self, mapped: Sequence[Segment], base: int, end: int) -> None:
        """One expandable segment with these ranges, which reaches at most to `end`."""
        first = mapped[0]
        pool = self._group_of(first.segment_pool_id).pool(first.segment_type)
        page = page_size(first.segment_type, self.settings)
        space = max(self.memory.address_space, mapped[-1].address + mapped[-1].total_size - base)
        size = min(-(-space // page) * page, end - base)
        self.memory.claim(base, size)
        segment = self._add_expandable(pool, base, size, first.stream, first.frames, page)
        block = segment.first
        for given in mapped:
            pool.remove_unmapped(block)
            if given.address > block.address:
                low, block = block, self._cut(block, given.address - block.address)
                pool.insert_unmapped(low)
            if given.total_size < block.size:
                rest = self._cut(block, given.total_size)
                rest.state = UNMAPPED
                pool.insert_unmapped(rest)
            block.state = FREE
            self.memory.map(given.address, given.total_size)
            self._books.opened_segment(pool.name, given.total_size, expandable=True)
            following = block.next
            self._blocks[block.address] = block
            self._adopt_blocks(block, given)
            if following is not None:
                block = following

    def _adopt_blocks(self, first: CachedBlock, segment: Segment) -> None:
        """Cuts a block, which covers a recorded segment or range and is in no list, into the recorded ones."""
        cached = first.segment
        pool = cached.pool
        block = first
        for place, given in enumerate(segment.blocks):
            if place:
                assert block.next is not None
                block = block.next
            if given.size < block.size:
                rest = self._cut(block, given.size)
                self._blocks[rest.address] = rest
            block.requested = given.requested_size
            block.frames = given.frames
            self._adopt_one(block, given, pool, cached, split=len(segment.blocks) > 1)
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def _adopt_one(self, block: CachedBlock, given: Block, pool: Pool, cached: CachedSegment, *, split: bool) -> None:
        if given.state == INACTIVE:
            pool.insert(block)
            if split and not cached.expandable:
                for gauges in (self._books.all, self._books.of_pool(pool.name)):
                    gauges.inactive_split.increase(1)
                    gauges.inactive_split_bytes.increase(given.size)
            return
        self._journal += (TAKEN + pool.code, given.size, given.requested_size, 0, 0)
        if given.state == ACTIVE:
            block.state = ALLOCATED
            self.allocated += given.size
            if given.size >= self._max_split:
                self._books.oversize_allocations.increase(1)
        else:
            block.state = PENDING
            block.waits = 1
            self._pending.setdefault(cached.stream, deque()).append(block)
            self._journal += (FREE_REQUESTED + pool.code, -given.size, -given.requested_size, 0, 0)


def _apart(mapped: Sequence[Segment], starts: Sequence[int]) -> list[tuple[list[Segment], int]]:
    """Mapped ranges by address, cut where something else lies between two; with each part, where it has to end."""
    parts: list[tuple[list[Segment], int]] = []
    for segment in mapped:
        if parts and segment.address < parts[-1][1]:
            parts[-1][0].append(segment)
            continue
        own = {one.address for one in mapped}
        place = bisect_right(starts, segment.address)
        following = next((start for start in starts[place:] if start not in own), _NO_END)
        parts.append(([segment], following))
    return parts


def check_adoptable(known: Sequence[Segment], segments: Sequence[Segment]) -> None:
    """Raises ValueError where recorded segments can't be taken over beside the known ones (which include them)."""
    for before, after in pairwise(sorted(known, key=lambda segment: segment.address)):
        if before.address + before.total_size > after.address:
            raise ValueError(f"the segments at {before.address:#x} and {after.address:#x} overlap")
    for segment in segments:
        address = segment.address
        for block in segment.blocks:
            if block.address != address:
                raise ValueError(f"no block of the segment at {segment.address:#x} covers {address:#x}")
            address += block.size
        if address != segment.address + segment.total_size:
            raise ValueError(f"the blocks of the segment at {segment.address:#x} do not add up to its size")
