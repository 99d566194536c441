"""What each change leaves at the peak: a bar for each, stacked by category, with the card's wall."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import matplotlib.style
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from gpumem_magic.failures import swallowed
from gpumem_magic.report.model import CATEGORIES, LABELS
from gpumem_magic.trials.tried import Tried
from gpumem_magic.units import GIB, MIB
from gpumem_magic.views import figure as bars
from gpumem_magic.views.layout import ticks
from gpumem_magic.views.lines import fit
from gpumem_magic.views.pages import CSS_WIDTH, image
from gpumem_magic.views.palette import ON_DARK, ON_LIGHT, Inks
from gpumem_magic.views.pen import WIDTH

_ROW, _MARGIN, _MOST, _LONGEST = 0.34, 1.1, 12, 44


def element(rows: Sequence[tuple[str, Tried]], device: str, capacity: int) -> str:
    """The picture as HTML; "", with a warning, where it cannot be drawn, and where there is nothing to compare."""
    if len(rows) < 2:
        return ""
    try:
        with matplotlib.style.context("default"):
            raw = bars.rendered(draw(rows, device, capacity), 160)
        data, _, _ = bars.few_colours(raw)
    except Exception as error:
        warnings.warn(f"gpumem_magic could not draw the picture: {swallowed(error)}", stacklevel=2)
        return ""
    return image(data, f"What each of {len(rows) - 1} changes leaves at the peak, by category, on {device}.", CSS_WIDTH)


def draw(rows: Sequence[tuple[str, Tried]], device: str, capacity: int, *, dark: bool = False) -> Figure:
    with matplotlib.style.context("default"):
        return _drawn(rows[:_MOST], device, capacity, ON_DARK if dark else ON_LIGHT)


def _drawn(rows: Sequence[tuple[str, Tried]], device: str, capacity: int, inks: Inks) -> Figure:
    figure = bars.ReportFigure(figsize=(WIDTH, _MARGIN + _ROW * len(rows)), dpi=100, facecolor=inks.paper)
    height = _MARGIN + _ROW * len(rows)
    axes: Any = figure.add_axes((0.33, 0.5 / height, 0.47, 1 - _MARGIN / height))
    axes.set_facecolor(inks.paper)
    kinds = [name for name in CATEGORIES if name != "cached"]
    # Context and other processes lie at the bottom, as they are there first.
    kinds.sort(key=lambda name: name not in ("other_processes", "context_or_others", "context"))
    seen = [name for name in kinds if any(one.categories.get(name, 0) > capacity / 500 for _, one in rows)]
    longest = 0
    for place, (_, one) in enumerate(rows):
        left = 0
        for name in seen:
            size = one.categories.get(name, 0)
            axes.barh(place, size, left=left, color=inks.colour(name), edgecolor=inks.paper, linewidth=0.6)
            left += size
        longest = max(longest, left)
    axes.axvline(capacity, color=inks.alarm, linewidth=1.6)
    word = f"{capacity / GIB:.1f} GiB" if capacity >= GIB else f"{capacity / MIB:,.0f} MiB"
    axes.text(capacity, -0.75, f"{device}: {word}", color=inks.alarm, size=9, ha="right", va="bottom")
    axes.set_yticks(range(len(rows)), [fit(name, _LONGEST) for name, _ in rows], parse_math=False)
    axes.set_ylim(len(rows) - 0.5, -0.6)
    top = max(longest, capacity)
    axes.set_xlim(0, top * 1.03)
    marks = ticks(top)
    axes.set_xticks([size for size, _ in marks], [name for _, name in marks])
    axes.tick_params(colors=inks.quiet, labelsize=9)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    step = 0.24 / (height - _MARGIN + 0.01)
    for place, name in enumerate(seen):
        y = 1 - step * (place + 0.5)
        axes.text(1.07, y, LABELS[name], transform=axes.transAxes, va="center", size=9, color=inks.text)
        axes.add_patch(
            Rectangle(
                (1.02, y - step * 0.3), 0.03, step * 0.6, transform=axes.transAxes, clip_on=False, linewidth=0,
                facecolor=inks.colour(name),
            )
        )  # fmt: skip
    return figure
