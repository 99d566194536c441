"""Two recordings of one program, allocation by allocation: which request of the one is which of the other, and what differs.

Requests are paired in their order by the sizes of their blocks (the longest common subsequence: E. Myers, "An O(ND) Difference
Algorithm", 1986). Everything else is compared on the pairs: exact bytes, when the memory was freed, and where it lay.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from gpumem_magic.snapshot.model import Segment, TraceEvent
from gpumem_magic.snapshot.rules import round_size
from gpumem_magic.snapshot.timeline import Timeline
from gpumem_magic.units import counted

# More differences than this in one stretch are not searched for the best pairing: the search goes on from its furthest point.
MOST_DIFFERENCES = 1500


def longest_common(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[tuple[int, int]]:
    """The index pairs of a longest common subsequence. With over `MOST_DIFFERENCES` differences, of a long one."""
    pairs: list[tuple[int, int]] = []
    at_a, at_b = 0, 0
    while True:
        found, reached_a, reached_b = _search(a, b, at_a, at_b)
        pairs += found
        if reached_a == len(a) or reached_b == len(b):
            return pairs
        at_a, at_b = reached_a, reached_b


def _search(
    a: Sequence[Hashable], b: Sequence[Hashable], begin_a: int, begin_b: int
) -> tuple[list[tuple[int, int]], int, int]:
    """The pairs from a place on, and how far they reach."""
    # furthest[k]: how far in `a` one gets on the diagonal k (steps in `a` less steps in `b`) with so many differences.
    furthest = {1: 0}
    history: list[dict[int, int]] = []
    size_a, size_b = len(a) - begin_a, len(b) - begin_b
    best, best_history = (0, 0), 1
    for differences in range(MOST_DIFFERENCES + 1):
        history.append(dict(furthest) if differences else {1: 0})
        for diagonal in range(-differences, differences + 1, 2):
            if diagonal < -size_b or diagonal > size_a:
                continue
            if diagonal == -differences or (
                diagonal != differences and furthest.get(diagonal - 1, -1) < furthest.get(diagonal + 1, -1)
            ):
                x = furthest.get(diagonal + 1, 0)
            else:
                x = furthest[diagonal - 1] + 1
            y = x - diagonal
            while x < size_a and y < size_b and a[begin_a + x] == b[begin_b + y]:
                x, y = x + 1, y + 1
            furthest[diagonal] = x
            if x + y > sum(best) and x <= size_a and y <= size_b:
                best, best_history = (x, y), differences + 1
            if x >= size_a and y >= size_b:
                return _walk_back(history, x, y, begin_a, begin_b), len(a), len(b)
    return _walk_back(history[:best_history], *best, begin_a, begin_b), begin_a + best[0], begin_b + best[1]


def _walk_back(history: list[dict[int, int]], x: int, y: int, begin_a: int, begin_b: int) -> list[tuple[int, int]]:
    pairs = []
    for differences in range(len(history) - 1, -1, -1):
        furthest, diagonal = history[differences], x - y
        down = diagonal == -differences or (
            diagonal != differences and furthest.get(diagonal - 1, -1) < furthest.get(diagonal + 1, -1)
        )
        before_x = furthest.get(diagonal + 1, 0) if down else furthest.get(diagonal - 1, 0)
        before_y = before_x - (diagonal + 1 if down else diagonal - 1)
        while x > max(before_x, 0) and y > max(before_y, 0):
            x, y = x - 1, y - 1
            pairs.append((begin_a + x, begin_b + y))
        if differences:
            x, y = before_x, before_y
    pairs.reverse()
    return pairs


class Grown(NamedTuple):
    """Bytes by which the highest memory, and that at the end, exceed that of the start."""

    peak: int
    end: int


@dataclass(frozen=True)
class Recorded:
    """One device's recording: the segments at its start, its events, and what it was at every one of them.

    unsettled: how many blocks from before the first event have sizes that are only known to 1 MiB."""

    start: Sequence[Segment]
    events: Sequence[TraceEvent]
    timeline: Timeline
    unsettled: int = 0

    @property
    def growth(self) -> Grown:
        """Of allocated memory."""
        timeline, start = self.timeline, self.timeline.allocated_at(0)
        return Grown(timeline.peak(0, len(timeline))[0] - start, timeline.allocated_at(len(timeline)) - start)

    @property
    def growth_as_asked(self) -> Grown:
        """Of the bytes that were asked for, which the events of all blocks tell, also of those from before the first."""
        changes: Counter[int] = Counter()
        for one in self.timeline.allocations:
            if one.born >= 0:
                changes[one.born] += one.requested
            if one.freed is not None:
                changes[one.freed] -= one.requested
        sums = list(accumulate((changes[event] for event in sorted(changes)), initial=0))
        return Grown(max(sums), sums[-1])

    @property
    def peak_reserved(self) -> int:
        return self.timeline.peak_reserved(0, len(self.timeline))[0]

    @property
    def segments(self) -> int:
        """How many there are at the end."""
        return len(self.timeline.segments_at(len(self.timeline)))


@dataclass(frozen=True)
class Pairing:
    """Which allocation is which. a, b: each recording's allocations since its start, as indices of their events.

    pairs: positions in `a` and `b`. alone_a, alone_b: positions of those without a partner. Counts are of pairs: exact (the same
    requested bytes), freed_alike (freed between the same two other pairs; freed_otherwise: the others, by their number among the
    pairs, and when the second side frees them), same_place (in the same segment, counted in the order
    in which they were opened, at the same distance from its start; None unless both recordings begin empty).
    """

    a: Sequence[int]
    b: Sequence[int]
    pairs: Sequence[tuple[int, int]]
    alone_a: Sequence[int]
    alone_b: Sequence[int]
    exact: int
    freed_alike: int
    freed_otherwise: Sequence[tuple[int, str]]
    same_place: int | None
    bytes_a: int
    bytes_paired: int

    @property
    def matched(self) -> float:
        """The share of all allocations that have a partner, from 0 to 1: pairs count on both sides."""
        total = len(self.a) + len(self.b)
        return 2 * len(self.pairs) / total if total else 1.0


def growths(one: Recorded, other: Recorded) -> tuple[Grown, Grown]:
    """What each grew by: by its blocks, or as asked for where the sizes of blocks from before are not all known."""
    if one.unsettled or other.unsettled:
        return one.growth_as_asked, other.growth_as_asked
    return one.growth, other.growth


def pair(one: Recorded, other: Recorded) -> Pairing:
    """Pairs the allocations of two recordings."""
    sides = [_requests(side) for side in (one, other)]
    sizes = [
        [round_size(side.events[event].size) for event in events]
        for side, events in zip((one, other), sides, strict=True)
    ]
    pairs = longest_common(*sizes)
    paired = [{positions[number] for positions in pairs} for number in (0, 1)]
    ends = [
        _ends(side, [events[positions[number]] for positions in pairs])
        for number, (side, events) in enumerate(zip((one, other), sides, strict=True))
    ]
    otherwise = [(number, _when(*both)) for number, both in enumerate(zip(*ends, strict=True)) if both[0] != both[1]]
    places = None
    if not any(side.start or side.timeline.unplaced for side in (one, other)):
        places = [_places(side) for side in (one, other)]
    return Pairing(
        sides[0],
        sides[1],
        pairs,
        [index for index in range(len(sides[0])) if index not in paired[0]],
        [index for index in range(len(sides[1])) if index not in paired[1]],
        sum(one.events[sides[0][i]].size == other.events[sides[1][j]].size for i, j in pairs),
        len(pairs) - len(otherwise),
        otherwise,
        None if places is None else sum(places[0][sides[0][i]] == places[1][sides[1][j]] for i, j in pairs),
        sum(sizes[0]),
        sum(sizes[0][i] for i, _ in pairs),
    )


def _requests(side: Recorded) -> list[int]:
    return [index for index, event in enumerate(side.events) if event.action == "alloc"]


def _ends(side: Recorded, births: Sequence[int]) -> list[int | None]:
    """For each of these allocations (events, in order): how many of them were made before it was freed; None: it never was."""
    freed = {life.born: life.freed for life in side.timeline.allocations}
    found: list[int | None] = []
    for birth in births:
        end = freed.get(birth)
        found.append(None if end is None else bisect_left(births, end))
    return found


def _when(first: int | None, second: int | None) -> str:
    """When the second side frees what the first frees before that many pairs (None: never)."""
    if first is None or second is None:
        return "never" if second is None else "although A never does"
    return f"{counted(abs(second - first), 'allocation')} {'later' if second > first else 'sooner'}"


def _places(side: Recorded) -> dict[int, tuple[int, int]]:
    """Event of an allocation -> its segment's number in the order of opening, and the distance from its start in bytes."""
    opened: dict[int, tuple[int, int]] = {}
    places: dict[int, tuple[int, int]] = {}
    starts: list[int] = []
    count = 0
    for index, event in enumerate(side.events):
        if event.action in ("segment_alloc", "segment_map"):
            near = bisect_left(starts, event.address) - 1
            before = starts[near] if near >= 0 else None
            if event.action == "segment_map" and before is not None and opened[before][1] == event.address:
                # An expandable segment that grows at its end.
                opened[before] = opened[before][0], event.address + event.size
                continue
            if event.address not in opened:
                starts.insert(bisect_left(starts, event.address), event.address)
            opened[event.address] = count, event.address + event.size
            count += 1
        elif event.action == "alloc":
            near = bisect_left(starts, event.address + 1) - 1
            if near >= 0:
                places[index] = opened[starts[near]][0], event.address - starts[near]
    return places
