"""The state in which a trace began, worked out from the segments at its end and the events between.

Exact, except for blocks from before the trace that it frees: their events carry the requested size only, and a large one may
have kept up to 1 MiB that was not worth cutting off. Where the neighbourhood gives that away, it is used.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpumem_magic.snapshot.model import (
    ACTIVE,
    INACTIVE,
    LARGE_POOL,
    PENDING_FREE,
    SMALL_POOL,
    Block,
    Segment,
    TraceEvent,
    with_free_space,
)
from gpumem_magic.snapshot.ranges import MappedRanges
from gpumem_magic.snapshot.rules import (
    DEFAULT_SETTINGS,
    MIN_BLOCK,
    SMALL_LIMIT,
    AllocatorSettings,
    pool_of_segment,
    round_size,
)
from gpumem_magic.units import MIB


@dataclass(frozen=True)
class StartState:
    """segments: when the trace began. unsettled: addresses of blocks whose size is a lower bound (by up to 1 MiB each). orphans:
    blocks from before the trace in segments that are not known; they are left out.
    """

    segments: tuple[Segment, ...]
    unsettled: frozenset[int]
    orphans: int

    @property
    def uncertain(self) -> int:
        """How many blocks are unsettled."""
        return len(self.unsettled)


def start_of(
    final: Sequence[Segment],
    events: Sequence[TraceEvent],
    settings: AllocatorSettings = DEFAULT_SETTINGS,
) -> StartState:
    """The start of one device's trace, given its segments at the end, of both kinds."""
    segments, opened = _earlier_segments(final, events)
    segments = sorted([*segments, *_earlier_ranges(final, events)], key=lambda segment: segment.address)
    blocks, born, waiting = _freed_blocks(events, settings)
    guessed = set(blocks)
    for segment in final:
        if not segment.is_expandable and segment.address in opened:
            continue
        for block in segment.blocks:
            if block.state != INACTIVE and block.address not in born:
                # Its free may have been requested in the trace and still wait for a stream at the end.
                blocks[block.address] = replace(block, state=ACTIVE) if block.address in waiting else block
                guessed.discard(block.address)
    starts = sorted(blocks)
    homes = {start: segment for segment in segments for start in _within(starts, segment)}
    unsettled = _settle_sizes(blocks, guessed, homes, events, settings)
    return StartState(
        tuple(
            replace(
                segment,
                blocks=with_free_space(
                    segment.address, segment.total_size, (blocks[start] for start in _within(starts, segment))
                ),
            )
            for segment in segments
        ),
        unsettled,
        len(blocks) - len(homes),
    )


def _earlier_segments(final: Sequence[Segment], events: Sequence[TraceEvent]) -> tuple[list[Segment], set[int]]:
    """The segments from before the trace that are not expandable; and the addresses of those that the trace opened."""
    opened: set[int] = set()
    released: list[Segment] = []
    device = final[0].device if final else 0
    for event in events:
        if event.action == "segment_alloc":
            opened.add(event.address)
        elif event.action == "segment_free":
            if event.address not in opened:
                pool = pool_of_segment(event.size)
                pool_id = event.pool_id or (0, 0)
                released.append(
                    Segment(device, event.address, event.size, event.stream, pool, (), segment_pool_id=pool_id)
                )
            opened.discard(event.address)
    remaining = [segment for segment in final if not segment.is_expandable and segment.address not in opened]
    return remaining + released, opened


def _earlier_ranges(final: Sequence[Segment], events: Sequence[TraceEvent]) -> list[Segment]:
    """The mapped ranges of expandable segments before the trace: those at its end, with each step undone."""
    steps = [event for event in events if event.action in ("segment_map", "segment_unmap")]
    ranges = MappedRanges(segment for segment in final if segment.is_expandable)
    small_maps = sorted(
        (event.address, number)
        for number, event in enumerate(steps)
        if event.action == "segment_map" and pool_of_segment(event.size) == SMALL_POOL
    )
    device = final[0].device if final else 0
    for number, event in reversed(list(enumerate(steps))):
        if event.action == "segment_map":
            ranges.remove(event.address, event.size)
            continue
        near = ranges.at(event.address - 1) or ranges.at(event.address + event.size)
        if near is not None and near.stream == event.stream:
            pool, pool_id = near.segment_type, near.segment_pool_id
        else:
            begin = bisect_left(small_maps, (event.address, 0))
            stop = bisect_left(small_maps, (event.address + event.size, 0))
            # Only what was mapped before: later, another segment may lie at these addresses.
            was_small = any(when < number for _, when in small_maps[begin:stop])
            # Without a trace of where the pages came from: large ones are many, and rarely fit this size by chance.
            pool = SMALL_POOL if was_small or event.size % (10 * MIB) else LARGE_POOL
            pool_id = (0, 0)
        ranges.add(
            Segment(
                device, event.address, event.size, event.stream, pool, (), True, event.pool_id or pool_id, event.frames
            )
        )
    return list(ranges)


