"""Expandable segments: a range of addresses, reserved once, whose pages get memory when they are needed.

A segment's blocks tile the whole range. Those without memory are `UNMAPPED`, belong to no free list, and merge with each
other. Pages are 2 MiB for the small pool and `large_segment_size` for the large one, counted from the segment's address.
"""

from __future__ import annotations

from gpumem_magic.allocator.blocks import FREE, UNMAPPED, CachedBlock, CachedSegment, Pool
from gpumem_magic.allocator.heap import Heap
from gpumem_magic.snapshot.model import Frame
from gpumem_magic.snapshot.rules import page_size


class ExpandableHeap(Heap):
    """A heap whose segments can be of either kind."""

    def _grow(self, pool: Pool, rounded: int, stream: int, frames: tuple[Frame, ...]) -> CachedBlock | None:
        """A free block of at least `rounded` bytes, by mapping pages; None where the driver has no more memory.

        It is taken out of its pool. What was mapped before the driver refused stays mapped.
        """
        block = self._growable(pool, rounded, stream) or self._reserve(pool, stream, frames)
        if block.state == UNMAPPED:
            mapped = self._map(block, min(block.size, rounded), frames)
            if mapped is None:
                return None
            block = mapped
        while block.size < rounded:
            following = block.next
            # `_growable` saw that free and unmapped blocks follow until there is enough.
            assert following is not None
            mapped = self._map(following, min(following.size, rounded - block.size), frames)
            if mapped is None:
                return None
            block = mapped
        pool.remove(block)
        return block

    def _growable(self, pool: Pool, rounded: int, stream: int) -> CachedBlock | None:
        """The first place, by address, where unused blocks of one segment that touch hold a request."""
        for _, unmapped in pool.unmapped.get(stream, ()):
            before = unmapped.previous
            first = before if before is not None and before.state == FREE else unmapped
            available = 0
            block: CachedBlock | None = first
            while available < rounded and block is not None and block.state in (FREE, UNMAPPED):
                available += block.size
                block = block.next
            if available >= rounded:
                return first
        return None

    def _reserve(self, pool: Pool, stream: int, frames: tuple[Frame, ...]) -> CachedBlock:
        """A new segment without memory: one unmapped block, which is more than the device can hold."""
        page = page_size(pool.name, self.settings)
        size = -(-self.memory.address_space // page) * page
        return self._add_expandable(pool, self.memory.reserve(size), size, stream, frames, page).first

    def _add_expandable(
        self, pool: Pool, address: int, size: int, stream: int, frames: tuple[Frame, ...], page: int
    ) -> CachedSegment:
        segment = CachedSegment(address, size, stream, pool, frames, page)
        segment.first.state = UNMAPPED
        self._segments[address] = segment
        pool.insert_unmapped(segment.first)
        return segment

    def _map(self, block: CachedBlock, size: int, frames: tuple[Frame, ...]) -> CachedBlock | None:
        """Puts memory behind the first `size` bytes of an unmapped block, rounded up to pages; the free block that they
        are then part of, or None where the driver refuses."""
        segment = block.segment
        pool = segment.pool
        size = -(-size // segment.page) * segment.page
        address = block.address
        if not self.memory.map(address, size):
            return None
        pool.remove_unmapped(block)
        if size < block.size:
            rest = self._cut(block, size)
            rest.state = UNMAPPED
            pool.insert_unmapped(rest)
        block.state = FREE
        segment.frames = segment.frames or frames
        self._blocks[address] = block
        block = self._join(block)
        pool.insert(block)
        self._books.opened_segment(pool.name, size, expandable=True)
        if self.sinks:
            self._emit("segment_map", address, size, segment, self._frames_of_alloc(frames))
        self._note_reserved()
        return block

    def _join(self, block: CachedBlock) -> CachedBlock:
        """Joins a block, which is in no list, with its neighbours of the same kind: free with free, unmapped with unmapped."""
        state, pool = block.state, block.segment.pool
        remove = pool.remove if state == FREE else pool.remove_unmapped
        left, right = block.previous, block.next
        if right is not None and right.state == state:
            remove(right)
            self._swallow(block, right)
        if left is not None and left.state == state:
            remove(left)
            self._swallow(left, block)
            block = left
        return block

    def _swallow(self, block: CachedBlock, following: CachedBlock) -> None:
        if block.state == FREE:
            del self._blocks[following.address]
        block.size += following.size
        block.next = following.next
        if block.next is not None:
            block.next.previous = block

    def _pages_within(self, block: CachedBlock) -> tuple[int, int]:
        """Begin and end of the whole pages that lie in a block; the end is not behind the begin where there are none."""
        segment = block.segment
        page, base = segment.page, segment.address
        begin = base + -(-(block.address - base) // page) * page
        end = base + (block.address + block.size - base) // page * page
        return begin, end

    def _unmap(self, block: CachedBlock, begin: int, end: int) -> None:
        """Takes the memory from a part of a free block. A segment that has no memory left is given up."""
        segment = block.segment
        pool = segment.pool
        pool.remove(block)
        if block.address < begin:
            before = block
            block = self._cut(before, begin - before.address)
            pool.insert(before)
        else:
            del self._blocks[block.address]
        if block.address + block.size > end:
            after = self._cut(block, end - begin)
            self._blocks[after.address] = after
            pool.insert(after)
        block.state = UNMAPPED
        size = end - begin
        self.memory.unmap(size)
        block = self._join(block)
        pool.insert_unmapped(block)
        self._books.closed_segment(pool.name, size, expandable=True)
        if self.sinks:
            self._emit("segment_unmap", begin, size, segment, self._frames_of_giving_back(segment.frames))
        self._note_reserved()
        if not block.is_split:
            pool.remove_unmapped(block)
            del self._segments[segment.address]
            self.memory.give_up(segment.address)
