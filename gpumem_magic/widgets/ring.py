"""Rows in bounded space: when it is full, neighbouring rows are merged in pairs, and from then on two samples share a row.

Of the samples that share a row the one with the most memory is kept whole, so a peak that was sampled stays, with its own
time and categories. A day at 10 Hz fits in the room of seven minutes, at a resolution of half a minute.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence


class Ring:
    """At most `capacity` rows of `width` numbers; of rows that share a place, the one with the larger column `key` stays.

    Not thread-safe. Raises ValueError for a capacity that is odd or below 2, and for a row of another width.
    """

    def __init__(self, capacity: int, width: int, key: int) -> None:
        if capacity < 2 or capacity % 2:
            raise ValueError(f"the capacity must be even and at least 2, not {capacity}")
        if not 0 <= key < width:
            raise ValueError(f"there is no column {key} in rows of {width}")
        self.capacity = capacity
        self.width = width
        self.per_row = 1
        self.taken = 0
        self._key = key
        self._shared = 0
        self._data = array("d")
        # The newest sample, which at a coarse resolution need not be among the rows.
        self.latest: list[float] | None = None

    def __len__(self) -> int:
        return len(self._data) // self.width

    def __iter__(self) -> Iterator[list[float]]:
        """The rows, oldest first."""
        for place in range(len(self)):
            yield self.row(place)

    def row(self, place: int) -> list[float]:
        """A copy of the row at a place. Raises IndexError."""
        if not 0 <= place < len(self):
            raise IndexError(place)
        return self._data[place * self.width : (place + 1) * self.width].tolist()

    def replace(self, place: int, row: Sequence[float]) -> None:
        """Another row in a row's place (its categories have become known). Raises IndexError, ValueError."""
        if not 0 <= place < len(self):
            raise IndexError(place)
        self._write(place, self._checked(row))

    def push(self, row: Sequence[float]) -> None:
        """Adds a sample."""
        values = self._checked(row)
        self.latest = values.tolist()
        self.taken += 1
        if self._shared == 0:
            if len(self) == self.capacity:
                self._halve()
            self._data.extend(values)
        elif values[self._key] >= self._data[(len(self) - 1) * self.width + self._key]:
            self._write(len(self) - 1, values)
        self._shared = (self._shared + 1) % self.per_row

    def _halve(self) -> None:
        """Called between two groups only, so that every row stands for `per_row` samples."""
        halved = array("d")
        for place in range(0, len(self), 2):
            first, second = place * self.width, (place + 1) * self.width
            start = second if self._data[second + self._key] >= self._data[first + self._key] else first
            halved.extend(self._data[start : start + self.width])
        self._data = halved
        self.per_row *= 2

    def _checked(self, row: Sequence[float]) -> array[float]:
        values = array("d", row)
        if len(values) != self.width:
            raise ValueError(f"a row of {len(values)} numbers, where {self.width} are expected")
        return values

    def _write(self, place: int, values: array[float]) -> None:
        self._data[place * self.width : (place + 1) * self.width] = values
