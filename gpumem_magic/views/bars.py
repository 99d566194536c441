"""Bars of several things at one moment each, all on one scale: ranks at their peaks, two reports side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpumem_magic.units import mib
from gpumem_magic.views.pen import MARGIN, WIDTH, Pen, Scale

_PITCH = 0.29
_HEAD = 0.3
_AXIS = 0.38
_LABELS = 3.5  # at most, for what they are called, on the left
_FIGURES = 0.95
_GAP = 0.2


@dataclass(frozen=True)
class BarLine:
    """What it is called, and its categories' bytes, stacked. total: what is written behind it, None for nothing."""

    label: str
    sizes: Sequence[tuple[str, int]]
    total: int | None
    alarm: bool = False


class Bars:
    """The part of a picture that has them. top_bytes: what fills a bar. height: what they take, in inches."""

    def __init__(self, lines: Sequence[BarLine], top_bytes: int, head: str, pen: Pen) -> None:
        self._lines, self._head, self._pen = lines, head, pen
        longest = max(pen.width(line.label) for line in lines)
        left = MARGIN + min(_LABELS, max(1.2, longest)) + _GAP
        self._scale = Scale(left, WIDTH - _FIGURES - MARGIN, max(1, round(top_bytes * 1.02)))
        self.height = _HEAD + _PITCH * len(lines) + _AXIS

    def draw(self, top: float) -> None:
        pen = self._pen
        first_top = top + _HEAD
        pen.text(WIDTH - MARGIN, first_top - 0.15, self._head, color=pen.inks.quiet, size=8.5, ha="right")
        pen.grid(self._scale, first_top, first_top + _PITCH * len(self._lines))
        for number, line in enumerate(self._lines):
            self._line(line, first_top + _PITCH * (number + 0.5))

    def _line(self, line: BarLine, middle: float) -> None:
        pen = self._pen
        colour = pen.inks.alarm if line.alarm else pen.inks.text
        pen.text(MARGIN, middle, pen.fitting(line.label, self._scale.left - _GAP / 2 - MARGIN), color=colour)
        pen.bar(line.sizes, middle, _PITCH * 0.66, self._scale)
        if line.total is not None:
            pen.text(WIDTH - MARGIN, middle, mib(line.total), mono=True, ha="right", color=colour)
