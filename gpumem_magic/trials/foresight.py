"""What other values would come to, worked out from trials: their requests, scaled, through the emulated allocator.

A program whose course does not depend on the value makes the same requests with every value, of other sizes. Two runs tell how
each of them grows, three whether it grows faster than linearly; the allocator's own rules then say where it would fail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log

from gpumem_magic.allocator.caching import CachingAllocator
from gpumem_magic.allocator.failure import DeviceOutOfMemory
from gpumem_magic.allocator.memory import DeviceMemory
from gpumem_magic.trials.tried import Course

# Closer ones tell little of how something grows: sizes go in steps, of a kernel's tiles or of whole rows.
_APART = 7 / 8
_DUST = 16 << 10
# Of a power: sizes are whole bytes.
_NEAR = 1e-4


class Foresight:
    """What is known from the courses of some values. It sees nothing where no two that went to their end are alike.

    Scratch memory comes and goes with the size: where courses differ, requests of a few KiB are left out.
    """

    def __init__(self, courses: Mapping[int, Course]) -> None:
        self._base: Course | None = None
        self.is_constant = False
        for known in (courses, {value: _without_dust(course) for value, course in courses.items()}):
            if self._look(known):
                return

    def _look(self, courses: Mapping[int, Course]) -> bool:
        whole = [value for value, course in courses.items() if course.whole]
        if len(whole) < 2:
            return False
        base = courses[max(whole)]
        known = {value: course for value, course in courses.items() if _alike(course, base)}
        full = [value for value in known if known[value].whole]
        if len(full) < 2:
            return False
        self._base = base
        self._steps = base.steps[: min(len(known[value].steps) for value in full)]
        requests = sum(step[0] for step in self._steps)
        ordered = sorted(known)
        self._sizes = [
            [(value, known[value].sizes[number]) for value in ordered if number < len(known[value].sizes)]
            for number in range(requests)
        ]
        self.is_constant = all(len({size for _, size in points}) == 1 for points in self._sizes)
        self.live = base.live
        return True

    @property
    def sees(self) -> bool:
        """Whether the courses are alike, so that others follow from them."""
        return self._base is not None

    def sizes(self, value: int) -> list[int]:
        """The requests' sizes with another value, in order."""
        return [through(_around(points, value), value) for points in self._sizes]

    def size(self, request: int, value: int) -> int:
        """One request's size with another value."""
        return through(_around(self._sizes[request], value), value) if request < len(self._sizes) else 0

    def lacking(self, value: int, available: int, total: int) -> int | None:
        """What the first request is short of that would not be served, in bytes; 0 where only pieces are short, None where all
        would be served."""
        base = self._base
        assert base is not None
        allocator = CachingAllocator(0, DeviceMemory(total, total - available), base.settings)
        allocator.adopt(base.start)
        places: dict[int, int] = {}
        number = -1
        for segment in base.start:
            for block in segment.blocks:
                if block.state == "active_allocated":
                    places[number] = block.address
                    number -= 1
        sizes = self.sizes(value)
        for is_request, block_number, stream, pool in self._steps:
            if is_request:
                try:
                    places[block_number] = allocator.malloc(sizes[block_number], stream, pool)
                except DeviceOutOfMemory:
                    return max(0, allocator.allocated + sizes[block_number] - available)
            else:
                place = places.pop(block_number, None)
                if place is not None:
                    allocator.free(place)
        return None


def _without_dust(course: Course) -> Course:
    numbers: dict[int, int] = {}
    sizes: list[int] = []
    steps = []
    for is_request, block, stream, pool in course.steps:
        if is_request:
            if course.sizes[block] <= _DUST:
                continue
            numbers[block] = len(sizes)
            sizes.append(course.sizes[block])
        elif block >= 0 and block not in numbers:
            continue
        steps.append((is_request, numbers.get(block, block), stream, pool))
    live = tuple((numbers[block], place) for block, place in course.live if block in numbers)
    return replace(course, steps=tuple(steps), sizes=tuple(sizes), live=live)


def _alike(one: Course, other: Course) -> bool:
    """Whether the shorter course is the beginning of the longer. The last step of a run that failed is a request that did."""
    count = min(len(one.steps), len(other.steps))
    return count > 0 and one.steps[:count] == other.steps[:count]


def _around(points: Sequence[tuple[int, int]], value: int) -> Sequence[tuple[int, int]]:
    """The points that tell most of a value: the next above it, if there is one, and up to two below, apart from each other."""
    least = points[1][0] if len(points) > 1 else 0
    above = next((place for place, (known, _) in enumerate(points) if known >= max(value, least)), len(points) - 1)
    chosen = [points[above]]
    for point in reversed(points[:above]):
        if len(chosen) < 3 and point[0] <= chosen[0][0] * _APART:
            chosen.insert(0, point)
    return chosen if len(chosen) > 1 else points[max(0, above - 1) : above + 1]


def through(points: Sequence[tuple[int, int]], value: int) -> int:
    """What points (of ascending values) say of another value, never below nothing.

    A tensor's size is mostly a product, of which the value is a factor, or is one twice: two points tell that. Else it is the
    curve through at most three.
    """
    last, at_last = points[-1]
    if len(points) == 1 or all(size == at_last for _, size in points):
        return at_last
    before, at_before = points[-2]
    power = _power(before, at_before, last, at_last)
    if power is not None:
        return round(at_last * (value / last) ** power)
    slope = (at_last - at_before) / (last - before)
    found = at_last + slope * (value - last)
    if len(points) > 2:
        first, at_first = points[-3]
        bend = (slope - (at_before - at_first) / (before - first)) / (last - first)
        found += bend * (value - last) * (value - before)
    return max(0, round(found))


def _power(value: int, size: int, other: int, at_other: int) -> int | None:
    """Which power of the value the sizes are, 0 to 3; None where they are none."""
    if min(value, size, other, at_other) <= 0:
        return None
    power = log(at_other / size) / log(other / value)
    nearest = round(power)
    return nearest if 0 <= nearest <= 3 and abs(power - nearest) < _NEAR else None
