"""Memory over the value: what each trial held at its peak, stacked by category, the card's wall, and what fails beyond it.

Between the values that were run the edges are straight lines. Made without pyplot and under matplotlib's default style.
"""

from __future__ import annotations

import warnings
from typing import Any

import matplotlib.style
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from gpumem_magic.failures import swallowed
from gpumem_magic.report.model import CATEGORIES, LABELS
from gpumem_magic.trials.growth import FitCase
from gpumem_magic.trials.tried import Tried
from gpumem_magic.units import GIB, MIB
from gpumem_magic.views import figure as bars
from gpumem_magic.views.layout import ticks
from gpumem_magic.views.lines import fit
from gpumem_magic.views.pages import CSS_WIDTH, image
from gpumem_magic.views.palette import ON_DARK, ON_LIGHT, Inks
from gpumem_magic.views.pen import WIDTH

_HEIGHT = 4.2
_LONGEST = 60


def element(name: str, case: FitCase) -> str:
    """The picture as HTML; "" where there is nothing to draw, or, with a warning, where it cannot be drawn."""
    if not any(one.fits for one in case.found.tried):
        return ""
    try:
        with matplotlib.style.context("default"):
            raw = bars.rendered(draw(name, case), 160)
        data, _, _ = bars.few_colours(raw)
    except Exception as error:
        warnings.warn(f"gpumem_magic could not draw the picture: {swallowed(error)}", stacklevel=2)
        return ""
    return image(data, _in_words(name, case), CSS_WIDTH)


def draw(name: str, case: FitCase, *, dark: bool = False) -> Figure:
    with matplotlib.style.context("default"):
        return _Plot(name, case, ON_DARK if dark else ON_LIGHT).figure


class _Plot:
    def __init__(self, name: str, case: FitCase, inks: Inks) -> None:
        self.name, self.inks = name, inks
        self.fitting = sorted((one for one in case.found.tried if one.fits), key=self._value)
        self.above = case.found.above
        self.figure = bars.ReportFigure(figsize=(WIDTH, _HEIGHT), dpi=100, facecolor=inks.paper)
        self.axes: Any = self.figure.add_axes((0.075, 0.13, 0.70, 0.78))
        self.axes.set_facecolor(inks.paper)
        if not self.fitting:
            return
        capacity = self.fitting[-1].capacity
        self.right = self._right()
        self._stacks()
        self._wall(capacity, case.device)
        self._failure(capacity)
        self._frame(capacity)

    def _value(self, one: Tried) -> int:
        return one.values[self.name]

    def _right(self) -> float:
        last = self._value(self.fitting[-1])
        return last + max(1.0, 0.08 * last)

    def _stacks(self) -> None:
        values: list[float] = [self._value(one) for one in self.fitting]
        kinds = [name for name in CATEGORIES if name != "cached"]
        # Context and other processes lie at the bottom, as they are there first.
        order = [*(name for name in reversed(kinds) if name in ("other_processes", "context_or_others", "context"))]
        order += [name for name in kinds if name not in order]
        seen = [name for name in order if any(one.categories.get(name, 0) > one.capacity / 500 for one in self.fitting)]
        layers = [[one.categories.get(name, 0) for one in self.fitting] for name in seen]
        if len(values) == 1:
            values, layers = [values[0] - 0.4, values[0] + 0.4], [layer * 2 for layer in layers]
        self.axes.stackplot(
            values, *layers, colors=[self.inks.colour(name) for name in seen], edgecolor=self.inks.paper, linewidth=0.6
        )
        for one in self.fitting:
            self.axes.plot(
                [self._value(one)] * 2, [0, sum(one.categories.get(name, 0) for name in seen)],
                color=self.inks.text, linewidth=0.7, alpha=0.55,
            )  # fmt: skip
        for place, name in enumerate(reversed(seen)):
            y = 0.98 - 0.062 * place
            self.axes.text(
                1.045, y, LABELS[name], transform=self.axes.transAxes, va="center", size=9, color=self.inks.text
            )
            self.axes.add_patch(
                Rectangle(
                    (1.015, y - 0.017), 0.02, 0.034, transform=self.axes.transAxes, clip_on=False, linewidth=0,
                    facecolor=self.inks.colour(name),
                )
            )  # fmt: skip

    def _wall(self, capacity: int, device: str) -> None:
        self.axes.axhline(capacity, color=self.inks.alarm, linewidth=1.6)
        word = f"{capacity / GIB:.1f} GiB" if capacity >= GIB else f"{capacity / MIB:,.0f} MiB"
        left = self._value(self.fitting[0])
        self.axes.text(
            left, capacity * 1.02, f"{device}: {word}", color=self.inks.alarm, size=9, va="bottom", ha="left"
        )

    def _failure(self, capacity: int) -> None:
        above = self.above
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
            x, capacity * 1.02, word, color=self.inks.alarm, size=9, ha="right", va="bottom", parse_math=False
        )

    def _frame(self, capacity: int) -> None:
        first, best = self._value(self.fitting[0]), self._value(self.fitting[-1])
        self.axes.set_xlim(min(first, 0) if first <= best / 4 else first - 1, self.right)
        self.axes.set_ylim(0, capacity * 1.1)
        marks = ticks(capacity)
        self.axes.set_yticks([size for size, _ in marks], [word for _, word in marks])
        values = sorted({best, *(int(mark) for mark in self.axes.get_xticks() if mark == int(mark) and mark > 0)})
        room = (self.axes.get_xlim()[1] - self.axes.get_xlim()[0]) / 18
        shown = [mark for mark in values if mark == best or (abs(mark - best) > room and mark < self.right)]
        self.axes.set_xticks(shown, [f"{mark:,}" for mark in shown])
        self.axes.set_xlabel(self.name, color=self.inks.text, size=10, parse_math=False)
        self.axes.set_ylabel("at the peak", color=self.inks.quiet, size=9)
        self.axes.tick_params(colors=self.inks.quiet, labelsize=9)
        for side in ("top", "right", "left", "bottom"):
            self.axes.spines[side].set_visible(False)


def _in_words(name: str, case: FitCase) -> str:
    best = case.found.best
    if best is None:
        return f"Memory over {name}"
    return (
        f"Memory at the peak over {name}, by category: {best.values[name]:,} is the largest that fits on {case.device}."
    )
