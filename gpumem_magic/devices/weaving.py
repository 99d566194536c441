"""A device's log from what was recorded of it: runs of events, and between them the totals at the marks.

Where events are missing, the log shows what is known: blocks that were there before and after, and one stand-in block for the
rest, as big as the counters say. Such stand-ins have the origin "summed". Nothing is invented beyond that: the bytes allocated
and reserved at each mark are the counters', and a peak between two marks shows where the counters tell it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpumem_magic.devices.history import Chunk, CountersMark
from gpumem_magic.devices.readings import KIND_OF_ACTION, minus
from gpumem_magic.snapshot.model import (
    ACTIVE,
    BLOCK_ADDRESS,
    INACTIVE,
    LARGE_POOL,
    PENDING_FREE,
    Block,
    Segment,
    TraceEvent,
)
from gpumem_magic.snapshot.rules import MIN_BLOCK, AllocatorSettings
from gpumem_magic.snapshot.start import start_of
from gpumem_magic.snapshot.timeline import Timeline

# No GPU has addresses up here. Stand-ins for segments, and above them for blocks that fit into none.
SEGMENT_ADDRESS = 1 << 61


@dataclass
class Woven:
    """start, events, origins and places are a `DeviceLog`'s.

    dropped: how many events are not there. hidden: between how many marks a peak may have been higher than is shown.
    disagreed: whether events had to be given up because they did not fit the counters.
    """

    start: tuple[Segment, ...]
    events: list[TraceEvent] = field(default_factory=list)
    origins: dict[int, str] = field(default_factory=dict)
    places: dict[int, int] | None = None
    dropped: int = 0
    hidden: int = 0
    disagreed: bool = False


def weave(
    device: int,
    start: tuple[Segment, ...],
    marks: Sequence[CountersMark],
    chunks: Sequence[Chunk],
    settings: AllocatorSettings,
) -> Woven:
    """The log of a device. marks: at least one, the first being the log's begin and the last its end."""
    last = marks[-1]
    joined = _joined(chunks)
    fitting = [chunk for chunk in joined if _fits(chunk, marks)]
    if len(fitting) == 1 and fitting[0].first == 0 and fitting[0].end == last.raw:
        return Woven(start, fitting[0].events)
    if not start and marks[0].reserved:
        start = (_segment_of_totals(device, marks[0]),)
    if not last.raw and not fitting:
        return Woven(start)
    weaver = _Weaver(start, marks, settings)
    usable = []
    for chunk in fitting:
        begin = start if chunk.first == 0 else _begin_of(chunk, settings)
        if begin is not None:
            usable.append((chunk, begin))
    for chunk, begin in usable:
        weaver.skip_to(chunk, begin)
        weaver.add(chunk)
    weaver.finish(joined[-1].segments if joined else None)
    woven = weaver.woven
    woven.disagreed = len(usable) < len(joined)
    return woven


