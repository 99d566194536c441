"""The picture of two reports side by side: a bar for each at the peak and at the end, on one scale."""

from __future__ import annotations

import matplotlib.style
from matplotlib.figure import Figure

from gpumem_magic.report.model import ALLOCATED_CATEGORIES, LABELS, Peak, ReportData, Row
from gpumem_magic.views import figure
from gpumem_magic.views.bars import BarLine, Bars
from gpumem_magic.views.palette import ON_DARK, ON_LIGHT
from gpumem_magic.views.pen import LINE, Pen
from gpumem_magic.views.stacked import as_html

_GAP = 0.1


def element(first: ReportData, second: ReportData, alt: str) -> str:
    """As HTML; "" where neither has anything, or, with a warning, where it cannot be drawn."""
    if not (first.peak.allocated or second.peak.allocated):
        return ""
    return as_html(lambda dark: draw(first, second, dark=dark), alt)


def draw(first: ReportData, second: ReportData, *, dark: bool = False) -> Figure:
    inks = ON_DARK if dark else ON_LIGHT
    with matplotlib.style.context("default"):
        pen = Pen(*figure.canvas(inks), inks, *figure.fonts(""))
        states: list[tuple[str, Row | Peak, bool]] = []
        for name, report in (("first", first), ("second", second)):
            states.append((f"{name}, at the peak", report.peak, report.error is not None))
        for name, report in (("first", first), ("second", second)):
            if report.checkpoints:
                states.append((f"{name}, at the end", report.checkpoints[-1], False))
        lines = [BarLine(label, _sizes(state), state.allocated, alarm) for label, state, alarm in states]
        whole = max(state.allocated for _, state, _ in states)
        bars = Bars(lines, whole, "MiB allocated", pen)
        items = [
            (LABELS[name], name)
            for name in ALLOCATED_CATEGORIES
            if any(2000 * (state.categories.get(name) or 0) > whole for _, state, _ in states)
        ]
        flowed = pen.legend_lines(items)
        height = bars.height + LINE * len(flowed) + _GAP
        pen.figure.set_size_inches(pen.figure.get_figwidth(), height)
        pen.axes.set_ylim(height, 0)
        bars.draw(0)
        pen.legend(items, flowed, bars.height)
    return pen.figure


def _sizes(state: Row | Peak) -> list[tuple[str, int]]:
    return [(name, state.categories.get(name) or 0) for name in ALLOCATED_CATEGORIES]
