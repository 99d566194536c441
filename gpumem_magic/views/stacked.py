"""What pictures of several runs share: which categories are stacked, their legend, a card's wall, and the picture as HTML."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import matplotlib.style
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from gpumem_magic.failures import swallowed
from gpumem_magic.report.model import CATEGORIES, LABELS, OUTSIDE_CATEGORIES
from gpumem_magic.units import GIB, MIB
from gpumem_magic.views import figure as bars
from gpumem_magic.views.pages import CSS_WIDTH, image
from gpumem_magic.views.palette import ON_DARK, ON_LIGHT, Inks
from gpumem_magic.views.pen import patterned

# Of the card: what is less is not seen.
_SEEN = 1 / 500


def seen_of(runs: Iterable[Mapping[str, int]], capacity: int) -> list[str]:
    """The categories that are large enough to be seen in one of the runs, from the bottom up."""
    runs = list(runs)
    ordered = sorted(CATEGORIES, key=lambda name: name not in OUTSIDE_CATEGORIES)
    return [name for name in ordered if any(one.get(name, 0) > capacity * _SEEN for one in runs)]


def legend(axes: Any, seen: Sequence[str], inks: Inks, *, step: float, wide: float = 1.0) -> None:
    """To the right of the axes, from their top down, in their fractions. step: from one to the next. wide: how much longer the
    axes are that it would suit."""
    for place, name in enumerate(seen):
        y = 1 - step * (place + 0.5)
        axes.text(1 + 0.045 * wide, y, LABELS[name], transform=axes.transAxes, va="center", size=9, color=inks.text)
        look = patterned(name, inks.colour(name))
        box = (1 + 0.015 * wide, y - step * 0.3), 0.02 * wide, step * 0.6
        axes.add_patch(Rectangle(*box, transform=axes.transAxes, clip_on=False, **look))


def card_in_short(device: str, capacity: int) -> str:
    """``T4: 14.7 GiB``."""
    return f"{device}: {f'{capacity / GIB:.1f} GiB' if capacity >= GIB else f'{capacity / MIB:,.0f} MiB'}"


def without_frame(axes: Any, inks: Inks) -> None:
    axes.set_facecolor(inks.paper)
    axes.tick_params(colors=inks.quiet, labelsize=9)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)


def as_html(made: Callable[[bool], Figure], alt: str) -> str:
    """The picture as one element; "", with a warning, where it cannot be drawn. made: draws it, on a dark page or not."""
    try:
        with matplotlib.style.context("default"):
            light, dark = (
                bars.few_colours(bars.rendered(made(inks.is_dark), 160, inks), inks)[0] for inks in (ON_LIGHT, ON_DARK)
            )
    except Exception as error:
        warnings.warn(f"gpumem_magic could not draw the picture: {swallowed(error)}", stacklevel=3)
        return ""
    return f'<div class="gpumem-picture" tabindex="0">{image(light, alt, CSS_WIDTH, dark)}</div>'