def _freed_blocks(
    events: Sequence[TraceEvent], settings: AllocatorSettings
) -> tuple[dict[int, Block], set[int], set[int]]:
    """Blocks from before the trace that it frees, with their least size; and at its end the addresses of blocks that it
    allocated, and of those that wait for a stream."""
    born: set[int] = set()
    waiting: set[int] = set()
    blocks: dict[int, Block] = {}
    requests_are_recorded = _records_requests(events)
    for event in events:
        address = event.address
        if event.action == "alloc":
            born.add(address)
        elif event.action == "free_requested":
            waiting.add(address)
            if address not in born and address not in blocks:
                blocks[address] = Block(address, round_size(event.size, settings), event.size, ACTIVE)
        elif event.action == "free_completed":
            if address not in born and address not in blocks:
                # Its free was requested before the trace began, if the trace has such events.
                state = PENDING_FREE if requests_are_recorded else ACTIVE
                blocks[address] = Block(address, round_size(event.size, settings), event.size, state)
            born.discard(address)
            waiting.discard(address)
    return blocks, born, waiting


def _records_requests(events: Sequence[TraceEvent]) -> bool:
    """Whether the trace has requests of frees, as PyTorch's have. One without that frees what it allocated leaves them out."""
    born: set[int] = set()
    for event in events:
        if event.action == "free_requested":
            return True
        if event.action == "alloc":
            born.add(event.address)
        elif event.action == "free_completed" and event.address in born:
            return False
    return True


def _within(starts: Sequence[int], segment: Segment) -> Sequence[int]:
    """Those of the sorted addresses that lie in a segment."""
    return starts[bisect_left(starts, segment.address) : bisect_left(starts, segment.address + segment.total_size)]


def _settle_sizes(
    blocks: dict[int, Block],
    guessed: set[int],
    homes: dict[int, Segment],
    events: Sequence[TraceEvent],
    settings: AllocatorSettings,
) -> frozenset[int]:
    """Completes the guessed sizes where there is proof; returns the addresses that are left without.

    In the large pool every free piece exceeds 1 MiB, since neither a block nor what is cut off is smaller. So a gap of up
    to 1 MiB behind a block belongs to it. Behind a larger gap's block, the first request that is put into the gap shows
    where the free piece began, because a request gets the low end. For a request beyond the split limit nothing is cut: it
    has all that there was.
    """
    starts = sorted(homes)
    open_questions: set[int] = set()
    for place, start in enumerate(starts):
        segment = homes[start]
        if start not in guessed:
            continue
        end = segment.address + segment.total_size
        if place + 1 < len(starts):
            end = min(end, starts[place + 1])
        gap = end - start - blocks[start].size
        if segment.segment_type != LARGE_POOL or segment.is_expandable or settings.expandable_segments:
            if 0 < gap < MIN_BLOCK:
                blocks[start] = replace(blocks[start], size=end - start)
        elif gap > SMALL_LIMIT and blocks[start].size < settings.max_split_size:
            open_questions.add(start)
        else:
            blocks[start] = replace(blocks[start], size=end - start)
    unsettled = set(open_questions)
    for event in events:
        if not open_questions:
            break
        if event.action == "alloc":
            before = bisect_right(starts, event.address) - 1
            start = starts[before] if before >= 0 else -1
            if start in open_questions and event.address < homes[start].address + homes[start].total_size:
                size = event.address - start
                surplus = size - blocks[start].size
                open_questions.discard(start)
                if 0 <= surplus <= SMALL_LIMIT:
                    blocks[start] = replace(blocks[start], size=size)
                    unsettled.discard(start)
            insort(starts, event.address)
        elif event.action == "free_completed":
            place = bisect_left(starts, event.address)
            if place < len(starts) and starts[place] == event.address:
                del starts[place]
            open_questions.discard(event.address)
    return frozenset(unsettled)
