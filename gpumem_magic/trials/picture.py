"""Memory over the value: what each trial had in use at most, stacked by category, below the walls of all cards.

Between the values that were run the edges are straight lines. A second name makes panels. Made without pyplot and under
matplotlib's default style.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import matplotlib.style
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from gpumem_magic.trials.growth import FitCase
from gpumem_magic.trials.tried import Tried
from gpumem_magic.views import figure as bars
from gpumem_magic.views.layout import ticks
from gpumem_magic.views.lines import fit
from gpumem_magic.views.palette import ON_DARK, ON_LIGHT, Inks
from gpumem_magic.views.pen import WIDTH, patterned
from gpumem_magic.views.stacked import as_html, card_in_short, legend, seen_of, without_frame

# In inches: a panel's height, and what is above and below its axes.
_HEIGHT, _ABOVE, _BELOW = 3.3, 0.4, 0.52
# In fractions of the width: where axes may be.
_LEFT, _RIGHT, _GAP = 0.075, 0.775, 0.05
_LONGEST = 60
_ACROSS = 3
# Of the highest wall: what the words of two walls keep between them.
_WORDS = 0.06


def element(name: str, across: str | None, cases: Sequence[FitCase]) -> str:
    """The picture as HTML; "" where there is nothing to draw, or, with a warning, where it cannot be drawn."""
    fitting = [case for case in cases if case.found.best is not None]
    if not fitting:
        return ""
    return as_html(lambda dark: draw(name, across, fitting, dark=dark), _in_words(name, across, fitting))


def draw(name: str, across: str | None, cases: Sequence[FitCase], *, dark: bool = False) -> Figure:
    """cases: those in which something fits are drawn; a panel for each value of the name `across`."""
    inks = ON_DARK if dark else ON_LIGHT
    panels: dict[int | None, list[FitCase]] = {}
    for case in cases:
        if case.found.best is not None:
            panels.setdefault(case.across, []).append(case)
    columns = min(_ACROSS, max(1, len(panels)))
    rows = -(-len(panels) // columns) or 1
    with matplotlib.style.context("default"):
        figure = bars.ReportFigure(figsize=(WIDTH, rows * (_HEIGHT + _ABOVE + _BELOW)), dpi=100, facecolor=inks.paper)
        width = (_RIGHT - _LEFT - _GAP * (columns - 1)) / columns
        capacity = max((_best(case).capacity for case in cases if case.found.best is not None), default=1)
        seen = seen_of((_parts(one) for case in cases for one in case.found.tried if one.fits), capacity)
        for place, (value, of_value) in enumerate(panels.items()):
            bottom = (rows - 1 - place // columns + _BELOW / (_HEIGHT + _ABOVE + _BELOW)) / rows
            height = _HEIGHT / (_HEIGHT + _ABOVE + _BELOW) / rows
            axes: Any = figure.add_axes((_LEFT + place % columns * (width + _GAP), bottom, width, height))
            title = "" if across is None else f"{across}={value:,}"
            _Panel(axes, name, of_value, seen, inks, columns == 1).draw(title, capacity, has_scale=not place % columns)
            if place == columns - 1:
                legend(axes, seen[::-1], inks, step=0.062, wide=(_RIGHT - _LEFT) / width)
    return figure


class _Panel:
    """has_room: for the words of what fails."""

    def __init__(
        self, axes: Any, name: str, cases: Sequence[FitCase], seen: Sequence[str], inks: Inks, has_room: bool
    ) -> None:
        self.axes, self.name, self.cases, self.seen, self.inks = axes, name, cases, seen, inks
        self.is_narrow = not has_room
        self.has_words = has_room and len(cases) == 1
        # The stack is that of the card with which most fits.
        widest = max(cases, key=lambda case: self._value(_best(case)))
        self.fitting = sorted((one for one in widest.found.tried if one.fits), key=self._value)

    def draw(self, title: str, top: int, *, has_scale: bool) -> None:
        self._stacks()
        last = self._value(self.fitting[-1])
        self.right = last + max(1.0, 0.08 * last)
        if self.has_words:
            self._failure(self.cases[0])
        self._frame(top, has_scale)
        self._walls(top)
        self.axes.set_title(title, size=10, color=self.inks.text, loc="left", parse_math=False)

    def _value(self, one: Tried) -> int:
        return one.values[self.name]

    def _stacks(self) -> None:
        values: list[float] = [self._value(one) for one in self.fitting]
        parts = [_parts(one) for one in self.fitting]
        if len(values) == 1:
            values, parts = [values[0] - 0.4, values[0] + 0.4], parts * 2
        layers = [[one.get(name, 0) for one in parts] for name in self.seen]
        for name, area in zip(self.seen, self.axes.stackplot(values, *layers), strict=True):
            area.set(**patterned(name, self.inks.colour(name)))
        tops = list(accumulate(layers, lambda below, layer: [a + b for a, b in zip(below, layer, strict=True)]))
        for edge in tops:
            # A hairline parts neighbours.
            self.axes.plot(values, edge, color=self.inks.paper, linewidth=0.6)
        for one in self.fitting:
            ends = [0, sum(_parts(one).get(name, 0) for name in self.seen)]
            self.axes.plot([self._value(one)] * 2, ends, color=self.inks.text, linewidth=0.7, alpha=0.55)

    def _walls(self, top: int) -> None:
        lowest = 0.0
        left = self.axes.get_xlim()[0]
        for case in sorted(self.cases, key=lambda case: _best(case).capacity):
            best = _best(case)
            self.axes.axhline(best.capacity, color=self.inks.alarm, linewidth=1.6)
            words = card_in_short(case.device, best.capacity)
            if not self.has_words:
                words = f"{case.device}:" if self.is_narrow else f"{words},"
                words += f" up to {self._value(best):,}"
                self.axes.plot([self._value(best)], [best.used], "o", color=self.inks.alarm, markersize=5)
            y = max(best.capacity + 0.02 * top, lowest)
            self.axes.text(
                left, y, words, color=self.inks.alarm, size=9, va="bottom", ha="left", parse_math=False,
                path_effects=[withStroke(linewidth=2.5, foreground=self.inks.paper)],
            )  # fmt: skip
            lowest = y + _WORDS * top

    def _failure(self, case: FitCase) -> None:
        above = case.found.above
        if above is None:
            return
        x = self._value(above)
        self.right = max(self.right, x + max(1.0, 0.08 * x))
        self.axes.axvline(x, color=self.inks.alarm, linewidth=1.0, linestyle=(0, (4, 3)))
        at = f" at line {above.line}" if above.line else ""
        what = fit(f": {above.statement}", _LONGEST) if above.statement else ""
        word = f"{x:,} {'fails' if above.ending == 'memory' else 'raises'}{at}{what}"
        # No mathematics: a dollar sign in a statement is a dollar sign.
        self.axes.text(
            x, above.capacity * 1.02, word, color=self.inks.alarm, size=9, ha="right", va="bottom", parse_math=False
        )

    def _frame(self, top: int, has_scale: bool) -> None:
        first, best = self._value(self.fitting[0]), self._value(self.fitting[-1])
        self.axes.set_xlim(min(first, 0) if first <= best / 4 else first - 1, self.right)
        self.axes.set_ylim(0, top * 1.1)
        marks = ticks(top)
        self.axes.set_yticks([size for size, _ in marks], [word if has_scale else "" for _, word in marks])
        own = sorted({self._value(_best(case)) for case in self.cases}, reverse=True)
        wanted = [*own, *(int(mark) for mark in self.axes.get_xticks() if mark == int(mark) and mark > 0)]
        room = (self.axes.get_xlim()[1] - self.axes.get_xlim()[0]) / (5 if self.is_narrow else 18)
        shown: list[int] = []
        for mark in wanted:
            if mark < self.right and all(abs(mark - other) > room for other in shown):
                shown.append(mark)
        self.axes.set_xticks(shown, [f"{mark:,}" for mark in shown])
        self.axes.set_xlabel(self.name, color=self.inks.text, size=10, parse_math=False)
        if has_scale:
            self.axes.set_ylabel("in use at most", color=self.inks.quiet, size=9)
        without_frame(self.axes, self.inks)


def _best(case: FitCase) -> Tried:
    assert case.found.best is not None
    return case.found.best


def _parts(one: Tried) -> dict[str, int]:
    """By category, as much as nvidia-smi shows at its highest: what tensors hold at their peak, and what is cached besides."""
    held = {name: size for name, size in one.categories.items() if name != "cached"}
    return {**held, "cached": max(0, one.used - sum(held.values()))}


def _in_words(name: str, across: str | None, cases: Sequence[FitCase]) -> str:
    largest = (
        f"{_best(case).values[name]:,} on {case.device}{f' with {across}={case.across}' if across is not None else ''}"
        for case in cases
    )
    return f"Memory in use at most over {name}, by category. The largest that fit: {'; '.join(largest)}."
