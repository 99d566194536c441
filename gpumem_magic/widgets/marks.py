"""Moments with a name: the cell's checkpoints, the beginnings of cells, and what the user marks. A bounded number of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

CHECKPOINT, CELL, USER = "checkpoint", "cell", "mark"
LIMIT = 400
LABEL_LENGTH = 120


@dataclass(frozen=True)
class Mark:
    """kind: checkpoint | cell | mark. line: of the statement, else 0. count: how many fell between two samples; the last is
    named."""

    time: float
    kind: str
    label: str
    line: int = 0
    count: int = 1

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Marks:
    """Marks in the order of time. A user's own go last: of the others every second is left out when there are too many."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._marks: list[Mark] = []

    def __iter__(self) -> Iterator[Mark]:
        return iter(tuple(self._marks))

    def __len__(self) -> int:
        return len(self._marks)

    def add(self, mark: Mark) -> None:
        self._marks.append(mark)
        if len(self._marks) > self._limit:
            self._marks = self._thinned()

    def _thinned(self) -> list[Mark]:
        others = [mark for mark in self._marks if mark.kind != USER]
        staying = {id(mark) for mark in others[1::2]}
        thinned = [mark for mark in self._marks if mark.kind == USER or id(mark) in staying]
        return thinned[-self._limit :]


def short(text: str, length: int = LABEL_LENGTH) -> str:
    """One line of at most `length` characters."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1] + "…"


def named_marks(marks: Iterable[Mark], start: float, length: float) -> list[tuple[Mark, bool]]:
    """The marks whose names have room on an axis of `length` seconds, and whether the name stands on the left of its mark.

    A user's own come first, then the cells; checkpoints are too many.
    """
    found = []
    taken: list[tuple[float, float]] = []
    marks = [mark for mark in marks if mark.kind != CHECKPOINT and 0 <= mark.time - start <= length]
    for mark in sorted(marks, key=lambda mark: mark.kind != USER):
        at = (mark.time - start) / length
        # About a hundred letters are as wide as the axis.
        width = (min(len(mark.label), 24) + 2) / 100
        on_left = at + width > 1
        low, high = (at - width, at) if on_left else (at, at + width)
        if not any(low < other_high and high > other_low for other_low, other_high in taken):
            taken.append((low, high))
            found.append((mark, on_left))
    return found
