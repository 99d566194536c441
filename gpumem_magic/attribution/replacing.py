"""Which allocation took the place of which: ``p.data = p.data - step`` frees the old memory in the function that made the new."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from gpumem_magic.attribution import sites
from gpumem_magic.snapshot.model import Frame, TraceEvent
from gpumem_magic.snapshot.timeline import Allocation

# An assignment's own line and those of the expression that it assigns.
_LINES = 4
# So many of the newest results of a function are looked at.
_NEWEST = 16

_Place = tuple[object, ...]


class Replacements:
    """The frees of a recording that happened in a function that makes memory of the same size."""

    def __init__(
        self,
        made: Iterable[Allocation],
        allocations: Iterable[Allocation],
        events: Sequence[TraceEvent],
        frames: Sequence[tuple[Frame, ...]],
    ) -> None:
        """made: those that may have taken another's place."""
        self._frames = frames
        self._events = events
        self._own_frames: dict[int, tuple[Frame, ...]] = {}
        self._made: dict[tuple[int, _Place], list[Allocation]] = defaultdict(list)
        for one in made:
            own = self._own(frames[one.index])
            if own:
                self._made[one.requested, _function(own)].append(one)
                # The last of what a function replaced is freed when it returns: then its caller is at work.
                self._made[one.requested, own[1:]].append(one)
        for found in self._made.values():
            found.sort(key=lambda one: one.born)
        self._freed = sorted((one for one in allocations if one.freed is not None), key=lambda one: one.freed or 0)

    def follow(self, is_kept: Callable[[Allocation], bool], take: Callable[[Allocation, Allocation], None]) -> None:
        """Calls `take(old, new)` for each that a program keeps, in the order of the frees: a chain is followed to its end."""
        taken: set[int] = set()
        for old in self._freed:
            assert old.freed is not None
            ended = self._events[old.freed].frames
            if not ended or ended is self._frames[old.index] or not is_kept(old):
                continue
            own = self._own(ended)
            new = (
                (self._newest(old, _function(own), taken, own[0].line) or self._newest(old, own, taken))
                if own
                else None
            )
            if new is not None:
                taken.add(new.index)
                take(old, new)

    def _newest(self, old: Allocation, place: _Place, taken: set[int], line: int | None = None) -> Allocation | None:
        """The newest result of a place that lives when the old memory goes, near a line if one is given."""
        assert old.freed is not None
        found = self._made.get((old.requested, place), [])
        last = bisect_left(found, old.freed, key=lambda one: one.born)
        for new in reversed(found[max(last - _NEWEST, 0) : last]):
            lives = new.born > old.born and (new.freed is None or new.freed > old.freed)
            near = line is None or abs(self._own(self._frames[new.index])[0].line - line) <= _LINES
            if lives and near and new.index not in taken:
                return new
        return None

    def _own(self, frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
        """The program's own frames of a stack, innermost first."""
        key = id(frames)
        if key not in self._own_frames:
            self._own_frames[key] = tuple(one for one in frames if sites.is_python(one) and not sites.is_library(one))
        return self._own_frames[key]


def _function(own: tuple[Frame, ...]) -> _Place:
    """A function, whatever its line, and its callers."""
    return ("in", own[0].filename, own[0].name, *own[1:])
