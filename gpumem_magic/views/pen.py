"""What pictures of bars are drawn with: letters, lines and boxes in inches, on axes that fill the figure."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from gpumem_magic.looks.warned import warnings_remembered
from gpumem_magic.views.layout import flow, ticks
from gpumem_magic.views.lines import columns, fit, wrap
from gpumem_magic.views.palette import PATTERNS, Inks, line_on

WIDTH = 11.0
MARGIN = 0.22
SIZE = 9.5  # points
LINE = 0.215  # of words and of a legend


@dataclass
class Scale:
    """Bytes to inches: `left` is nothing, `right` is `top_bytes`."""

    left: float
    right: float
    top_bytes: int

    def x(self, size: float) -> float:
        return self.left + (self.right - self.left) * size / self.top_bytes


class Pen:
    """mono, sans: families of letters, each with those that stand in for letters that it lacks."""

    def __init__(self, figure: Figure, axes: Any, inks: Inks, mono: list[str], sans: list[str]) -> None:
        self.figure, self.axes, self.inks = figure, axes, inks
        self.mono, self.sans = mono, sans
        agg: Any = FigureCanvasAgg(figure)
        self._renderer = agg.get_renderer()

    def width(self, text: str, size: float = SIZE, *, mono: bool = False, **font: Any) -> float:
        """How wide the text will be, in inches."""
        properties = FontProperties(family=self.mono if mono else self.sans, size=size, **font)
        with missing_letters_allowed():
            width, _, _ = self._renderer.get_text_width_height_descent(text.replace("$", "S"), properties, ismath=False)
        return float(width) / float(self.figure.dpi)

    def fitting(self, text: str, room: float, **font: Any) -> str:
        """The text, cut with an ellipsis where it is wider than so many inches."""
        count = columns(text)
        while count > 1 and self.width(fit(text, count), **font) > room:
            count = min(count - 1, int(count * room / self.width(fit(text, count), **font)) + 1)
        return fit(text, count)

    def wrapped(self, sentence: str, size: float = SIZE, **font: Any) -> list[str]:
        """In lines that fit: first by the width of usual words, then by measuring what came out."""
        available = WIDTH - 2 * MARGIN
        characters = int(available / (0.545 * size / 72))
        while (
            any(self.width(line, size, **font) > available for line in wrap(sentence, characters)) and characters > 20
        ):
            characters = int(characters * 0.94)
        return wrap(sentence, characters)

    def text(self, x: float, y: float, text: str, *, mono: bool = False, size: float = SIZE, **options: Any) -> None:
        options = {"color": self.inks.text, "ha": "left", "va": "center_baseline", **options}
        # A dollar sign in somebody's code is a dollar sign, and no formula.
        text = text.replace("$", r"\$")
        if not mono:
            # Backticks say that something is code where a text can't: here nothing would change but the ticks.
            text = text.replace("`", "")
        self.axes.text(x, y, text, family=self.mono if mono else self.sans, size=size, **options)

    def line(self, xs: Sequence[float], ys: Sequence[float], **options: Any) -> None:
        self.axes.add_line(Line2D(xs, ys, **{"solid_capstyle": "butt", "antialiased": True, **options}))

    def box(self, x: float, y: float, width: float, height: float, category: str) -> None:
        """In a category's colour and pattern."""
        self.axes.add_patch(Rectangle((x, y), width, height, **patterned(category, self.inks.colour(category))))

    def bar(self, sizes: Sequence[tuple[str, int]], middle: float, thick: float, scale: Scale) -> None:
        """Categories' bytes, stacked."""
        total, end = 0, scale.left
        for category, size in sizes:
            if size <= 0:
                continue
            total += size
            start, end = end, scale.x(total)
            hairline = 0.008 if end - start > 0.03 else 0  # paper, between neighbours that have room for one
            self.box(start, middle - thick / 2, end - start - hairline, thick, category)

    def grid(self, scale: Scale, top: float, bottom: float) -> None:
        """The axis below the bars, and its marks' lines behind them."""
        axis_y = bottom + 0.03
        ink = self.inks.text
        self.line([scale.left, scale.right], [axis_y, axis_y], color=ink, linewidth=0.9)
        for size, word in ticks(scale.top_bytes):
            x = scale.x(size)
            if size:
                self.line([x, x], [top - 0.02, axis_y], color=self.inks.grid, linewidth=0.7, zorder=0)
            self.line([x, x], [axis_y, axis_y + 0.05], color=ink, linewidth=0.9)
            self.text(x, axis_y + 0.16, word, ha="center", size=9)

    def legend_lines(self, items: Sequence[tuple[str, str]]) -> list[list[int]]:
        """Which of a legend's items share a line, by number."""
        return flow([self._legend_width(text) for text, _ in items], WIDTH - 2 * MARGIN)

    def legend(self, items: Sequence[tuple[str, str]], members_by_line: list[list[int]], top: float) -> None:
        """items: what each says, and its category ("": the mark of the highest inside)."""
        for number, members in enumerate(members_by_line):
            widths = [self._legend_width(items[member][0]) for member in members]
            x = max(MARGIN, (WIDTH - sum(widths)) / 2)
            y = top + LINE * (number + 0.5)
            for member, width in zip(members, widths, strict=True):
                text, key = items[member]
                if key:
                    self.box(x, y - 0.055, 0.15, 0.11, key)
                else:
                    self.line([x, x + 0.14], [y, y], color=self.inks.text, linewidth=0.9)
                    self.line([x + 0.14] * 2, [y - 0.055, y + 0.055], color=self.inks.text, linewidth=1.6)
                self.text(x + 0.22, y, text, size=9)
                x += width

    def _legend_width(self, text: str) -> float:
        return 0.22 + self.width(text, 9) + 0.22


def patterned(category: str, colour: str) -> dict[str, Any]:
    """How a patch of a category looks in this shade of its colour, for matplotlib."""
    lines = {"hatch": 3 * PATTERNS[category], "edgecolor": line_on(colour)} if category in PATTERNS else {}
    return {"facecolor": colour, "linewidth": 0, **lines}


@contextmanager
def missing_letters_allowed() -> Iterator[None]:
    with warnings_remembered(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Gg]lyph .* missing.*")
        yield
