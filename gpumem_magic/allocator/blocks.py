"""What the allocator's rules work on: blocks that touch within a segment, and a pool's free blocks in best-fit order."""

from __future__ import annotations

from bisect import bisect_left, insort

from gpumem_magic.allocator.statistics import PoolGauges
from gpumem_magic.snapshot.model import ACTIVE, INACTIVE, PENDING_FREE, Block, Frame, Segment

# (stream, size, address, block). The first three are unique, so blocks are never compared.
FreeEntry = tuple[int, int, int, "CachedBlock"]


class CachedSegment:
    """Memory from the driver. Its first block is always the same object: merging keeps the lower one."""

    __slots__ = ("address", "first", "frames", "pool", "size", "stream")

    def __init__(self, address: int, size: int, stream: int, pool: Pool, frames: tuple[Frame, ...]) -> None:
        self.address = address
        self.size = size
        self.stream = stream
        self.pool = pool
        self.frames = frames
        self.first = CachedBlock(address, size, self)

    def describe(self, device: int) -> Segment:
        blocks = []
        block: CachedBlock | None = self.first
        while block is not None:
            blocks.append(block.describe())
            block = block.next
        return Segment(device, self.address, self.size, self.stream, self.pool.name, tuple(blocks), frames=self.frames)


class CachedBlock:
    """A piece of a segment: allocated, freed but awaited by other streams (`pending`), or free."""

    __slots__ = (
        "address",
        "age_base",
        "allocated",
        "frames",
        "next",
        "pending",
        "previous",
        "requested",
        "segment",
        "size",
        "streams",
    )

    def __init__(self, address: int, size: int, segment: CachedSegment) -> None:
        self.address = address
        self.size = size
        self.segment = segment
        self.requested = 0
        self.allocated = False
        # How many streams' events have to finish before the block is free.
        self.pending = 0
        # The other streams that use the block (record_stream); None while there is none, which is nearly always.
        self.streams: set[int] | None = None
        self.previous: CachedBlock | None = None
        self.next: CachedBlock | None = None
        self.frames: tuple[Frame, ...] = ()
        self.age_base = 0

    @property
    def is_split(self) -> bool:
        return self.previous is not None or self.next is not None

    @property
    def is_mergeable(self) -> bool:
        return not self.allocated and not self.pending

    def describe(self) -> Block:
        state = ACTIVE if self.allocated else PENDING_FREE if self.pending else INACTIVE
        frames = () if state == INACTIVE else self.frames
        return Block(self.address, self.size, self.requested, state, frames)


class Pool:
    """The small or the large pool: its free blocks, ordered by stream, then size, then address."""

    __slots__ = ("free", "gauges", "lookups", "name")

    def __init__(self, name: str, gauges: PoolGauges) -> None:
        self.name = name
        self.gauges = gauges
        self.free: list[FreeEntry] = []
        # Counted for garbage collection only: a free block's age is the number of lookups since it was put here.
        self.lookups = 0

    def insert(self, block: CachedBlock) -> None:
        block.age_base = self.lookups
        insort(self.free, (block.segment.stream, block.size, block.address, block))

    def remove(self, block: CachedBlock) -> None:
        index = bisect_left(self.free, (block.segment.stream, block.size, block.address))
        del self.free[index]

    def age(self, block: CachedBlock) -> int:
        return self.lookups - block.age_base

    def largest(self, stream: int) -> int:
        """The size of the largest free block of a stream, in bytes; 0 where there is none."""
        index = bisect_left(self.free, (stream + 1,)) - 1
        return self.free[index][1] if index >= 0 and self.free[index][0] == stream else 0