def _joined(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Stretches that touch or overlap are one; empty ones only say what the segments were."""
    joined: list[Chunk] = []
    for chunk in chunks:
        before = joined[-1] if joined else None
        if before is None or chunk.first > before.end:
            joined.append(chunk)
        elif chunk.end >= before.end:
            # One that reaches further back than the one before takes its place.
            persisting = before.events[: max(chunk.first - before.first, 0)]
            first = min(before.first, chunk.first)
            joined[-1] = Chunk(first, [*persisting, *chunk.events], chunk.segments)
    return joined


def _fits(chunk: Chunk, marks: Sequence[CountersMark]) -> bool:
    """Whether the marks within an interval counted the same kinds of events as it has, from its first mark's on."""
    inside = [mark for mark in marks if chunk.first <= mark.raw <= chunk.end]
    if not inside:
        return True
    seen = [0] * len(inside[0].counts)
    origin: tuple[int, ...] | None = None
    event = 0
    for mark in inside:
        while event < mark.raw - chunk.first:
            seen[KIND_OF_ACTION[chunk.events[event].action]] += 1
            event += 1
        found = minus(mark.counts, tuple(seen))
        if origin is None:
            origin = found
        if found != origin or sum(mark.counts) != mark.raw:
            return False
    return True


def _begin_of(chunk: Chunk, settings: AllocatorSettings) -> tuple[Segment, ...] | None:
    try:
        begin = start_of(chunk.segments, chunk.events, settings).segments
    except ValueError:
        return None
    waiting = _waiting(chunk.events)
    return tuple(_with_waiting(segment, waiting) for segment in begin) if waiting else begin


def _waiting(events: Sequence[TraceEvent]) -> set[int]:
    """Blocks whose free had been asked for before these events: it completes in them, and is not asked for."""
    found: set[int] = set()
    seen: set[int] = set()
    for event in events:
        if event.action in ("alloc", "free_requested"):
            seen.add(event.address)
        elif event.action == "free_completed" and event.address not in seen:
            found.add(event.address)
    return found


def _with_waiting(segment: Segment, waiting: set[int]) -> Segment:
    blocks = tuple(
        replace(block, state=PENDING_FREE) if block.state == ACTIVE and block.address in waiting else block
        for block in segment.blocks
    )
    return replace(segment, blocks=blocks)


def _segment_of_totals(device: int, mark: CountersMark) -> Segment:
    """What an allocator without segments holds at the start."""
    size = max(mark.reserved, mark.allocated)
    blocks = []
    if mark.allocated:
        blocks.append(Block(SEGMENT_ADDRESS, mark.allocated, mark.allocated, ACTIVE))
    if size > mark.allocated:
        blocks.append(Block(SEGMENT_ADDRESS + mark.allocated, size - mark.allocated, 0, INACTIVE))
    return Segment(device, SEGMENT_ADDRESS, size, 0, LARGE_POOL, tuple(blocks))


class _Weaver:
    """Writes the log from its beginning. `_marks` are those that are still to come."""

    def __init__(self, start: tuple[Segment, ...], marks: Sequence[CountersMark], settings: AllocatorSettings) -> None:
        self.woven = Woven(start, places={marks[0].raw: 0})
        self._settings = settings
        self._state = start
        self._before = marks[0]
        self._marks = list(marks[1:])
        self._raw = 0
        self._serial = 0
        # The stand-ins that are there now.
        self._block: Block | None = None
        self._segment: tuple[int, int] | None = None
        self._base_allocated = self._base_reserved = 0

    def add(self, chunk: Chunk) -> None:
        """An interval of real events."""
        assert self.woven.places is not None
        offset = len(self.woven.events) - chunk.first
        self.woven.events += chunk.events
        while self._marks and self._marks[0].raw <= chunk.end:
            self._before = self._marks.pop(0)
            self.woven.places[self._before.raw] = self._before.raw + offset
        self._state, self._raw = chunk.segments, chunk.end

    def skip_to(self, chunk: Chunk, begin: tuple[Segment, ...]) -> None:
        """Up to an interval of events, which begins with the segments `begin`."""
        if chunk.first <= self._raw:
            return
        between = []
        while self._marks and self._marks[0].raw < chunk.first:
            between.append(self._marks.pop(0))
        persisting = self._leave(begin, between)
        self._totals(between)
        self._peak_before(chunk, begin)
        self._stand_ins(0, 0)
        self._arrive(begin, persisting)
        self.woven.dropped += chunk.first - self._raw

    def finish(self, final: tuple[Segment, ...] | None) -> None:
        """To the end of the log, where no events are left. final: the segments then, if they are known."""
        if not self._marks:
            return
        self.woven.dropped += self._marks[-1].raw - self._raw
        self._leave(final or (), self._marks)
        self._totals(self._marks)

    # Gaps.

    def _leave(self, later: tuple[Segment, ...], between: Sequence[CountersMark]) -> dict[int, Segment]:
        """Takes away all but the segments with blocks that are there later as well, which it returns by address."""
        persisting = _persisting(self._state, later)
        self._base_allocated = sum(segment.allocated_size for segment in persisting.values())
        self._base_reserved = sum(segment.total_size for segment in persisting.values())
        if any(
            mark.allocated < self._base_allocated or mark.reserved < self._base_reserved
            for mark in (self._before, *between)
        ):
            # They went and came again in the meantime.
            persisting = {}
            self._base_allocated = self._base_reserved = 0
        for segment in self._state:
            staying = (
                {block.address for block in persisting[segment.address].blocks}
                if segment.address in persisting
                else set()
            )
            for block in segment.blocks:
                if block.state != INACTIVE and block.address not in staying:
                    self._free(block.address, block.requested_size, pending=block.state == PENDING_FREE)
            if segment.address not in persisting:
                action = "segment_unmap" if segment.is_expandable else "segment_free"
                self._event(action, segment.address, segment.total_size, segment.stream)
        return persisting

    def _totals(self, marks: Sequence[CountersMark]) -> None:
        assert self.woven.places is not None
        for mark in marks:
            before = self._before
            highest = max(mark.allocated, before.allocated)
            highest_reserved = max(mark.reserved, before.reserved)
            told = mark.peak_allocated if mark.peak_allocated != before.peak_allocated else 0
            told_reserved = mark.peak_reserved if mark.peak_reserved != before.peak_reserved else 0
            if told > highest or told_reserved > highest_reserved:
                reserved = max(told_reserved, highest_reserved)
                self._stand_ins(min(max(told, highest), reserved), reserved)
            elif not told and mark.peak_allocated > highest and mark.raw != before.raw:
                self.woven.hidden += 1
            self._stand_ins(mark.allocated, mark.reserved)
            self.woven.places[mark.raw] = len(self.woven.events)
            self._before = mark

    def _peak_before(self, chunk: Chunk, begin: tuple[Segment, ...]) -> None:
        """A peak that the first mark within an interval tells, and that is not in the interval, was in the gap."""
        if not self._marks:
            return
        mark = self._marks[0]
        timeline = Timeline(begin, chunk.events[: mark.raw - chunk.first], self._settings)
        told = mark.peak_allocated if mark.peak_allocated != self._before.peak_allocated else 0
        told_reserved = mark.peak_reserved if mark.peak_reserved != self._before.peak_reserved else 0
        highest = max(timeline.peak(0, len(timeline))[0], self._before.allocated)
        highest_reserved = max(timeline.peak_reserved(0, len(timeline))[0], self._before.reserved)
        if told > highest or told_reserved > highest_reserved:
            reserved = max(told_reserved, self._before.reserved, timeline.reserved_at(0))
            self._stand_ins(told if told > highest else min(self._before.allocated, reserved), reserved)
        elif not told and mark.peak_allocated > highest:
            self.woven.hidden += 1

    def _stand_ins(self, allocated: int, reserved: int) -> None:
        """Makes the stand-ins such that these are the totals; without them where the totals are 0."""
        volatile = max(allocated - self._base_allocated, 0)
        segment = max(reserved - self._base_reserved, 0)
        block_size = self._block.size if self._block is not None else 0
        segment_size = self._segment[1] if self._segment is not None else 0
        if (block_size, segment_size) == (volatile, segment):
            return
        if self._block is not None:
            self._free(self._block.address, self._block.requested_size)
            self._block = None
        if segment_size != segment:
            if self._segment is not None:
                self._event("segment_free", *self._segment)
                self._segment = None
            if segment:
                self._segment = self._new(SEGMENT_ADDRESS, segment), segment
                self._event("segment_alloc", *self._segment)
        if volatile:
            address = self._new(BLOCK_ADDRESS, volatile)
            if self._segment is not None and segment >= volatile:
                # At the very end of its segment a block is exactly as big as its place, whatever sizes are rounded to.
                address = sum(self._segment) - volatile
            requested = volatile // MIN_BLOCK * MIN_BLOCK or volatile
            self.woven.origins[len(self.woven.events)] = "summed"
            self._event("alloc", address, requested)
            self._block = Block(address, volatile, requested, ACTIVE)

    def _arrive(self, begin: tuple[Segment, ...], persisting: Mapping[int, Segment]) -> None:
        """What is there where the events go on. From high to low: then a block's size follows from the one above it.

        Blocks whose free waits come first: they were allocated when the others may not have been.
        """
        coming: list[tuple[Block, int]] = []
        for segment in begin:
            staying = persisting.get(segment.address)
            known = {block.address for block in staying.blocks if block.state == ACTIVE} if staying else set()
            if staying is None:
                action = "segment_map" if segment.is_expandable else "segment_alloc"
                self._event(action, segment.address, segment.total_size, segment.stream)
            coming += [
                (block, segment.stream)
                for block in reversed(segment.blocks)
                if block.state != INACTIVE and block.address not in known
            ]
        for block, stream in sorted(coming, key=lambda pair: pair[0].state != PENDING_FREE):
            self.woven.origins[len(self.woven.events)] = "summed"
            self._event("alloc", block.address, block.requested_size, stream)
            if block.state == PENDING_FREE:
                self._event("free_requested", block.address, block.requested_size, stream)

    # Events.

    def _new(self, base: int, size: int) -> int:
        self._serial += 1
        # Far apart, and below the next base; after so many, the first are long gone.
        return base + (self._serial % (1 << 18) << 42)

    def _event(self, action: str, address: int, size: int, stream: int = 0) -> None:
        self.woven.events.append(TraceEvent(action, address, size, stream))

    def _free(self, address: int, requested: int, *, pending: bool = False) -> None:
        if not pending:
            self._event("free_requested", address, requested)
        self._event("free_completed", address, requested)


def _persisting(before: Sequence[Segment], after: Sequence[Segment]) -> dict[int, Segment]:
    """Segments that are there at both times with the same blocks in them, by address, holding those blocks only."""
    later = {segment.address: segment for segment in after}
    found: dict[int, Segment] = {}
    for segment in before:
        other = later.get(segment.address)
        if other is None or other.total_size != segment.total_size:
            continue
        same = set(_used(other)) & set(_used(segment))
        if same:
            blocks = tuple(block for block in segment.blocks if _key(block) in same)
            found[segment.address] = Segment(
                segment.device, segment.address, segment.total_size, segment.stream, segment.segment_type, blocks
            )
    return found


def _key(block: Block) -> tuple[int, int, int, str]:
    return block.address, block.size, block.requested_size, block.state


def _used(segment: Segment) -> list[tuple[int, int, int, str]]:
    return [_key(block) for block in segment.blocks if block.state == ACTIVE]
