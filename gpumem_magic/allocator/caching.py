"""PyTorch's caching allocator for one device, emulated: the same blocks at the same places for the same requests.

Covered: both kinds of segments, private pools, streams, best fit, splitting and merging, release and retry, garbage
collection, memory fraction, record_stream, statistics, trace events. A graph capture is, for memory, a private pool under
way.

Nothing here locks: whoever shares an allocator between threads holds a lock around each call.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import NoReturn

from gpumem_magic.allocator.blocks import (
    ADDRESS_MASK,
    ALLOCATED,
    KEY_SHIFT,
    PENDING,
    CachedBlock,
    Pool,
    PoolId,
)
from gpumem_magic.allocator.failure import ONE_EXABYTE, DeviceOutOfMemory
from gpumem_magic.allocator.giving_back import ReleasingHeap
from gpumem_magic.allocator.heap import Stacks
from gpumem_magic.allocator.memory import DeviceMemory
from gpumem_magic.allocator.statistics import FREE_REQUESTED, LONG, TAKEN
from gpumem_magic.snapshot.model import Frame
from gpumem_magic.snapshot.rules import (
    DEFAULT_SETTINGS,
    MIN_BLOCK,
    SMALL_LIMIT,
    UNLIMITED,
    AllocatorSettings,
    round_size,
    segment_size,
    should_split,
)

# So many different sizes are remembered with how they are rounded.
_REMEMBERED_SIZES = 1 << 16


class CachingAllocator(ReleasingHeap):
    """One device's allocator. All sizes are bytes, addresses and streams are integers, 0 is the default stream.

    A virtual device's work is done at once. So with auto_complete (the default) a block that record_stream deferred
    becomes free at the next malloc or empty_cache, which is when PyTorch looks at its events; without it, only when
    `complete_pending` is called or memory is flushed.
    """

    def __init__(
        self,
        device: int,
        memory: DeviceMemory,
        settings: AllocatorSettings = DEFAULT_SETTINGS,
        stacks: Stacks | None = None,
        *,
        auto_complete: bool = True,
    ) -> None:
        # Request -> rounded size, default pool, and the key to search from.
        self._rounded: dict[int, tuple[int, Pool, int]] = {}
        self._searches = True
        super().__init__(device, memory, settings, stacks)
        self.auto_complete = auto_complete

    def _apply_settings(self) -> None:
        super()._apply_settings()
        self._rounded.clear()
        self._expands = self._settings.expandable_segments
        self._collects = self._fraction is not None and self._settings.garbage_collection_threshold > 0
        # Most often the first block that is big enough is the one.
        self._is_plain = not self._expands and not self._collects and self._max_split == UNLIMITED

    # Requests.

    def malloc(self, size: int, stream: int = 0, pool_id: PoolId | None = None) -> int:
        """The address of a new block for `size` bytes; a request of 0 bytes gets address 0 and no block.

        pool_id: takes it from this private pool, as if that were under way; by default whichever is under way decides.
        Raises DeviceOutOfMemory where neither cached nor new memory is found, ValueError for a negative size.
        """
        if self._pending and self.auto_complete and not self._routes:
            self.complete_pending()
        try:
            rounded, pool, key = self._rounded[size]
        except KeyError:
            if size == 0:
                return 0
            rounded, pool, key = self._look_at(size, stream)
        if pool_id is not None or self._routes:
            pool = self._routed(pool, stream, pool_id)
        frames = self.stacks() if self.stacks is not None else ()
        block: CachedBlock | None = None
        if self._is_plain:
            keys = pool.free.get(stream)
            if keys:
                index = bisect_left(keys, key)
                if index < len(keys):
                    block = self._blocks[keys[index] & ADDRESS_MASK]
                    if block.segment.page:
                        block = self._find(pool, key, rounded, stream)
                    else:
                        del keys[index]
        else:
            block = self._find(pool, key, rounded, stream)
        if block is None:
            block = self._open(pool, size, key, rounded, stream, frames)
            pool = block.segment.pool

        taken = block.size
        splits = split_bytes = 0
        if block.previous is not None or block.next is not None:
            if taken != rounded and self._splits(taken - rounded, rounded, pool):
                self._split(block, rounded, pool)
                taken = rounded
            else:
                splits = -1
            split_bytes = -taken
        elif taken != rounded and self._splits(taken - rounded, rounded, pool):
            self._split(block, rounded, pool)
            splits = 1
            split_bytes = taken - rounded
            taken = rounded
        if block.segment.page:
            # The counters of unused pieces leave expandable segments out.
            splits = split_bytes = 0
        block.state = ALLOCATED
        block.requested = size
        block.frames = frames
        self._journal += (TAKEN + pool.code, taken, size, splits, split_bytes)
        self.allocated = now = self.allocated + taken
        if now > self.peak_allocated:
            self.peak_allocated = now
        if taken >= self._max_split:
            self._books.oversize_allocations.increase(1)
        address = block.address
        if self.sinks:
            self._emit("alloc", address, size, block.segment, self._frames_of_alloc(frames))
        return address

    def malloc_anew(self, size: int, stream: int = 0, pool_id: PoolId | None = None) -> int:
        """As `malloc` goes on after a flush: it asks the driver, whatever the flush has freed meanwhile. Raises likewise."""
        self._searches = self._is_plain = False
        try:
            return self.malloc(size, stream, pool_id)
        finally:
            self._searches = True
            self._apply_settings()

    def finds(self, size: int, stream: int = 0, pool_id: PoolId | None = None) -> range | None:
        """The addresses of the cached block that would be used for a request; None where there is none."""
        rounded, pool, key = self._look_at(size, stream)
        pool = self._routed(pool, stream, pool_id)
        block = self._find(pool, key, rounded, stream)
        if block is None:
            return None
        age = block.age_base
        pool.insert(block)
        block.age_base = age
        return range(block.address, block.address + block.size)

    def grows_at(self, size: int, stream: int = 0, pool_id: PoolId | None = None) -> int | None:
        """Where a request would go that expands a segment; None where it would need a new one."""
        rounded, pool, _ = self._look_at(size, stream)
        block = self._growable(self._routed(pool, stream, pool_id), rounded, stream)
        return None if block is None else block.address

    def free(self, address: int) -> None:
        """Frees a block; address 0 is nothing. Raises ValueError where no allocated block starts at `address`."""
        block = self._blocks.get(address)
        if block is None or block.state != ALLOCATED:
            if address == 0:
                return
            raise ValueError(f"no allocated block at address {address:#x}")
        size = block.size
        self.allocated -= size
        if size >= self._max_split:
            self._books.oversize_allocations.decrease(1)
        frames: tuple[Frame, ...] = ()
        if self.sinks:
            frames = self._frames_of_free(block)
            self._emit("free_requested", address, block.requested, block.segment, frames)
        if block.streams is None:
            self._complete(block, frames)
        else:
            # In PyTorch one event is recorded on each of these streams now, and the block waits for all of them.
            block.state = PENDING
            block.waits = len(block.streams)
            for stream in block.streams:
                self._pending.setdefault(stream, deque()).append(block)
            block.streams = None
            self._journal += (FREE_REQUESTED + block.segment.pool.code, -size, -block.requested, 0, 0)
        if len(self._journal) > LONG:
            self._books.put_aside()

    def record_stream(self, address: int, stream: int) -> None:
        """Says that `stream` uses the block too, so that its free has to wait for that stream. Raises as `free` does."""
        if address == 0:
            return
        block = self._block_at(address)
        if stream != block.segment.stream:
            if block.streams is None:
                block.streams = set()
            block.streams.add(stream)

    # Finding memory.

    def _look_at(self, size: int, stream: int) -> tuple[int, Pool, int]:
        """How a request is rounded, its default pool, and the key of the smallest block that would do."""
        if size < 0:
            raise ValueError(f"cannot allocate {size} bytes")
        rounded = round_size(size, self._settings)
        if size >= ONE_EXABYTE:
            raise self._failure(size, rounded, stream)
        if len(self._rounded) >= _REMEMBERED_SIZES:
            self._rounded.clear()
        found = rounded, self._small if rounded <= SMALL_LIMIT else self._large, rounded << KEY_SHIFT
        self._rounded[size] = found
        return found

    def _find(self, pool: Pool, key: int, rounded: int, stream: int) -> CachedBlock | None:
        """The smallest free block of the stream that is big enough, of those the lowest; taken out of the pool."""
        if not self._searches:
            return None
        if self._collects:
            pool.lookups += 1
        keys = pool.free.get(stream)
        if not keys:
            return None
        blocks = self._blocks
        index = bisect_left(keys, key)
        if index == len(keys):
            return None
        block = blocks[keys[index] & ADDRESS_MASK]
        if block.segment.page:
            if self._expands:
                # A block that can grow counts as what it could grow to, so it is used last.
                while block.segment.page and index + 1 < len(keys):
                    following = blocks[keys[index + 1] & ADDRESS_MASK]
                    if following.extent >= block.extent:
                        break
                    block = following
                    index += 1
            else:
                while block.segment.page:
                    index += 1
                    if index == len(keys):
                        return None
                    block = blocks[keys[index] & ADDRESS_MASK]
        # Only this one candidate is looked at, even where a later one would pass.
        if rounded < self._max_split:
            if block.size >= self._max_split:
                return None
        elif block.size >= rounded + self._settings.max_non_split_rounding:
            return None
        del keys[index]
        return block

    def _grows(self, pool: Pool) -> bool:
        """Whether expandable segments are in use for a pool."""
        return self._expands and not pool.group.own_memory

    def _splits(self, remaining: int, rounded: int, pool: Pool) -> bool:
        if remaining < MIN_BLOCK or pool.group.no_split:
            return False
        if pool.is_small:
            return True
        return should_split(remaining, rounded, pool.name, self._settings, expandable=self._grows(pool))

    def _split(self, block: CachedBlock, rounded: int, pool: Pool) -> None:
        """Puts all but the low part back among the free blocks."""
        rest = self._cut(block, rounded)
        self._blocks[rest.address] = rest
        pool.insert(rest)

    def _open(
        self, pool: Pool, size: int, key: int, rounded: int, stream: int, frames: tuple[Frame, ...]
    ) -> CachedBlock:
        """A block in new memory; frees cached memory where that is needed to get it."""
        # While a private pool is being filled, nothing is flushed: a capture must not wait for the device.
        under_way = bool(self._routes) or pool.group.is_private
        if self._collects:
            self._collect_garbage()
        block = self._attempt(pool, rounded, stream, frames)
        if block is None and not pool.group.is_private:
            block = self._find_elsewhere(pool, key, rounded, stream)
        if block is None and self._release_available(pool, rounded, stream):
            block = self._attempt(pool, rounded, stream, frames)
        if block is None and not under_way:
            self.empty_cache()
            self._books.events["num_alloc_retries"] += 1
            block = self._attempt(pool, rounded, stream, frames)
        if block is None:
            self._fail(pool, size, rounded, stream, frames)
        return block

    def _attempt(self, pool: Pool, rounded: int, stream: int, frames: tuple[Frame, ...]) -> CachedBlock | None:
        """A free block of the driver's, taken out of its pool; None where the driver or the limit refuses."""
        size = segment_size(rounded, self._settings)
        limit = self.limit
        if limit is not None and self.reserved + size > limit:
            return None
        if self._grows(pool):
            return self._grow(pool, rounded, stream, frames)
        address = self.memory.allocate(size)
        if address is None:
            return None
        segment = self._add_segment(pool, address, size, stream, frames)
        if self.sinks:
            self._emit("segment_alloc", address, size, segment, self._frames_of_alloc(frames))
        self._note_reserved()
        return segment.first

    def grow_in_vain(self, size: int, stream: int, pool_id: PoolId | None = None) -> None:
        """Maps what can be mapped for a request that then fails, as where the driver runs out half-way."""
        rounded = round_size(size, self._settings)
        pool = self._routed(self._small if rounded <= SMALL_LIMIT else self._large, stream, pool_id)
        block = self._grow(pool, rounded, stream, ())
        if block is not None:
            pool.insert(block)

    def _find_elsewhere(self, pool: Pool, key: int, rounded: int, stream: int) -> CachedBlock | None:
        """A free block of a private pool that may be used before failing."""
        for group in self._groups.values():
            if group.use_on_oom:
                block = self._find(group.pool(pool.name), key, rounded, stream)
                if block is not None:
                    return block
        return None

    def _fail(self, pool: Pool, size: int, rounded: int, stream: int, frames: tuple[Frame, ...]) -> NoReturn:
        failure = self._failure(size, rounded, stream)
        if self.sinks:
            self._send("oom", failure.free, rounded, stream, self._frames_of_alloc(frames), pool.group)
        self._books.events["num_ooms"] += 1
        raise failure

    def _failure(self, size: int, rounded: int, stream: int) -> DeviceOutOfMemory:
        return DeviceOutOfMemory(
            requested=size,
            rounded=rounded,
            segment_size=segment_size(rounded, self._settings),
            device=self.device,
            total=self.memory.total,
            free=self.memory.free,
            allocated=self.allocated,
            reserved=self.reserved,
            limit=self.limit,
            largest_free=self.largest_free(stream),
            outside=self.memory.outside,
            private_free=self.private_free,
        )
