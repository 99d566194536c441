"""PyTorch's caching allocator for one device, emulated: the same blocks at the same places for the same requests.

Covered: both pools, streams, best fit, splitting and merging, release and retry, garbage collection, memory fraction,
record_stream, statistics, trace events. Not covered: expandable segments, private pools, graph capture.

Nothing here locks: whoever shares an allocator between threads holds a lock around each call.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from typing import NoReturn

from gpumem_magic.allocator.blocks import CachedBlock, CachedSegment, Pool
from gpumem_magic.allocator.failure import ONE_EXABYTE, DeviceOutOfMemory
from gpumem_magic.allocator.memory import DeviceMemory
from gpumem_magic.allocator.statistics import Statistics
from gpumem_magic.snapshot.model import ACTIVE, LARGE_POOL, PENDING_FREE, SMALL_POOL, Frame, Segment, TraceEvent
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

Stacks = Callable[[], tuple[Frame, ...]]


class CachingAllocator:
    """One device's allocator. All sizes are bytes, addresses and streams are integers, 0 is the default stream.

    sinks: lists to which every trace event is appended; add and remove your own. stacks: gives the frames for a memory
    history, or None; stack_context says where they go, as PyTorch's `context` does: "state" (blocks only), "alloc" (and
    alloc events) or "all" (and free events). on_reserved: called with the reserved bytes after each change of them.

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
        self.device = device
        self.memory = memory
        self.settings = settings
        self.stacks = stacks
        self.stack_context = "all"
        self.auto_complete = auto_complete
        self.sinks: list[list[TraceEvent]] = []
        self.on_reserved: Callable[[int], None] | None = None
        self.statistics = Statistics()
        self.window_peak_allocated = 0
        self.window_peak_reserved = 0
        self._small = Pool(SMALL_POOL, self.statistics.small)
        self._large = Pool(LARGE_POOL, self.statistics.large)
        self._segments: dict[int, CachedSegment] = {}
        self._allocated: dict[int, CachedBlock] = {}
        # Per stream, oldest first: the blocks whose free waits for that stream.
        self._pending: dict[int, deque[CachedBlock]] = {}
        self._fraction: float | None = None

    # Figures of now.

    @property
    def allocated(self) -> int:
        return self.statistics.all.allocated_bytes.current

    @property
    def reserved(self) -> int:
        return self.statistics.all.reserved_bytes.current

    @property
    def requested(self) -> int:
        """What the program asked for, of blocks that are allocated or wait for a stream."""
        return self.statistics.all.requested_bytes.current

    @property
    def peak_allocated(self) -> int:
        return self.statistics.all.allocated_bytes.peak

    @property
    def peak_reserved(self) -> int:
        return self.statistics.all.reserved_bytes.peak

    @property
    def num_alloc_retries(self) -> int:
        return self.statistics.num_alloc_retries

    @property
    def num_ooms(self) -> int:
        return self.statistics.num_ooms

    @property
    def limit(self) -> int | None:
        """What the memory fraction allows to reserve, or None without one."""
        return None if self._fraction is None else int(self._fraction * self.memory.total)

    def memory_stats(self) -> dict[str, int]:
        """The keys and figures of `torch.cuda.memory_stats`, sorted by key."""
        split = self.settings.max_split_size
        return self.statistics.flat(-1 if split == UNLIMITED else split)

    def reset_peak_stats(self) -> None:
        """Peaks become what is current. The window's peaks stay."""
        self.statistics.reset_peaks()

    def reset_accumulated_stats(self) -> None:
        self.statistics.reset_accumulated()

    def start_window(self) -> None:
        """The window's peaks become what is current. They are a recorder's own: nothing else resets them."""
        self.window_peak_allocated = self.allocated
        self.window_peak_reserved = self.reserved

    def segments(self) -> tuple[Segment, ...]:
        """All segments and their blocks now, by address."""
        return tuple(self._segments[address].describe(self.device) for address in sorted(self._segments))

    def largest_free(self, stream: int = 0) -> int:
        """The largest cached free block that a request on `stream` could be given (0: none)."""
        return max(self._small.largest(stream), self._large.largest(stream))

    def block_size(self, address: int) -> int:
        """The size of the allocated block at `address`. Raises ValueError where there is none."""
        return self._block_at(address).size

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

    # States from elsewhere.

    def adopt(self, segments: Sequence[Segment]) -> None:
        """Takes over a state that something else recorded: segments at their addresses with their blocks, no events.

        Blocks that wait for a stream wait for their own here, which `complete_pending` finishes. Current figures and peaks
        include what is adopted. Raises ValueError where a range is taken already or a segment is expandable.
        """
        for segment in segments:
            if segment.is_expandable:
                raise ValueError("expandable segments are not emulated")
            end = segment.address + segment.total_size
            if any(
                known.address < end and segment.address < known.address + known.size
                for known in self._segments.values()
            ):
                raise ValueError(f"the segment at {segment.address:#x} overlaps one that is here already")
            self.memory.adopt(segment.address, segment.total_size)
            pool = self._large if segment.segment_type == LARGE_POOL else self._small
            cached = self._add_segment(pool, segment.address, segment.total_size, segment.stream, segment.frames)
            self._adopt_blocks(cached, segment)
        self._note_reserved()

    def _adopt_blocks(self, cached: CachedSegment, segment: Segment) -> None:
        gauges = (self.statistics.all, cached.pool.gauges)
        previous: CachedBlock | None = None
        for given in segment.blocks:
            block = cached.first if previous is None else CachedBlock(given.address, given.size, cached)
            block.size = given.size
            block.requested = given.requested_size
            block.frames = given.frames
            block.previous = previous
            if previous is not None:
                previous.next = block
            previous = block
            if given.state == ACTIVE or given.state == PENDING_FREE:
                for gauge in gauges:
                    gauge.took_block(given.size, given.requested_size)
                if given.state == ACTIVE:
                    block.allocated = True
                    self._allocated[block.address] = block
                    if given.size >= self.settings.max_split_size:
                        self.statistics.oversize_allocations.increase(1)
                else:
                    block.pending = 1
                    self._pending.setdefault(segment.stream, deque()).append(block)
                    for gauge in gauges:
                        gauge.free_requested(given.size)
            else:
                cached.pool.insert(block)
                if len(segment.blocks) > 1:
                    for gauge in gauges:
                        gauge.inactive_split.increase(1)
                        gauge.inactive_split_bytes.increase(given.size)
        self.window_peak_allocated = max(self.window_peak_allocated, self.allocated)

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

    def _add_segment(
        self, pool: Pool, address: int, size: int, stream: int, frames: tuple[Frame, ...]
    ) -> CachedSegment:
        segment = CachedSegment(address, size, stream, pool, frames)
        self._segments[address] = segment
        self.statistics.all.opened_segment(size)
        pool.gauges.opened_segment(size)
        self.statistics.num_device_alloc += 1
        if size >= self.settings.max_split_size:
            self.statistics.oversize_segments.increase(1)
        return segment

    def _note_reserved(self) -> None:
        reserved = self.reserved
        if reserved > self.window_peak_reserved:
            self.window_peak_reserved = reserved
        if self.on_reserved is not None:
            self.on_reserved(reserved)

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

    # Cutting and joining.

    def _split(self, block: CachedBlock, rounded: int, pool: Pool) -> None:
        """Keeps the low part in `block` and puts the rest among the free blocks."""
        was_split = block.is_split
        rest = CachedBlock(block.address + rounded, block.size - rounded, block.segment)
        rest.requested = block.requested
        rest.previous = block
        rest.next = block.next
        if rest.next is not None:
            rest.next.previous = rest
        block.next = rest
        block.size = rounded
        pool.insert(rest)
        for gauges in (self.statistics.all, pool.gauges):
            if was_split:
                gauges.inactive_split_bytes.decrease(rounded)
            else:
                gauges.inactive_split_bytes.increase(rest.size)
                gauges.inactive_split.increase(1)

    def _complete(self, block: CachedBlock, frames: tuple[Frame, ...]) -> None:
        """Makes a freed block free: joins it with free neighbours and puts it in its pool."""
        segment = block.segment
        pool = segment.pool
        size = block.size
        requested = block.requested
        if self.sinks:
            self._emit("free_completed", block.address, requested, segment.stream, frames)
        splits = split_bytes = 0
        left = block.previous
        if left is not None and left.is_mergeable:
            pool.remove(left)
            splits -= 1
            split_bytes -= left.size
            left.size += size
            left.requested = requested
            left.next = block.next
            if left.next is not None:
                left.next.previous = left
            block = left
        right = block.next
        if right is not None and right.is_mergeable:
            pool.remove(right)
            splits -= 1
            split_bytes -= right.size
            block.size += right.size
            block.next = right.next
            if right.next is not None:
                right.next.previous = block
        pool.insert(block)
        if block.previous is not None or block.next is not None:
            splits += 1
            split_bytes += block.size
        self.statistics.all.free_completed(size, requested, splits, split_bytes)
        pool.gauges.free_completed(size, requested, splits, split_bytes)

    # Giving memory back.

    def _release(self, block: CachedBlock) -> None:
        """Gives the segment of a free block that spans it back to the driver."""
        segment = block.segment
        segment.pool.remove(block)
        del self._segments[segment.address]
        self.memory.release(segment.address, segment.size)
        statistics = self.statistics
        statistics.all.closed_segment(segment.size)
        segment.pool.gauges.closed_segment(segment.size)
        statistics.num_device_free += 1
        if segment.size >= self.settings.max_split_size:
            statistics.oversize_segments.decrease(1)
        if self.sinks:
            self._emit("segment_free", segment.address, segment.size, segment.stream, segment.frames)
        self._note_reserved()

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

    # Events.

    def _emit(self, action: str, address: int, size: int, stream: int, frames: tuple[Frame, ...]) -> None:
        event = TraceEvent(action, address, size, stream, time.time_ns() // 1000, frames)
        for sink in self.sinks:
            sink.append(event)

    def _frames_of_free(self, block: CachedBlock) -> tuple[Frame, ...]:
        if self.stack_context == "state":
            return ()
        if self.stacks is not None and self.stack_context == "all":
            return self.stacks()
        return block.frames

    def _block_at(self, address: int) -> CachedBlock:
        try:
            return self._allocated[address]
        except KeyError:
            raise ValueError(f"no allocated block at address {address:#x}") from None
