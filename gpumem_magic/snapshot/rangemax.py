"""The maximum of a range of numbers, queried often: a table of block maxima keeps each query short."""

from __future__ import annotations

from collections.abc import Sequence

_BLOCK = 256


class RangeMax:
    """Answers for a sequence that does not change any more."""

    def __init__(self, values: Sequence[int]) -> None:
        self._values = values
        self._maxima = [max(values[start : start + _BLOCK]) for start in range(0, len(values), _BLOCK)]

    def highest(self, begin: int, end: int) -> tuple[int, int]:
        """The highest value at begin..end, both included, and the first place that has it.

        Raises ValueError for a range that is empty or goes beyond the sequence.
        """
        if not 0 <= begin <= end < len(self._values):
            raise ValueError(f"no range {begin}..{end} within 0..{len(self._values) - 1}")
        first, last = begin // _BLOCK + 1, end // _BLOCK
        if first >= last:
            return self._within(begin, end + 1)
        best, place = self._within(begin, first * _BLOCK)
        inner = max(self._maxima[first:last])
        if inner > best:
            block = self._maxima.index(inner, first, last)
            best, place = self._within(block * _BLOCK, (block + 1) * _BLOCK)
        tail, tail_place = self._within(last * _BLOCK, end + 1)
        return (tail, tail_place) if tail > best else (best, place)

    def _within(self, begin: int, stop: int) -> tuple[int, int]:
        best = max(self._values[begin:stop])
        return best, self._values.index(best, begin, stop)
