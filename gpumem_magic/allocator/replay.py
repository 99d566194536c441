"""Replaying a recorded trace through the emulated allocator, which makes its own decisions about where everything goes.

Recorded addresses are labels: they say which block an event is about, and where the driver put each segment. Where a block
goes within the segments, and when memory is asked of the driver, is the emulator's decision, compared with the recording.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from gpumem_magic.allocator.adoption import RangeKey, range_key
from gpumem_magic.allocator.blocks import PoolId
from gpumem_magic.allocator.caching import CachingAllocator
from gpumem_magic.allocator.failure import DeviceOutOfMemory
from gpumem_magic.allocator.recorded import RecordedMemory
from gpumem_magic.allocator.recorded_pools import PrivatePools
from gpumem_magic.snapshot.model import PENDING_FREE, Segment, TraceEvent
from gpumem_magic.snapshot.ranges import MappedRanges
from gpumem_magic.snapshot.rules import (
    DEFAULT_SETTINGS,
    AllocatorSettings,
    page_size,
    pool_of,
    pool_of_segment,
    round_size,
)

_SEGMENT_ACTIONS = frozenset({"segment_alloc", "segment_free", "segment_map", "segment_unmap"})


@dataclass
class ReplayResult:
    """allocations: the alloc events. misplaced: indices of those that the emulator put elsewhere, or for which it asked the
    driver for something else. decisions: the segment_* events; misjudged: indices of those that it would not have made.
    unmatched: events about blocks or segments that are not there. first_moved: of the first block that the emulator put
    elsewhere, the index of its event and where it went; None where there is none. allocator: its end state.
    """

    allocator: CachingAllocator
    allocations: int = 0
    misplaced: list[int] = field(default_factory=list)
    decisions: int = 0
    misjudged: list[int] = field(default_factory=list)
    unmatched: int = 0
    first_moved: tuple[int, int] | None = None

    @property
    def placed(self) -> int:
        return self.allocations - len(self.misplaced)

    @property
    def agrees(self) -> bool:
        """Whether every allocation and every segment decision is the recording's."""
        return not self.misplaced and not self.misjudged and not self.unmatched


@dataclass(frozen=True)
class PoolFigures:
    """Of one pool and stream of one device."""

    device: int
    pool: str
    stream: int
    allocations: int
    placed: int
    decisions: int
    decided: int


def figures(
    result: ReplayResult, events: Sequence[TraceEvent], settings: AllocatorSettings = DEFAULT_SETTINGS
) -> list[PoolFigures]:
    """A result by pool and stream, in that order. `events` and `settings` are those that were replayed."""
    misplaced, misjudged = set(result.misplaced), set(result.misjudged)
    # Allocations, those of them that were placed, decisions, and those of them that were made.
    tallies: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    pools: dict[int, str] = {}
    for index, event in enumerate(events):
        if event.action == "alloc":
            pool = pools.get(event.size) or pools.setdefault(event.size, pool_of(round_size(event.size, settings)))
            tally = tallies[pool, event.stream]
            tally[0] += 1
            tally[1] += index not in misplaced
        elif event.action in _SEGMENT_ACTIONS:
            tally = tallies[pool_of_segment(event.size), event.stream]
            tally[2] += 1
            tally[3] += index not in misjudged
    return [PoolFigures(result.allocator.device, *place, *tally) for place, tally in sorted(tallies.items())]


def replay(
    start: Sequence[Segment],
    events: Sequence[TraceEvent],
    settings: AllocatorSettings = DEFAULT_SETTINGS,
    device: int = 0,
    final: Sequence[Segment] = (),
) -> ReplayResult:
    """Sends a trace's requests through the emulator, from the segments at its start (() for an empty allocator).

    What can't be predicted is taken from the trace: the addresses of segments, when memory is given back or has run out,
    and when a free that waited for a stream completed. final: the segments at its end, which tell the pools of segments
    that the trace opened. Raises ValueError where the start's segments overlap or are not tiled by their blocks, and for a
    request that no allocator serves.
    """
    run = _Replay(start, events, settings, device, final)
    try:
        return run.run()
    except DeviceOutOfMemory as failure:
        raise ValueError(f"a request of {failure.requested:,} bytes can't have been served") from None
    except (LookupError, TypeError, AssertionError):
        # Once the emulator went another way, the recording can open memory where the emulator has some already.
        if run.result.agrees:
            raise ValueError("its events contradict each other") from None
        return run.given_up()


