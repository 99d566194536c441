"""The memory of one device's allocator and its books: segments cut into blocks, counters, events. No decisions.

`CachingAllocator` decides what is cut, joined, opened and given back; here that is done and counted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

from gpumem_magic.allocator.blocks import CachedBlock, CachedSegment, Pool
from gpumem_magic.allocator.memory import DeviceMemory
from gpumem_magic.allocator.settings import settings_to_dict
from gpumem_magic.allocator.statistics import Statistics
from gpumem_magic.snapshot.model import ACTIVE, INACTIVE, LARGE_POOL, SMALL_POOL, Frame, Segment, TraceEvent
from gpumem_magic.snapshot.rules import UNLIMITED, AllocatorSettings

Stacks = Callable[[], tuple[Frame, ...]]


class EventSink(Protocol):
    """A list of trace events, or a bounded deque of them."""

    def append(self, event: TraceEvent, /) -> object: ...


class Heap:
    """Segments, blocks, counters and events of one device. All sizes are bytes.

    sinks: lists to which every trace event is appended; add and remove your own. stacks: gives the frames for a memory
    history, or None; stack_context says where they go, as PyTorch's `context` does: "state" (blocks only), "alloc" (and
    alloc events) or "all" (and free events). on_reserved: called with the reserved bytes after each change of them.
    settings_text: the text of the environment variable, if the settings came from one.
    """

    def __init__(
        self,
        device: int,
        memory: DeviceMemory,
        settings: AllocatorSettings,
        stacks: Stacks | None,
    ) -> None:
        self.device = device
        self.memory = memory
        self.settings = settings
        self.stacks = stacks
        self.stack_context = "all"
        self.settings_text = ""
        self.sinks: list[EventSink] = []
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

    def memory_stats(self) -> dict[str, int]:
        """The keys and figures of `torch.cuda.memory_stats`, sorted by key."""
        split = self.settings.max_split_size
        return self.statistics.flat(-1 if split == UNLIMITED else split)

    def settings_dict(self) -> dict[str, Any]:
        """The settings as a snapshot's `allocator_settings` has them."""
        return settings_to_dict(self.settings, self.settings_text)

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

    # States from elsewhere.

    def adopt(self, segments: Sequence[Segment]) -> None:
        """Takes over a state that something else recorded: segments at their addresses with their blocks, no events.

        Blocks that wait for a stream wait for their own here, which `complete_pending` finishes. Current figures and peaks
        include what is adopted. Raises ValueError, and changes nothing, where a segment is expandable, overlaps another or
        is not tiled by its blocks.
        """
        self._check_adoptable(segments)
        for segment in segments:
            self.memory.adopt(segment.address, segment.total_size)
            pool = self._large if segment.segment_type == LARGE_POOL else self._small
            cached = self._add_segment(pool, segment.address, segment.total_size, segment.stream, segment.frames)
            self._adopt_blocks(cached, segment)
        self._note_reserved()

    def _check_adoptable(self, segments: Sequence[Segment]) -> None:
        ranges = [(known.address, known.size) for known in self._segments.values()]
        ranges += [(segment.address, segment.total_size) for segment in segments]
        ranges.sort()
        for (address, size), (following, _) in pairwise(ranges):
            if address + size > following:
                raise ValueError(f"the segments at {address:#x} and {following:#x} overlap")
        for segment in segments:
            if segment.is_expandable:
                raise ValueError("expandable segments are not emulated")
            address = segment.address
            for block in segment.blocks:
                if block.address != address:
                    raise ValueError(f"no block of the segment at {segment.address:#x} covers {address:#x}")
                address += block.size
            if address != segment.address + segment.total_size:
                raise ValueError(f"the blocks of the segment at {segment.address:#x} do not add up to its size")

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
            if given.state == INACTIVE:
                cached.pool.insert(block)
                if len(segment.blocks) > 1:
                    for gauge in gauges:
                        gauge.inactive_split.increase(1)
                        gauge.inactive_split_bytes.increase(given.size)
                continue
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
        self.window_peak_allocated = max(self.window_peak_allocated, self.allocated)

    # Segments.

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
