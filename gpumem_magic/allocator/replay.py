"""Replaying a recorded trace through the emulated allocator, which decides for itself where everything goes.

Recorded addresses are labels: they say which block an event is about, and where the driver put each segment. Where a block
goes within the segments is the emulator's decision, compared with what was recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gpumem_magic.allocator.caching import CachingAllocator
from gpumem_magic.allocator.memory import DeviceMemory, FirstFitAddresses
from gpumem_magic.snapshot.model import ACTIVE, PENDING_FREE, Segment, TraceEvent
from gpumem_magic.snapshot.rules import DEFAULT_SETTINGS, UNLIMITED, AllocatorSettings

# Above any address of a GPU: segments that the emulator opened and the recording did not.
_UNRECORDED_BASE = 1 << 60


@dataclass
class ReplayResult:
    """allocations: the alloc events. placed: those that the emulator put at the recorded address, opening a segment of the
    recorded size exactly where the recording opened one. misplaced: indices of the other events. allocator: its end state.
    """

    allocator: CachingAllocator
    allocations: int = 0
    placed: int = 0
    misplaced: list[int] = field(default_factory=list)
    unmatched: int = 0


class _RecordedAddresses:
    """Puts the next segment where the recording put it, if the recording opened one of that size now."""

    def __init__(self) -> None:
        self.offered: tuple[int, int] | None = None
        self._unrecorded = FirstFitAddresses(_UNRECORDED_BASE)

    def take(self, size: int) -> int:
        if self.offered is not None and self.offered[1] == size:
            address = self.offered[0]
            self.offered = None
            return address
        return self._unrecorded.take(size)

    def claim(self, address: int, size: int) -> None:
        """Nothing: the recording's driver knew which addresses were free."""

    def give_back(self, address: int) -> None:
        if address >= _UNRECORDED_BASE:
            self._unrecorded.give_back(address)


def replay(
    start: Sequence[Segment],
    events: Sequence[TraceEvent],
    settings: AllocatorSettings = DEFAULT_SETTINGS,
    device: int = 0,
) -> ReplayResult:
    """Sends a trace's requests through the emulator, from the segments at its start (() for an empty allocator).

    What can't be predicted is taken from the trace: the addresses of segments, when they are given back, and when a free
    that waited for a stream completed. `unmatched` in the result counts events about blocks or segments that are not there.
    Raises ValueError for expandable segments.
    """
    addresses = _RecordedAddresses()
    allocator = CachingAllocator(device, DeviceMemory(UNLIMITED, addresses=addresses), settings, auto_complete=False)
    allocator.adopt(start)
    result = ReplayResult(allocator)
    # Recorded address -> where the emulator put it. They are equal as long as the emulation is right.
    labels = {block.address: block.address for segment in start for block in segment.blocks if block.state == ACTIVE}
    # A free that waits does so for a stream of its own here, so that it can be completed alone.
    waits_for: dict[int, int] = {
        block.address: segment.stream for segment in start for block in segment.blocks if block.state == PENDING_FREE
    }
    for index, event in enumerate(events):
        address = event.address
        if event.action == "segment_alloc":
            addresses.offered = address, event.size
        elif event.action == "alloc":
            labels[address] = allocator.malloc(event.size, event.stream)
            result.allocations += 1
            if labels[address] == address and addresses.offered is None:
                result.placed += 1
            else:
                result.misplaced.append(index)
            addresses.offered = None
        elif event.action == "free_requested" and address in labels:
            block = labels.pop(address)
            following = events[index + 1] if index + 1 < len(events) else None
            if following is None or following.action != "free_completed" or following.address != address:
                waits_for[address] = -1 - index
                allocator.record_stream(block, waits_for[address])
            allocator.free(block)
        elif event.action == "free_completed":
            if address in waits_for:
                allocator.complete_pending(waits_for.pop(address))
            elif address in labels:
                # A trace that has no free_requested events.
                allocator.free(labels.pop(address))
        elif event.action == "segment_free":
            try:
                allocator.release_segment(address)
            except ValueError:
                result.unmatched += 1
        elif event.action == "free_requested":
            result.unmatched += 1
        elif event.action in ("segment_map", "segment_unmap"):
            raise ValueError("expandable segments are not emulated")
    return result
