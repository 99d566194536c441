"""The memory of one device's allocator and its books: segments cut into blocks, counters, events. No decisions.

`CachingAllocator` decides what is cut, joined, opened and given back; here that is done and counted.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from gpumem_magic.allocator.blocks import (
    ALLOCATED,
    DEFAULT_POOL,
    FREE,
    KEY_SHIFT,
    CachedBlock,
    CachedSegment,
    Pool,
    PoolGroup,
    PoolId,
)
from gpumem_magic.allocator.memory import DeviceMemory
from gpumem_magic.allocator.settings import settings_to_dict
from gpumem_magic.allocator.statistics import FREE_COMPLETED, FREED, Statistics
from gpumem_magic.snapshot.model import Frame, Segment, TraceEvent
from gpumem_magic.snapshot.rules import UNLIMITED, AllocatorSettings

Stacks = Callable[[], tuple[Frame, ...]]


class EventSink(Protocol):
    """A list of trace events, or a bounded deque of them."""

    def append(self, event: TraceEvent, /) -> object: ...


class Heap:
    """Segments, blocks, counters and events of one device. All sizes are bytes.

    sinks: lists to which every trace event is appended; add and remove your own. stacks: gives the frames for a memory
    history, or None; stack_context says where they go, as PyTorch's `context` does: "state" (blocks only), "alloc" (and
    alloc events) or "all" (and free events). stacks_at_ends: by address, the frames with which the program let go of blocks that
    are not freed yet, where somebody notes them. on_reserved: called with the reserved bytes after each change of them.
    settings_text: the text of the environment variable, if the settings came from one. allocated: bytes of blocks in use.
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
        self.stacks = stacks
        self.stack_context = "all"
        self.stacks_at_ends: dict[int, tuple[Frame, ...]] = {}
        self.settings_text = ""
        self.sinks: list[EventSink] = []
        self.on_reserved: Callable[[int], None] | None = None
        self.allocated = 0
        self.peak_allocated = 0
        self._books = Statistics()
        self._journal = self._books.journal
        self._groups: dict[PoolId, PoolGroup] = {DEFAULT_POOL: PoolGroup(DEFAULT_POOL)}
        self._small = self._groups[DEFAULT_POOL].small
        self._large = self._groups[DEFAULT_POOL].large
        self._segments: dict[int, CachedSegment] = {}
        # All blocks with memory behind them, by address.
        self._blocks: dict[int, CachedBlock] = {}
        # Per stream, oldest first: the blocks whose free waits for that stream.
        self._pending: dict[int, deque[CachedBlock]] = {}
        self._settings = settings
        self._apply_settings()

    @property
    def settings(self) -> AllocatorSettings:
        return self._settings

    @settings.setter
    def settings(self, settings: AllocatorSettings) -> None:
        self._settings = settings
        self._apply_settings()

    def _apply_settings(self) -> None:
        """Called after each change of the settings."""
        self._max_split = self._settings.max_split_size

    # Figures of now.

    @property
    def statistics(self) -> Statistics:
        """All counters, counted up to now."""
        self._books.count()
        return self._books

    @property
    def reserved(self) -> int:
        return self._books.all.reserved_bytes.current

    @property
    def requested(self) -> int:
        """What the program asked for, of blocks that are allocated or wait for a stream."""
        return self.statistics.all.requested_bytes.current

    @property
    def peak_reserved(self) -> int:
        return self._books.all.reserved_bytes.peak

    @property
    def num_alloc_retries(self) -> int:
        return self._books.events["num_alloc_retries"]

    @property
    def private_free(self) -> int:
        """Bytes of the free blocks of private pools, which nothing else can use."""
        return sum(
            group.small.free_bytes + group.large.free_bytes for group in self._groups.values() if group.is_private
        )

    def memory_stats(self) -> dict[str, int]:
        """The keys and figures of `torch.cuda.memory_stats`, sorted by key."""
        split = self.settings.max_split_size
        return self._books.flat(-1 if split == UNLIMITED else split)

    def settings_dict(self) -> dict[str, Any]:
        """The settings as a snapshot's `allocator_settings` has them."""
        return settings_to_dict(self.settings, self.settings_text)

    def reset_peak_stats(self) -> None:
        """Peaks become what is current."""
        self._books.reset_peaks()
        self.peak_allocated = self.allocated

    def reset_accumulated_stats(self) -> None:
        self._books.reset_accumulated()

    def segments(self) -> tuple[Segment, ...]:
        """All segments and their blocks now, by address, as a snapshot has them."""
        found = [segment for cached in self._segments.values() for segment in cached.describe(self.device)]
        return tuple(sorted(found, key=lambda segment: segment.address))

    def largest_free(self, stream: int = 0) -> int:
        """The largest cached free block that a request on `stream` could be given (0: none)."""
        return max(self._small.largest(stream), self._large.largest(stream))

    # Segments.

    def _add_segment(
        self, pool: Pool, address: int, size: int, stream: int, frames: tuple[Frame, ...]
    ) -> CachedSegment:
        """A segment from cudaMalloc, as one block that is in no list yet."""
        segment = CachedSegment(address, size, stream, pool, frames)
        self._segments[address] = segment
        self._blocks[address] = segment.first
        self._books.opened_segment(pool.name, size)
        if size >= self._max_split:
            self._books.oversize_segments.increase(1)
        return segment

    def _note_reserved(self) -> None:
        if self.on_reserved is not None:
            self.on_reserved(self.reserved)

    def _release(self, block: CachedBlock) -> None:
        """Gives the segment of a free block that spans it back to the driver."""
        segment = block.segment
        segment.pool.remove(block)
        del self._segments[segment.address]
        del self._blocks[segment.address]
        self.memory.release(segment.address, segment.size)
        self._books.closed_segment(segment.pool.name, segment.size)
        if segment.size >= self._max_split:
            self._books.oversize_segments.decrease(1)
        if self.sinks:
            self._emit(
                "segment_free", segment.address, segment.size, segment, self._frames_of_giving_back(segment.frames)
            )
        self._note_reserved()

    # Cutting and joining.

    def _cut(self, block: CachedBlock, size: int) -> CachedBlock:
        """Keeps the low part in `block`; the rest is a new free block, which is in no list yet."""
        rest = CachedBlock(block.address + size, block.size - size, block.segment)
        rest.requested = block.requested
        rest.previous = block
        rest.next = following = block.next
        if following is not None:
            following.previous = rest
        block.next = rest
        block.size = size
        return rest

    def _complete(self, block: CachedBlock, frames: tuple[Frame, ...], kind: int = FREED) -> None:
        """Makes a freed block free: joins it with free neighbours and puts it in its pool."""
        segment = block.segment
        pool = segment.pool
        keys = segment.free
        size = whole = block.size
        requested = block.requested
        if self.sinks:
            self._emit("free_completed", block.address, requested, segment, frames)
        splits = split_bytes = 0
        left = block.previous
        right = block.next
        if left is not None and not left.state:
            left_size = left.size
            del keys[bisect_left(keys, left_size << KEY_SHIFT | left.address)]
            del self._blocks[block.address]
            splits -= 1
            split_bytes -= left_size
            left.size = whole = left_size + size
            left.requested = requested
            left.next = right
            if right is not None:
                right.previous = left
            block = left
        else:
            block.state = FREE
        if right is not None and not right.state:
            right_size = right.size
            del keys[bisect_left(keys, right_size << KEY_SHIFT | right.address)]
            del self._blocks[right.address]
            splits -= 1
            split_bytes -= right_size
            block.size = whole = whole + right_size
            block.next = right = right.next
            if right is not None:
                right.previous = block
        block.age_base = pool.lookups
        insort(keys, whole << KEY_SHIFT | block.address)
        if segment.expandable:
            # The counters of unused pieces leave expandable segments out.
            splits = split_bytes = 0
        elif block.previous is not None or right is not None:
            splits += 1
            split_bytes += whole
        self._journal += (kind + pool.code, -size, -requested, splits, split_bytes)

    def _complete_pending(self, block: CachedBlock) -> None:
        """One of the streams that a block waits for is done."""
        block.waits -= 1
        if block.waits == 0:
            self._complete(block, self._frames_of_free(block) if self.sinks else (), FREE_COMPLETED)

    # Events.

    def _emit(self, action: str, address: int, size: int, segment: CachedSegment, frames: tuple[Frame, ...]) -> None:
        group = segment.pool.group
        self._send(action, address, size, segment.stream, frames, group)

    def _send(
        self, action: str, address: int, size: int, stream: int, frames: tuple[Frame, ...], group: PoolGroup
    ) -> None:
        pool_id = group.id if group.is_private else None
        event = TraceEvent(action, address, size, stream, time.time_ns() // 1000, frames, pool_id)
        for sink in self.sinks:
            sink.append(event)

    def _frames_of_alloc(self, frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
        return frames if self.stack_context != "state" else ()

    def _frames_of_free(self, block: CachedBlock) -> tuple[Frame, ...]:
        noted = self.stacks_at_ends.pop(block.address, None)
        return self._frames_of_giving_back(block.frames) if noted is None else noted

    def _frames_of_giving_back(self, taken: tuple[Frame, ...]) -> tuple[Frame, ...]:
        """taken: those with which a block, or a segment, was taken."""
        if self.stack_context == "state":
            return ()
        return self.stacks() if self.stacks is not None and self.stack_context == "all" else taken

    def _block_at(self, address: int) -> CachedBlock:
        block = self._blocks.get(address)
        if block is None or block.state != ALLOCATED:
            raise ValueError(f"no allocated block at address {address:#x}")
        return block
