"""Which private pool each request of a trace went to. Traces up to PyTorch 2.12 do not say: the segment's pool tells it."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence

from gpumem_magic.allocator.blocks import DEFAULT_POOL, PoolId
from gpumem_magic.snapshot.model import Segment, TraceEvent

_OPENING = ("segment_alloc", "segment_map")
_CLOSING = ("segment_free", "segment_unmap")


class PrivatePools:
    """The private pools' segments while a trace runs. False where there are none, so that nobody needs to ask.

    The pool of a segment that the trace opened and that is gone at its end is not known: it counts as a default one.
    """

    def __init__(self, start: Sequence[Segment], events: Sequence[TraceEvent], final: Sequence[Segment]) -> None:
        private = [segment for segment in final if segment.segment_pool_id != DEFAULT_POOL]
        self._open: list[tuple[int, int, PoolId]] = sorted(
            (segment.address, segment.address + segment.total_size, segment.segment_pool_id)
            for segment in start
            if segment.segment_pool_id != DEFAULT_POOL
        )
        # Index of an event that got memory for a private pool -> the pool.
        self._gets: dict[int, PoolId] = {}
        self._next: PoolId | None = None
        self._says = any(event.pool_id is not None for event in events)
        if private and not self._says:
            last_got: dict[int, int] = {}
            for index, event in enumerate(events):
                if event.action in _OPENING:
                    last_got[event.address] = index
            for address, index in last_got.items():
                for segment in private:
                    if segment.address <= address < segment.address + segment.total_size:
                        self._gets[index] = segment.segment_pool_id
        self._exists = bool(private or self._open or self._says)

    def __bool__(self) -> bool:
        return self._exists

    def of(self, event: TraceEvent) -> PoolId | None:
        """The private pool of a request, None for the default ones."""
        if self._says:
            return event.pool_id if event.pool_id != DEFAULT_POOL else None
        got, self._next = self._next, None
        if got is not None or event.action != "alloc":
            return got
        place = bisect_right(self._open, (event.address, 1 << 64, DEFAULT_POOL)) - 1
        if place >= 0 and event.address < self._open[place][1]:
            return self._open[place][2]
        return None

    def of_new_memory(self, index: int, event: TraceEvent) -> PoolId:
        """The pool that a segment_alloc or segment_map event was for."""
        return event.pool_id or self._gets.get(index, DEFAULT_POOL)

    def note(self, index: int, event: TraceEvent) -> None:
        """A segment event of the trace."""
        if event.action in _OPENING:
            pool_id = self._gets.get(index)
            if pool_id is not None:
                insort(self._open, (event.address, event.address + event.size, pool_id))
                self._next = pool_id
        elif event.action in _CLOSING and self._open:
            end = event.address + event.size
            still_open = []
            for begin, stop, pool_id in self._open:
                if begin < event.address:
                    still_open.append((begin, min(stop, event.address), pool_id))
                if stop > end:
                    still_open.append((max(begin, end), stop, pool_id))
                # A range between the two is gone with the pages.
            self._open = still_open
