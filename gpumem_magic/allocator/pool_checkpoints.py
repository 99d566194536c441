"""A private pool as it was: what Inductor restores before it records another CUDA graph behind one that was recorded before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpumem_magic.allocator.blocks import ALLOCATED, UNMAPPED, CachedBlock, CachedSegment, PoolId
from gpumem_magic.allocator.private_pools import PooledHeap
from gpumem_magic.allocator.statistics import TAKEN
from gpumem_magic.snapshot.model import Frame


@dataclass(frozen=True)
class PoolCheckpoint:
    """pool_id: whose. segments: each one's address and its blocks, in order: (size, requested, allocated, frames), in bytes."""

    pool_id: PoolId
    segments: tuple[tuple[int, tuple[tuple[int, int, bool, tuple[Frame, ...]], ...]], ...]


class CheckpointedHeap(PooledHeap):
    """A heap whose private pools can be put back into a state that they were in."""

    def free(self, address: int) -> None:
        raise NotImplementedError

    def checkpoint(self, pool_id: PoolId) -> PoolCheckpoint:
        """Raises ValueError for a pool that does not exist."""
        self._known(pool_id)
        return PoolCheckpoint(
            pool_id,
            tuple(
                (
                    segment.address,
                    tuple((one.size, one.requested, one.state == ALLOCATED, one.frames) for one in _blocks(segment)),
                )
                for segment in self._of(pool_id)
            ),
        )

    def live_in(self, pool_id: PoolId) -> set[int]:
        """The addresses of a pool's allocated blocks."""
        return {one.address for segment in self._of(pool_id) for one in _blocks(segment) if one.state == ALLOCATED}

    def restore(self, checkpoint: PoolCheckpoint) -> None:
        """Frees what is allocated in the pool, then allocates what was, at the same addresses. Segments that came since stay."""
        for address in self.live_in(checkpoint.pool_id):
            self.free(address)
        for address, blocks in checkpoint.segments:
            self._lay_out(self._blocks[address], blocks)

    def _of(self, pool_id: PoolId) -> list[CachedSegment]:
        return [segment for segment in self._segments.values() if segment.pool.group.id == pool_id]

    def _lay_out(self, rest: CachedBlock, blocks: tuple[tuple[int, int, bool, tuple[Frame, ...]], ...]) -> None:
        """Cuts a segment that is one free block into these."""
        segment, pool = rest.segment, rest.segment.pool
        if not any(allocated for _, _, allocated, _ in blocks):
            return
        pool.remove(rest)
        taken = []
        for size, requested, allocated, frames in blocks:
            block = rest
            if block.size > size:
                rest = self._cut(block, size)
                self._blocks[rest.address] = rest
            block.requested = requested
            if allocated:
                block.state, block.frames = ALLOCATED, frames
                taken.append(block)
            else:
                pool.insert(block)
        if rest is not block:
            pool.insert(rest)
        free = [one.size for one in _blocks(segment) if one.state != ALLOCATED]
        # The counters of unused pieces leave expandable segments out.
        pieces = (0, 0) if segment.page else (len(free), sum(free))
        for block in taken:
            self.allocated += block.size
            self._journal += (TAKEN + pool.code, block.size, block.requested, *pieces)
            pieces = 0, 0
            if self.sinks:
                self._emit("alloc", block.address, block.requested, segment, self._frames_of_alloc(block.frames))
        self.peak_allocated = max(self.peak_allocated, self.allocated)


def _blocks(segment: CachedSegment) -> Iterator[CachedBlock]:
    block: CachedBlock | None = segment.first
    while block is not None and block.state != UNMAPPED:
        yield block
        block = block.next
