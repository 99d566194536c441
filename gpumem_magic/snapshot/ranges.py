"""Mapped ranges of expandable segments, added and removed: ranges that touch are one segment in a snapshot."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from dataclasses import replace

from gpumem_magic.snapshot.model import Segment


class MappedRanges:
    """Ranges by address, as segments without blocks. Those of one stream and pool that touch are joined."""

    def __init__(self, segments: Iterable[Segment]) -> None:
        self._ranges: dict[int, Segment] = {}
        self._starts: list[int] = []
        for segment in segments:
            if segment.blocks:
                # Thousands of them may be there at the start; `replace` takes three times as long.
                segment = Segment(
                    segment.device,
                    segment.address,
                    segment.total_size,
                    segment.stream,
                    segment.segment_type,
                    (),
                    segment.is_expandable,
                    segment.segment_pool_id,
                    segment.frames,
                )
            self._put(segment)

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[Segment]:
        return iter([self._ranges[start] for start in self._starts])

    def add(self, segment: Segment) -> None:
        """Puts a range on; what lies there already is replaced."""
        self.remove(segment.address, segment.total_size)
        for place in (segment.address - 1, segment.address + segment.total_size):
            near = self.at(place)
            if near is not None and _home(near) == _home(segment):
                self._drop(near)
                begin = min(near.address, segment.address)
                size = near.total_size + segment.total_size
                segment = replace(segment, address=begin, total_size=size, frames=near.frames or segment.frames)
        self._put(segment)

    def remove(self, address: int, size: int) -> None:
        """Takes a range off, as far as it is there."""
        end = address + size
        for known in self.within(address, size):
            self._drop(known)
            stop = known.address + known.total_size
            if known.address < address:
                self._put(replace(known, total_size=address - known.address))
            if stop > end:
                self._put(replace(known, address=end, total_size=stop - end))

    def at(self, address: int) -> Segment | None:
        """The range that an address lies in."""
        place = bisect_right(self._starts, address) - 1
        if place < 0:
            return None
        found = self._ranges[self._starts[place]]
        return found if address < found.address + found.total_size else None

    def within(self, address: int, size: int) -> list[Segment]:
        """The ranges that share an address with the given one."""
        first = bisect_right(self._starts, address) - 1
        if first < 0 or self.at(address) is None:
            first += 1
        return [self._ranges[start] for start in self._starts[first : bisect_left(self._starts, address + size)]]

    def _put(self, segment: Segment) -> None:
        self._ranges[segment.address] = segment
        insort(self._starts, segment.address)

    def _drop(self, segment: Segment) -> None:
        del self._ranges[segment.address]
        del self._starts[bisect_left(self._starts, segment.address)]


def _home(segment: Segment) -> tuple[int, str, tuple[int, int]]:
    return segment.stream, segment.segment_type, segment.segment_pool_id
