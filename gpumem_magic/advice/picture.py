"""What each change leaves at the peak: a bar for each, stacked by category, with the card's wall."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import Any

import matplotlib.style
from matplotlib.figure import Figure

from gpumem_magic.trials.tried import Tried
from gpumem_magic.views import figure as bars
from gpumem_magic.views.layout import ticks
from gpumem_magic.views.lines import fit
from gpumem_magic.views.palette import ON_DARK, ON_LIGHT, Inks
from gpumem_magic.views.pen import WIDTH, patterned
from gpumem_magic.views.stacked import as_html, card_in_short, legend, seen_of, without_frame

# In inches: a row, what is above and below the rows, and a name in the legend.
_ROW, _ABOVE, _BELOW, _NAME = 0.36, 0.6, 0.5, 0.24
_MOST, _LONGEST = 12, 40


def element(rows: Sequence[tuple[str, Tried]], device: str, capacity: int) -> str:
    """The picture as HTML; "", with a warning, where it cannot be drawn, and where there is nothing to compare."""
    if len(rows) < 2:
        return ""
    alt = f"What each of {len(rows) - 1} changes leaves at the peak, by category, on {device}."
    return as_html(lambda dark: draw(rows, device, capacity, dark=dark), alt)


def draw(rows: Sequence[tuple[str, Tried]], device: str, capacity: int, *, dark: bool = False) -> Figure:
    with matplotlib.style.context("default"):
        # The last is all that is advised.
        return _drawn(
            rows if len(rows) <= _MOST else [*rows[: _MOST - 1], rows[-1]],
            device,
            capacity,
            ON_DARK if dark else ON_LIGHT,
        )


def _drawn(rows: Sequence[tuple[str, Tried]], device: str, capacity: int, inks: Inks) -> Figure:
    held = [{name: size for name, size in one.categories.items() if name != "cached"} for _, one in rows]
    seen = seen_of(held, capacity)
    bars_high = _ROW * len(rows)
    height = _ABOVE + max(bars_high + _BELOW, _NAME * len(seen) + 0.1)
    figure = bars.ReportFigure(figsize=(WIDTH, height), dpi=100, facecolor=inks.paper)
    axes: Any = figure.add_axes((0.33, 1 - (_ABOVE + bars_high) / height, 0.47, bars_high / height))
    longest = 0
    for place, sizes in enumerate(held):
        left = 0
        for name in seen:
            axes.barh(place, sizes.get(name, 0), left=left, **patterned(name, inks.colour(name)))
            left += sizes.get(name, 0)
            axes.plot([left, left], [place - 0.4, place + 0.4], color=inks.paper, linewidth=0.6)
        longest = max(longest, left)
    axes.axvline(capacity, color=inks.alarm, linewidth=1.6)
    axes.text(capacity, -0.75, card_in_short(device, capacity), color=inks.alarm, size=9, ha="right", va="bottom")
    names = ["\n".join(wrap(fit(name, 2 * _LONGEST), _LONGEST)[:2]) for name, _ in rows]
    axes.set_yticks(range(len(rows)), names, parse_math=False, linespacing=0.95)
    axes.set_ylim(len(rows) - 0.5, -0.6)
    top = max(longest, capacity)
    axes.set_xlim(0, top * 1.03)
    marks = ticks(top)
    axes.set_xticks([size for size, _ in marks], [name for _, name in marks])
    without_frame(axes, inks)
    legend(axes, seen, inks, wide=1.4, step=_NAME / bars_high)
    return figure