class _Replay:
    def __init__(
        self,
        start: Sequence[Segment],
        events: Sequence[TraceEvent],
        settings: AllocatorSettings,
        device: int,
        final: Sequence[Segment],
    ) -> None:
        self._events = events
        self._memory = RecordedMemory()
        self._allocator = CachingAllocator(device, self._memory, settings, auto_complete=False)
        self._private = PrivatePools(start, events, final)
        self._allocator.adopt(start, _bases(start, events, settings, self._private))
        self._memory.surprises = 0
        self.result = ReplayResult(self._allocator)
        # A free that waits does so for a stream of its own here, so that it can be completed alone.
        self._waits_for: dict[int, int] = {
            block.address: segment.stream
            for segment in start
            for block in segment.blocks
            if block.state == PENDING_FREE
        }
        # Recorded address -> where the emulator put it, where that differs.
        self._moved: dict[int, int] = {}
        # Where there is memory, by the recording.
        self._ranges = MappedRanges(start)
        # Segments and pages that the recording got for the next request: indices of events.
        self._got: list[int] = []
        # Index of the alloc event of a request that flushed.
        self._flushed = -1
        # Of the releases and completed frees under way: where they end, the alloc event that follows, whether new memory
        # was got for it, and whether something was given back already.
        self._looked_until = 0
        self._request = -1
        self._got_more = False
        self._released = False

    def run(self) -> ReplayResult:
        events, result, moved, memory = self._events, self.result, self._moved, self._memory
        malloc, free = self._allocator.malloc, self._allocator.free
        has_private = bool(self._private)
        # The address of a free_requested event; most often the next event completes it.
        requested = -1
        index = -1
        for event in events:
            index += 1
            action, address, size, stream, _, _, _, _ = event
            if action == "free_completed" and address == requested:
                requested = -1
                try:
                    free(address if not moved else moved.pop(address, address))
                except ValueError:
                    result.unmatched += 1
                continue
            if requested >= 0:
                self._defer(requested, index - 1)
                requested = -1
            if action == "alloc":
                pool_id = self._private.of(event) if has_private else None
                after_flush = index == self._flushed
                place = self._malloc_after_flush(event, pool_id) if after_flush else malloc(size, stream, pool_id)
                result.allocations += 1
                if place != address or self._got or memory.surprises:
                    self._compare(index, address, place)
                elif moved:
                    moved.pop(address, None)
            elif action == "free_requested":
                requested = address
            elif action == "free_completed":
                self._complete(index, address)
            elif action in _SEGMENT_ACTIONS:
                result.decisions += 1
                self._segment_event(index, event)
                if has_private:
                    self._private.note(index, event)
        if requested >= 0:
            self._defer(requested, index)
        return result

    def given_up(self) -> ReplayResult:
        """The result where the emulator can't go on: nothing from there on counts as agreeing."""
        result = self.result
        allocations = [index for index, event in enumerate(self._events) if event.action == "alloc"]
        decisions = [index for index, event in enumerate(self._events) if event.action in _SEGMENT_ACTIONS]
        result.misplaced += [index for index in allocations[result.allocations :] if index not in result.misplaced]
        result.misjudged += [index for index in decisions[result.decisions :] if index not in result.misjudged]
        result.allocations, result.decisions = len(allocations), len(decisions)
        return result

    # Blocks.

    def _compare(self, index: int, address: int, place: int) -> None:
        """Notes a request that was not simply placed: elsewhere, or in memory that was got for it."""
        agrees = self._memory.agrees
        if not agrees:
            self.result.misjudged += self._got
        if place != address or not agrees:
            self.result.misplaced.append(index)
        if place != address:
            self._moved[address] = place
            self.result.first_moved = self.result.first_moved or (index, place)
        else:
            self._moved.pop(address, None)
        self._got.clear()

    def _defer(self, address: int, index: int) -> None:
        """A free that does not complete at once."""
        block = self._moved.pop(address, address)
        self._waits_for[address] = -1 - index
        try:
            self._allocator.record_stream(block, -1 - index)
            self._allocator.free(block)
        except ValueError:
            self.result.unmatched += 1

    def _complete(self, index: int, address: int) -> None:
        waits_for = self._waits_for.pop(address, None)
        if waits_for is not None:
            self._look_for_flush(index)
            self._allocator.complete_pending(waits_for)
            return
        try:
            # A trace that has no free_requested events.
            self._allocator.free(self._moved.pop(address, address))
        except ValueError:
            self.result.unmatched += 1

    def _look_for_flush(self, index: int) -> None:
        """Whether memory is given back, or a free that waited completes, because a request flushes everything. PyTorch then
        asks the driver, even where a piece that is free only since then would do; so the search has to be done before.
        """
        if index >= self._looked_until:
            self._look_ahead(index)
        if self._request < 0 or self._flushed == self._request or self._released:
            return
        events = self._events
        request, before = events[self._request], events[index - 1]
        pool_id = self._private.of_new_memory(self._looked_until, events[self._looked_until])
        # Which of the frees here were the flush's is not recorded: it was one if a search between any two found nothing.
        found = self._allocator.finds(request.size, request.stream, pool_id)
        # The free just before may be one that waited, and was completed by the flush at once.
        waited = index > 0 and before.action == "free_completed"
        if found is None or (waited and before.address in found):
            self._flushed = self._request
        self._released = events[index].action != "free_completed"

    def _look_ahead(self, index: int) -> None:
        """Finds the request that a run of releases and completed frees may belong to, and where its new memory begins."""
        events = self._events
        end = index
        while end < len(events) and events[end].action in ("free_completed", "segment_free", "segment_unmap"):
            end += 1
        self._looked_until = first = end
        while end < len(events) and events[end].action in ("segment_alloc", "segment_map"):
            end += 1
        self._request = end if index < end < len(events) and events[end].action == "alloc" else -1
        self._got_more = first < end
        self._released = False

    def _malloc_after_flush(self, event: TraceEvent, pool_id: PoolId | None) -> int:
        size, stream = event.size, event.stream
        if not self._got_more:
            # It may have been the program that emptied the cache, between two requests. Only a place that a search would
            # not have chosen, and growing would, says that it was the request.
            found = self._allocator.finds(size, stream, pool_id)
            is_found = found is not None and found.start == event.address
            if is_found or self._allocator.grows_at(size, stream, pool_id) != event.address:
                return self._allocator.malloc(size, stream, pool_id)
        return self._allocator.malloc_anew(size, stream, pool_id)

    # Segments.

    def _segment_event(self, index: int, event: TraceEvent) -> None:
        self._look_for_flush(index)
        if event.action in ("segment_alloc", "segment_map"):
            if event.size <= 0 or self._ranges.within(event.address, event.size):
                # There is memory already: the release of that is missing.
                self.result.unmatched += 1
                self.result.misjudged.append(index)
                return
            self._ranges.add(Segment(0, event.address, event.size, event.stream, pool_of_segment(event.size), ()))
        else:
            self._ranges.remove(event.address, event.size)
        if event.action == "segment_alloc":
            self._memory.opened = event
            self._got.append(index)
        elif event.action == "segment_map":
            self._memory.mapped.append(event)
            self._got.append(index)
            following = self._events[index + 1] if index + 1 < len(self._events) else None
            if following is None or following.action not in ("segment_map", "alloc"):
                self._fail_after_mapping(index)
        else:
            self._give_back(index, event)

    def _fail_after_mapping(self, index: int) -> None:
        """The recording mapped some pages and then the driver refused: the same is done here, if the request is known."""
        request = next((event for event in self._events[index + 1 :] if event.action in ("alloc", "oom")), None)
        self._memory.exhausted = True
        if request is not None:
            self._allocator.grow_in_vain(request.size, request.stream, self._private.of(request))
        self._memory.exhausted = False
        if not self._memory.agrees:
            self.result.misjudged += self._got
        self._got.clear()

    def _give_back(self, index: int, event: TraceEvent) -> None:
        try:
            if event.action == "segment_free":
                self._allocator.release_segment(event.address)
            elif not self._allocator.release_pages(event.address, event.size):
                self.result.misjudged.append(index)
        except ValueError:
            self.result.unmatched += 1
            self.result.misjudged.append(index)


