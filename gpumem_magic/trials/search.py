"""The largest value that fits, in few trials: two small ones, then those that the emulated allocator foretells.

The answer is a value that was run to where its iterations repeat, and the next one above was run as well and failed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import gcd

from gpumem_magic.trials.foresight import Foresight, through
from gpumem_magic.trials.tried import ERROR, Course, Tried

MOST_TRIALS = 8
# The first trial's place among the values, where there are more than a few: 1 is often a special case.
_FIRST, _FEW = 1, 8
# Where memory is short of pieces rather than bytes, larger values may fit again: so many are looked at above the wall.
_ABOVE = 24
# So many times the largest value that fits is far away.
_FAR = 4
# Near the wall is what is one part in so many (as a power of two) below it: 3 %.
_NEAR = 5
# Where small values raise errors and the program has no value of its own, one of these may do: what has to be divisible mostly
# has to be by a factor of theirs.
_DIVISIBLE = (8, 64, 60)


Run = Callable[[Sequence[int]], Sequence[Tried]]
"""Trials with these values, at the same time."""


@dataclass(frozen=True)
class SearchResult:
    """What a search came to. tried: in the order in which they were run. best: the largest that fits, None where none does.

    above: the smallest that was run above it and failed; wall: the same, without those that raise errors of the program's own
    where others above them do not. is_proven: every value between the best and the wall was run, or the best is the last.
    foreseen: whether the course of requests foretold them. is_constant: no request grows with the value.
    """

    name: str
    values: Sequence[int]
    tried: tuple[Tried, ...]
    best: Tried | None
    above: Tried | None
    wall: Tried | None
    is_proven: bool
    foreseen: bool
    is_constant: bool


def search(name: str, values: Sequence[int], run: Run, usual: int | None = None) -> SearchResult:
    """values: in ascending order. usual: the value that the program has by itself, None where it has none."""
    return _Hunt(name, values, run, usual).found()


class _Hunt:
    def __init__(self, name: str, values: Sequence[int], run: Run, usual: int | None = None) -> None:
        self.name, self.values, self.run, self.usual = name, values, run, usual
        # By place among the values.
        self.tried: dict[int, Tried] = {}
        self.foresight = Foresight({})
        self.foreseen = False
        # How often in a row a value went otherwise than foretold.
        self.surprises = 0
        # How often a place that was foretold to fit failed.
        self.misses = 0

    def found(self) -> SearchResult:
        self._begin()
        while len(self.tried) < MOST_TRIALS and (place := self._next()) is not None:
            expected = place <= self._foretold_place if self._foretold_place is not None else None
            found = self._try(place, *self._along_with(place))
            if found.ending != ERROR:
                self.surprises = self.surprises + 1 if expected is not None and found.fits != expected else 0
                self.misses += bool(expected and not found.fits)
        low, high = self._bracket()
        best = None if low is None else self.tried[low]
        end = len(self.values) if high is None else high
        above = [at for at in self.tried if low is None or at > low]
        is_proven = low is not None and sum(at < end for at in above) == end - low - 1
        return SearchResult(
            self.name,
            self.values,
            tuple(self.tried.values()),
            best,
            self.tried[min(above)] if above else None,
            None if high is None else self.tried[high],
            is_proven or (low is None and 0 in self.tried),
            self.foreseen,
            self.foresight.sees and self.foresight.is_constant,
        )

    _foretold_place: int | None = None

    def _begin(self) -> None:
        """Two trials, of which even a program whose memory grows with the square of the value passes the second."""
        last = len(self.values) - 1
        place = min(_FIRST, last) if last >= _FEW else 0
        first = self._try(place)
        if not first.fits:
            if place or (last and first.ending == ERROR):
                self._try(0 if place else 1)
            return
        if place < last:
            self._try(max(2 * place + 1, self._by_the_square(place)))

    def _along_with(self, place: int) -> list[int]:
        """The place above one that is foretold to be the last that fits, which is wanted then, too."""
        is_foretold = self.foreseen and place == self._foretold_place and not (self.surprises or self.misses)
        above = [place + 1] if is_foretold and len(self.tried) + 2 <= MOST_TRIALS else []
        return [at for at in above if at < len(self.values) and self._may_run(at)]

    def _try(self, place: int, *others: int) -> Tried:
        """Runs them at the same time. What the first came to."""
        places = [place, *others]
        self.tried.update(zip(places, self.run([self.values[at] for at in places]), strict=True))
        courses: dict[int, Course] = {
            self.values[at]: one.course for at, one in self.tried.items() if one.course is not None
        }
        sight = Foresight(courses)
        if sight.sees or not self.foresight.sees:
            # Near the wall a size may take other kernels: then what was seen before still tells most.
            self.foresight = sight
        return self.tried[place]

    def _bracket(self) -> tuple[int | None, int | None]:
        """The places of the largest that fits, and of the wall above it."""
        low = max((at for at, one in self.tried.items() if one.fits), default=None)
        wrong = self._wrong(low)
        are_wall = any(at + 1 in wrong or at == len(self.values) - 1 for at in wrong)
        above = [
            at
            for at, one in self.tried.items()
            if not one.fits and (low is None or at > low) and (one.ending != ERROR or (are_wall and at in wrong))
        ]
        return low, min(above, default=None)

    def _wrong(self, low: int | None) -> list[int]:
        """The places above that raise errors of the program's own, where no divisor tells which do. Two in a row are a wall."""
        if self._divisor() > 1:
            return []
        return sorted(at for at, one in self.tried.items() if one.ending == ERROR and (low is None or at > low))

    def _divisor(self) -> int:
        """Of what all values are multiples that raise no error of the program's own, and none that does; 1 where there is no
        such number, or no error."""
        wrong = [self.values[at] for at, one in self.tried.items() if one.ending == ERROR]
        common = gcd(*(self.values[at] for at, one in self.tried.items() if one.ending != ERROR))
        if not wrong:
            return 1
        return next(
            (each for each in range(2, common + 1) if common % each == 0 and all(value % each for value in wrong)), 1
        )

    def _may_run(self, place: int) -> bool:
        """Whether it is untried, and nothing says that it raises an error."""
        return place not in self.tried and self.values[place] % self._divisor() == 0

    def _usable(self, place: int, low: int, end: int) -> int | None:
        """The untried place between the two that is next to a wanted one and may raise no error; then some that may."""
        near = next(filter(self._may_run, chain(range(place, low, -1), range(place + 1, end))), None)
        if near is not None:
            return near
        return next((at for at in (low + 1, (low + end) // 2) if low < at < end and at not in self.tried), None)

    def _next(self) -> int | None:
        """The place to try now; None where the answer is known."""
        self._foretold_place = None
        low, high = self._bracket()
        last = len(self.values) - 1
        if low is None:
            # Below the smallest that failed there is nothing, or the first value.
            if 0 not in self.tried:
                return 0
            if high is not None and self.tried[high].ending != ERROR:
                return next((at for at in range(high) if self._may_run(at)), None)
            has_own = self.usual is not None and self.usual in self.values[_FIRST + 1 :]
            likely = [one for one in ([self.usual] if has_own else _DIVISIBLE) if one in self.values]
            return next((at for at in map(self.values.index, likely) if at not in self.tried), None)
        end = last + 1 if high is None else high
        if low + 1 >= end:
            return None
        beside = [at + 1 for at in self._wrong(low) if at + 1 < end and at + 1 not in self.tried]
        if beside and (high is None or self.tried[high].ending != ERROR):
            return beside[0]
        if high is not None and self.tried[high].ending == ERROR:
            # What is no matter of memory is not foretold.
            return (low + end) // 2
        if self.foresight.sees and self.foresight.is_constant:
            return self._usable(last if high is None else (low + end) // 2, low, end)
        place = self._foretold(low, end)
        if place is None and high is None and len(self.tried) == 2:
            # What is small may take other kernels; then the two are not alike, and a third is wanted.
            place = max(low + 1, self._by_the_square(low))
        elif place is None:
            place = self._by_the_peaks(low, end)
        self._foretold_place = place
        if self.surprises and self.values[place] > _FAR * self.values[low]:
            # Too far to be foretold from what is known: something on the way tells how everything grows.
            between = (max(1, self.values[low]) * self.values[place]) ** 0.5
            place = bisect_right(self.values, between) - 1
        elif self.misses and high is not None and low < high - 2 * (high >> _NEAR):
            # What lies near the wall foretells it best, and is a good answer itself.
            place = min(place, max(high - (high >> _NEAR << self.misses - 1), (low + high) // 2))
        elif self.surprises:
            # It was wrong: wider steps, away from where it was wrong, but never beyond the middle.
            step = 1 << (self.surprises - 1)
            middle = (low + end) // 2
            place = max(min(place, end - step), middle) if place > low else min(low + step, middle)
        return self._usable(max(low + 1, min(place, end - 1)), low, end)

    def _foretold(self, low: int, end: int) -> int | None:
        """The largest place below `end` that the allocator serves, by the courses; `low` where nothing above it fits."""
        if not self.foresight.sees:
            return None
        self.foreseen = True
        below, above = low, end
        while above - below > 1:
            middle = (below + above) // 2
            if self._lacking(middle) is None:
                below = middle
            else:
                above = middle
        if above == end or self._lacking(above) != 0:
            return below
        # Pieces are short and not bytes, so that a larger one may be served again.
        places = range(min(end, above + 1 + _ABOVE) - 1, above, -1)
        return next((place for place in places if self._lacking(place) is None), below)

    def _lacking(self, place: int) -> int | None:
        """What `Foresight.lacking` says of it."""
        course = next(one.course for one in self.tried.values() if one.course is not None)
        return self.foresight.lacking(self.values[place], course.available, course.total)

    def _by_the_square(self, place: int) -> int:
        """Which place a program passes whose memory grows with the square of the value, as it passes this one."""
        one = self.tried[place]
        room = 1.0 if one.course is None else one.course.available / max(1, one.allocated)
        return bisect_right(self.values, self.values[place] * max(1.0, room) ** 0.5) - 1

    def _by_the_peaks(self, low: int, end: int) -> int:
        """Where a curve through the peaks of the largest that fit meets what the card has; else the middle."""
        fitting = sorted(at for at, one in self.tried.items() if one.fits)[-3:]
        middle = (low + end) // 2
        course = self.tried[low].course
        if len(fitting) < 2 or course is None or len(self.tried) > MOST_TRIALS - 3:
            return middle
        points = [(self.values[at], self.tried[at].allocated) for at in fitting]
        below, above = low, end
        while above - below > 1:
            place = (below + above) // 2
            if through(points, self.values[place]) <= course.available:
                below = place
            else:
                above = place
        return below
