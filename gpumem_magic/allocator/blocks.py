"""What the allocator's rules work on: blocks that touch within a segment, and a pool's free blocks in best-fit order."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from gpumem_magic.snapshot.model import (
    ACTIVE,
    INACTIVE,
    LARGE_POOL,
    PENDING_FREE,
    SMALL_POOL,
    Block,
    Frame,
    Segment,
)

PoolId = tuple[int, int]
DEFAULT_POOL: PoolId = (0, 0)

# A free block's key is its size followed by its address, as one number: sorted, that is the order of the search.
KEY_SHIFT = 64
ADDRESS_MASK = (1 << KEY_SHIFT) - 1

# States of a block. Only FREE is false, so that "neither used nor unmapped" is quick to ask.
FREE = 0
ALLOCATED = 1
# Freed, but other streams may still use it.
PENDING = 2
# Part of an expandable segment's address space without memory behind it.
UNMAPPED = 3

_NAMES = {FREE: INACTIVE, ALLOCATED: ACTIVE, PENDING: PENDING_FREE}


@dataclass(slots=True, eq=False, repr=False)
class CachedSegment:
    """Memory from the driver, or (expandable) a range of addresses of which some pages have memory behind them.

    Its first block is always the same object: merging keeps the lower one.
    """

    address: int
    size: int
    stream: int
    pool: Pool
    frames: tuple[Frame, ...]
    page: int = 0
    """Pages have this size; 0 for a segment that is not expandable."""
    expandable: bool = field(init=False)
    free: list[int] = field(init=False)
    """The keys of the free blocks of this pool and stream."""
    first: CachedBlock = field(init=False)

    def __post_init__(self) -> None:
        self.expandable = self.page > 0
        self.free = self.pool.free_of(self.stream)
        self.first = CachedBlock(self.address, self.size, self)

    def describe(self, device: int) -> list[Segment]:
        """As in a snapshot: the segment, or each range of touching mapped pages of an expandable one."""
        ranges: list[list[Block]] = [[]]
        block: CachedBlock | None = self.first
        while block is not None:
            if block.state == UNMAPPED:
                ranges.append([])
            else:
                ranges[-1].append(block.describe())
            block = block.next
        return [
            Segment(
                device,
                blocks[0].address,
                sum(block.size for block in blocks),
                self.stream,
                self.pool.name,
                tuple(blocks),
                self.expandable,
                self.pool.group.id,
                self.frames,
            )
            for blocks in ranges
            if blocks
        ]


@dataclass(slots=True, eq=False, repr=False)
class CachedBlock:
    """A piece of a segment; `state` is one of the constants above."""

    address: int
    size: int
    segment: CachedSegment
    requested: int = 0
    state: int = FREE
    waits: int = 0
    """How many streams' events have to finish before the block is free."""
    streams: set[int] | None = None
    """The other streams that use the block (record_stream); None while there is none, which is nearly always."""
    previous: CachedBlock | None = None
    next: CachedBlock | None = None
    frames: tuple[Frame, ...] = ()
    age_base: int = 0

    @property
    def is_split(self) -> bool:
        return self.previous is not None or self.next is not None

    @property
    def extent(self) -> int:
        """The size that the block could grow to in its expandable segment."""
        following = self.next
        return self.size + following.size if following is not None and following.state == UNMAPPED else self.size

    def describe(self) -> Block:
        frames = () if self.state == FREE else self.frames
        return Block(self.address, self.size, self.requested, _NAMES[self.state], frames)


class Pool:
    """A small or a large pool: per stream its free blocks by size and address, and its unmapped blocks by address."""

    __slots__ = ("code", "free", "group", "is_small", "lookups", "name", "unmapped")

    def __init__(self, name: str, group: PoolGroup) -> None:
        self.name = name
        self.group = group
        self.is_small = name == SMALL_POOL
        # What the journal of the statistics adds for the pool.
        self.code = 0 if self.is_small else 1
        self.free: dict[int, list[int]] = {}
        self.unmapped: dict[int, list[tuple[int, CachedBlock]]] = {}
        # Counted for garbage collection only: a free block's age is the number of lookups since it was put here.
        self.lookups = 0

    def free_of(self, stream: int) -> list[int]:
        return self.free.setdefault(stream, [])

    def insert(self, block: CachedBlock) -> None:
        block.age_base = self.lookups
        insort(block.segment.free, block.size << KEY_SHIFT | block.address)

    def remove(self, block: CachedBlock) -> None:
        keys = block.segment.free
        del keys[bisect_left(keys, block.size << KEY_SHIFT | block.address)]

    def insert_unmapped(self, block: CachedBlock) -> None:
        insort(self.unmapped.setdefault(block.segment.stream, []), (block.address, block))

    def remove_unmapped(self, block: CachedBlock) -> None:
        blocks = self.unmapped[block.segment.stream]
        del blocks[bisect_left(blocks, (block.address,))]

    def age(self, block: CachedBlock) -> int:
        return self.lookups - block.age_base

    def largest(self, stream: int) -> int:
        """The size of the largest free block of a stream, in bytes; 0 where there is none."""
        keys = self.free.get(stream)
        return keys[-1] >> KEY_SHIFT if keys else 0

    @property
    def free_bytes(self) -> int:
        return sum(key >> KEY_SHIFT for keys in self.free.values() for key in keys)


@dataclass(slots=True, eq=False)
class PoolGroup:
    """A small and a large pool that belong together: the default ones, or a private pair (a graph's or a MemPool's).

    users: how many graphs or MemPools hold a private group; its memory can be given back once that is 0.
    no_split: its blocks are never cut. use_on_oom: others may take from it before failing. own_memory: it gets segments
    from an allocator of its own, which are never expandable.
    """

    id: PoolId
    no_split: bool = False
    use_on_oom: bool = False
    own_memory: bool = False
    users: int = 0
    small: Pool = field(init=False, repr=False)
    large: Pool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.small, self.large = Pool(SMALL_POOL, self), Pool(LARGE_POOL, self)

    @property
    def is_private(self) -> bool:
        return self.id != DEFAULT_POOL

    def pool(self, name: str) -> Pool:
        return self.small if name == SMALL_POOL else self.large
