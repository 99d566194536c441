"""Several ranks in the picture: a bar for each kind of them at its peak, all on one scale, the worst first."""

from __future__ import annotations

from gpumem_magic.report.model import ALLOCATED_CATEGORIES
from gpumem_magic.report.ranks import DONE, RankRow, Ranks
from gpumem_magic.units import mib
from gpumem_magic.views.pen import MARGIN, WIDTH, Pen, Scale
from gpumem_magic.views.ranks import MOST, STATE_WORDS, families, names

_PITCH = 0.29
_HEAD = 0.3
_AXIS = 0.38
_LABELS = 3.5  # at most, for the ranks on the left
_FIGURES = 0.95
_GAP = 0.2


class RankBars:
    """The part of a picture that has the ranks. height: what it takes, in inches."""

    def __init__(self, ranks: Ranks, pen: Pen) -> None:
        self._pen = pen
        self._lines = families(ranks)[:MOST]
        longest = max(pen.width(_label(first, members)) for first, members in self._lines)
        left = MARGIN + min(_LABELS, max(1.2, longest)) + _GAP
        self._scale = Scale(left, WIDTH - _FIGURES - MARGIN, max(1, round((ranks.highest or 0) * 1.02)))
        self.height = _HEAD + _PITCH * len(self._lines) + _AXIS

    def draw(self, top: float) -> None:
        pen = self._pen
        first_top = top + _HEAD
        pen.text(WIDTH - MARGIN, first_top - 0.15, "MiB at the peak", color=pen.inks.quiet, size=8.5, ha="right")
        pen.grid(self._scale, first_top, first_top + _PITCH * len(self._lines))
        for number, (first, members) in enumerate(self._lines):
            self._line(first, _label(first, members), first_top + _PITCH * (number + 0.5))

    def _line(self, first: RankRow, label: str, middle: float) -> None:
        pen = self._pen
        colour = pen.inks.text if first.state == DONE else pen.inks.alarm
        pen.text(MARGIN, middle, pen.fitting(label, self._scale.left - _GAP / 2 - MARGIN), color=colour)
        sizes = [(name, first.categories.get(name, 0)) for name in ALLOCATED_CATEGORIES]
        pen.bar(sizes, middle, _PITCH * 0.66, self._scale)
        if first.peak_allocated is not None:
            pen.text(WIDTH - MARGIN, middle, mib(first.peak_allocated), mono=True, ha="right", color=colour)


def _label(first: RankRow, members: list[RankRow]) -> str:
    state = STATE_WORDS[first.state]
    return names(first, members) + (f"  {state}" if state else "")
