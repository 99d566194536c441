"""Where in a recording without live objects the parts of a training step lie, as its stacks show."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable


class StepPhases:
    """Stretches of a trace in which one part of a training step is under way, told by what each allocation shows."""

    def __init__(self, births: Iterable[tuple[int, str | None, bool]]) -> None:
        """births: the event, the part of a step that it shows, and whether the program itself was at work, outside modules."""
        self._starts: list[int] = []
        self._kinds: list[str] = []
        self._births: list[tuple[int, str]] = []
        self._pauses: list[int] = []
        for born, kind, pauses in sorted(births, key=lambda one: one[0]):
            if born < 0:
                continue
            if pauses:
                self._pauses.append(born)
            if kind is not None:
                self._births.append((born, kind))
                if not self._kinds or self._kinds[-1] != kind:
                    self._starts.append(born)
                    self._kinds.append(kind)
        self.kinds = frozenset(self._kinds)

    def number_of(self, event: int) -> int:
        return bisect_right(self._starts, event) - 1

    def kind_at(self, event: int) -> str | None:
        """The kind of the run that began last; None before the first."""
        rank = self.number_of(event)
        return self._kinds[rank] if rank >= 0 else None

    def next_after(self, event: int) -> tuple[int, str] | None:
        """Where the next run begins, and its kind."""
        rank = bisect_right(self._starts, event)
        return (self._starts[rank], self._kinds[rank]) if rank < len(self._starts) else None

    def next_birth(self, event: int) -> tuple[int, str] | None:
        """The next allocation that shows a part of a step to be under way: the same or another one."""
        rank = bisect_right(self._births, event, key=lambda one: one[0])
        return self._births[rank] if rank < len(self._births) else None

    def stretches(self) -> list[tuple[str, int, int]]:
        """Each run's kind, and the positions before its first and after its last allocation."""
        found = []
        for begin, end in zip(self._starts, [*self._starts[1:], None], strict=False):
            place = len(self._births) if end is None else bisect_left(self._births, (end, ""))
            last, kind = self._births[place - 1]
            found.append((kind, begin, last + 1))
        return found

    def pauses_between(self, begin: int, end: int | None) -> bool:
        """Whether the program itself was at work in between: then no module was."""
        rank = bisect_right(self._pauses, begin)
        return rank < len(self._pauses) and (end is None or self._pauses[rank] < end)
