"""PyTorch's caching allocator for one device, emulated: the same blocks at the same places for the same requests.

Covered: both pools, streams, best fit, splitting and merging, release and retry, garbage collection, memory fraction,
record_stream, statistics, trace events. Not covered: expandable segments, private pools, graph capture.

Nothing here locks: whoever shares an allocator between threads holds a lock around each call.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import NoReturn

from gpumem_magic.allocator.blocks import CachedBlock, Pool
from gpumem_magic.allocator.failure import ONE_EXABYTE, DeviceOutOfMemory
from gpumem_magic.allocator.heap import Heap, Stacks
from gpumem_magic.allocator.memory import DeviceMemory
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


class CachingAllocator(Heap):
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
        super().__init__(device, memory, settings, stacks)
        self.auto_complete = auto_complete
        self._fraction: float | None = None

    @property
    def limit(self) -> int | None:
        """What the memory fraction allows to reserve, or None without one."""
        return None if self._fraction is None else int(self._fraction * self.memory.total)

    def set_memory_fraction(self, fraction: float) -> None:
        """Limits what may be reserved to a share of the device's total; 1 is no limit. Raises ValueError beyond 0 to 1."""
        if not 0.0 <= fraction <= 1.0:
            raise ValueError(f"a memory fraction lies between 0 and 1, not {fraction}")
        self._fraction = fraction if fraction < 1.0 else None

    # Requests.

    def malloc(self, size: int, stream: int = 0) -> int:
        """The address of a new block for `size` bytes; a request of 0 bytes gets address 0 and no block.

        Raises DeviceOutOfMemory where neither cached nor new memory is found, ValueError for a negative size.
        """
        if size <= 0:
            if size < 0:
                raise ValueError(f"cannot allocate {size} bytes")
            return 0
        if self._pending and self.auto_complete:
            self.complete_pending()
        settings = self.settings
        rounded = round_size(size, settings)
        pool = self._small if rounded <= SMALL_LIMIT else self._large
        if size >= ONE_EXABYTE:
            raise self._failure(size, rounded, segment_size(rounded, settings), stream)
        frames = self.stacks() if self.stacks is not None else ()
        block = self._find(pool, rounded, stream) or self._open(pool, size, rounded, stream, frames)

        statistics = self.statistics
        remaining = block.size - rounded
        # Most blocks fit exactly, and both rules for cutting need at least this much.
        if remaining >= MIN_BLOCK and should_split(remaining, rounded, pool.name, settings):
            self._split(block, rounded, pool)
        elif block.previous is not None or block.next is not None:
            for gauges in (statistics.all, pool.gauges):
                gauges.inactive_split.decrease(1)
                gauges.inactive_split_bytes.decrease(block.size)
        block.allocated = True
        block.requested = size
        block.frames = frames
        address = block.address
        self._allocated[address] = block
        taken = block.size
        statistics.all.took_block(taken, size)
        pool.gauges.took_block(taken, size)
        if taken >= settings.max_split_size:
            statistics.oversize_allocations.increase(1)
        current = statistics.all.allocated_bytes.current
        if current > self.window_peak_allocated:
            self.window_peak_allocated = current
        if self.sinks:
            self._emit("alloc", address, size, stream, frames if self.stack_context != "state" else ())
        return address

    def free(self, address: int) -> None:
        """Frees a block; address 0 is nothing. Raises ValueError where no allocated block starts at `address`."""
        if address == 0:
            return
        block = self._allocated.pop(address, None)
        if block is None:
            raise ValueError(f"no allocated block at address {address:#x}")
        block.allocated = False
        size = block.size
        statistics = self.statistics
        statistics.all.free_requested(size)
        block.segment.pool.gauges.free_requested(size)
        if size >= self.settings.max_split_size:
            statistics.oversize_allocations.decrease(1)
        frames: tuple[Frame, ...] = ()
        if self.sinks:
            frames = self._frames_of_free(block)
            self._emit("free_requested", address, block.requested, block.segment.stream, frames)
        if block.streams:
            # In PyTorch one event is recorded on each of these streams now, and the block waits for all of them.
            block.pending = len(block.streams)
            for stream in block.streams:
                self._pending.setdefault(stream, deque()).append(block)
            block.streams = None
        else:
            self._complete(block, frames)

    def record_stream(self, address: int, stream: int) -> None:
        """Says that `stream` uses the block too, so that its free has to wait for that stream. Raises as `free` does."""
        if address == 0:
            return
        block = self._block_at(address)
        if stream != block.segment.stream:
            if block.streams is None:
                block.streams = set()
            block.streams.add(stream)

    def complete_pending(self, stream: int | None = None) -> None:
        """Finishes the work of one stream, or of all, and frees the blocks that waited for nothing else."""
        for queue_of in [stream] if stream is not None else list(self._pending):
            for block in self._pending.pop(queue_of, ()):
                block.pending -= 1
                if block.pending == 0:
                    self._complete(block, self._frames_of_free(block) if self.sinks else ())

    def empty_cache(self) -> None:
        """Gives every segment without a used block back to the driver, after waiting for all streams."""
        self.statistics.num_sync_all_streams += 1
        self.complete_pending()
        for pool in (self._large, self._small):
            for entry in [entry for entry in pool.free if not entry[3].is_split]:
                self._release(entry[3])

    def release_segment(self, address: int) -> None:
        """Gives one cached segment back. Raises ValueError where none starts at `address` or a part of it is in use."""
        segment = self._segments.get(address)
        if segment is None or segment.first.is_split or not segment.first.is_mergeable:
            raise ValueError(f"no unused segment at address {address:#x}")
        self._release(segment.first)

    # Finding memory.

    def _find(self, pool: Pool, rounded: int, stream: int) -> CachedBlock | None:
        """The smallest free block of the stream that is big enough, of those the lowest; taken out of the pool."""
        settings = self.settings
        if self._fraction is not None and settings.garbage_collection_threshold > 0:
            pool.lookups += 1
        free = pool.free
        index = bisect_left(free, (stream, rounded))
        if index == len(free):
            return None
        owner, size, _, block = free[index]
        if owner != stream:
            return None
        # Only this one candidate is looked at, even where a later one would pass.
        if rounded < settings.max_split_size:
            if size >= settings.max_split_size:
                return None
        elif size >= rounded + settings.max_non_split_rounding:
            return None
        del free[index]
        return block

    def _open(self, pool: Pool, size: int, rounded: int, stream: int, frames: tuple[Frame, ...]) -> CachedBlock:
        """A new segment's only block; frees cached memory where that is needed to get it."""
        wanted = segment_size(rounded, self.settings)
        if self._fraction is not None and self.settings.garbage_collection_threshold > 0:
            self._collect_garbage()
        block = self._open_segment(pool, wanted, stream, frames)
        if block is None and self._release_available(pool, rounded, stream):
            block = self._open_segment(pool, wanted, stream, frames)
        if block is None:
            self.empty_cache()
            self.statistics.num_alloc_retries += 1
            block = self._open_segment(pool, wanted, stream, frames)
        if block is None:
            self._fail(size, rounded, wanted, stream, frames)
        return block

    def _open_segment(self, pool: Pool, size: int, stream: int, frames: tuple[Frame, ...]) -> CachedBlock | None:
        limit = self.limit
        if limit is not None and self.reserved + size > limit:
            return None
        address = self.memory.allocate(size)
        if address is None:
            return None
        segment = self._add_segment(pool, address, size, stream, frames)
        if self.sinks:
            self._emit("segment_alloc", address, size, stream, frames if self.stack_context != "state" else ())
        self._note_reserved()
        return segment.first

    def _fail(self, size: int, rounded: int, wanted: int, stream: int, frames: tuple[Frame, ...]) -> NoReturn:
        failure = self._failure(size, rounded, wanted, stream)
        if self.sinks:
            self._emit("oom", failure.free, rounded, stream, frames if self.stack_context != "state" else ())
        self.statistics.num_ooms += 1
        raise failure

    def _failure(self, size: int, rounded: int, wanted: int, stream: int) -> DeviceOutOfMemory:
        return DeviceOutOfMemory(
            requested=size,
            rounded=rounded,
            segment_size=wanted,
            device=self.device,
            total=self.memory.total,
            free=self.memory.free,
            allocated=self.allocated,
            reserved=self.reserved,
            limit=self.limit,
            largest_free=self.largest_free(stream),
            outside=self.memory.outside,
        )

    # Giving memory back.

    def _release_available(self, pool: Pool, rounded: int, stream: int) -> bool:
        """With a split limit: gives back one cached oversize block that would do, or several that do together."""
        least = self.settings.max_split_size
        if least == UNLIMITED:
            return False
        wanted = max(rounded, least)
        index = bisect_left(pool.free, (stream, wanted))
        if index < len(pool.free) and pool.free[index][0] == stream:
            if pool.free[index][3].is_split:
                return False
            self._release(pool.free[index][3])
            return True
        released = 0
        # Downwards from the largest; what was given back stays so even where it is not enough.
        for owner, size, _, block in reversed(pool.free[:index]):
            if released >= wanted or owner != stream or size < least:
                break
            if not block.is_split:
                self._release(block)
                released += size
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Gives back unused large segments that are older than the mean, until reserved is below the threshold."""
        limit = self.limit
        assert limit is not None
        threshold = int(self.settings.garbage_collection_threshold * limit)
        surplus = self.reserved - threshold
        whole = [entry[3] for entry in self._large.free if not entry[3].is_split]
        while surplus > 0 and whole:
            mean = sum(map(self._large.age, whole)) / len(whole)
            # A pass is never cut short: PyTorch does not want to be back here soon.
            for block in [block for block in whole if self._large.age(block) >= mean]:
                surplus -= block.size
                whole.remove(block)
                self._release(block)
