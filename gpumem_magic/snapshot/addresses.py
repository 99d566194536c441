"""Sorted addresses in short lists, so that adding or removing one moves few others, however many there are."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable

_MOST = 1024
"""Addresses in a list, before it is cut in two."""


class SortedAddresses:
    """A sorted collection of numbers. An address may be in it more than once."""

    def __init__(self) -> None:
        self._lists: list[list[int]] = []
        # The last of each list, which is never empty.
        self._lasts: list[int] = []

    def add(self, address: int) -> None:
        number = bisect_left(self._lasts, address)
        if number < len(self._lists):
            found = self._lists[number]
            insort(found, address)
        elif self._lists:
            number -= 1
            found = self._lists[number]
            found.append(address)
            self._lasts[number] = address
        else:
            self._lists.append([address])
            self._lasts.append(address)
            return
        if len(found) > _MOST:
            self._lists.insert(number + 1, found[_MOST // 2 :])
            del found[_MOST // 2 :]
            self._lasts.insert(number, found[-1])

    def remove(self, address: int) -> None:
        """Raises KeyError where it is not in."""
        number = bisect_left(self._lasts, address)
        if number == len(self._lists):
            raise KeyError(address)
        found = self._lists[number]
        place = bisect_left(found, address)
        if found[place] != address:
            raise KeyError(address)
        del found[place]
        if not found:
            del self._lists[number], self._lasts[number]
        elif place == len(found):
            self._lasts[number] = found[-1]

    def above(self, address: int) -> int | None:
        """The first one behind `address`."""
        number = bisect_right(self._lasts, address)
        if number == len(self._lists):
            return None
        found = self._lists[number]
        return found[bisect_right(found, address)]

    def at_or_below(self, address: int) -> int | None:
        """`address` itself, or the last one in front of it."""
        number = bisect_right(self._lasts, address)
        if number < len(self._lists):
            found = self._lists[number]
            place = bisect_right(found, address)
            if place:
                return found[place - 1]
        return self._lasts[number - 1] if number else None

    def between(self, low: int, high: int) -> list[int]:
        """Those from `low` up to `high`, which is not of them."""
        all_found: list[int] = []
        for number in range(bisect_left(self._lasts, low), len(self._lists)):
            found = self._lists[number]
            stop = bisect_left(found, high)
            all_found += found[bisect_left(found, low) : stop]
            if stop < len(found):
                break
        return all_found

    def touching(self, address: int, size: int, size_at: Callable[[int], int]) -> list[int]:
        """Those whose bytes lie among the `size` bytes from `address` on; what begins at one of them is `size_at` of it long.

        No two of them overlap.
        """
        end = address + size
        found = self.between(address, end)
        before = self.at_or_below(address - 1)
        if before is not None and before < end and before + size_at(before) > address:
            found.insert(0, before)
        return found