def _bases(
    start: Sequence[Segment], events: Sequence[TraceEvent], settings: AllocatorSettings, private: PrivatePools
) -> dict[RangeKey, int]:
    """Where the expandable segments of the start begin: at the lowest page that is ever mapped while they exist."""
    bases: dict[RangeKey, int] = {}
    mapped: dict[RangeKey, MappedRanges] = {}
    for segment in start:
        if segment.is_expandable:
            key = range_key(segment, page_size(segment.segment_type, settings))
            bases[key] = min(bases.get(key, segment.address), segment.address)
            mapped.setdefault(key, MappedRanges(())).add(segment)
    for index, event in enumerate(events if bases else ()):
        if event.action == "segment_map":
            pool = pool_of_segment(event.size)
            place = event.address % page_size(pool, settings)
            key = event.stream, pool, private.of_new_memory(index, event), place
            if key in mapped:
                bases[key] = min(bases[key], event.address)
                mapped[key].add(Segment(0, event.address, event.size, event.stream, pool, (), True, key[2]))
        elif event.action == "segment_unmap":
            for key, ranges in list(mapped.items()):
                ranges.remove(event.address, event.size)
                if not ranges:
                    # The next one is a segment of its own.
                    del mapped[key]
    return bases


__all__ = ["PoolFigures", "PoolId", "ReplayResult", "figures", "replay"]
