"""The report as a picture: one bar a row, stacked by category, the user's own code on its left and the figures on its right.

The scale is what is allocated. How full the device was stands below, as one thin bar.

The figure is made without pyplot, so no window opens and no current figure changes, and under matplotlib's default style, so that
the user's settings neither shape it nor are changed by it. All lengths are inches: the axes
fill the figure, so that text and bars share one coordinate system whatever the number of rows.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib.style
from matplotlib import font_manager
from matplotlib.figure import Figure
from PIL import Image

from gpumem_magic.report.model import ALLOCATED_CATEGORIES, CATEGORIES, LABELS, Peak, ReportData, Row
from gpumem_magic.report.ranks import DONE, RankRow, Ranks
from gpumem_magic.report.rows import MOST
from gpumem_magic.views import explain, what_failed
from gpumem_magic.views.bars import BarLine, Bars
from gpumem_magic.views.layout import palette_image
from gpumem_magic.views.lines import MARKED, PEAK, Line, SizeFormat, columns, shown_lines
from gpumem_magic.views.palette import ON_DARK, ON_LIGHT, Inks
from gpumem_magic.views.pen import LINE, MARGIN, SIZE, WIDTH, Pen, Scale, missing_letters_allowed
from gpumem_magic.views.quiet import quiet
from gpumem_magic.views.ranks import MOST as MOST_RANKS
from gpumem_magic.views.ranks import STATE_WORDS, families, names
from gpumem_magic.views.ranks import heading as whose_report
from gpumem_magic.views.story import TENSOR_HEADS, story_of, tensor_heading, tensor_table

MAX_ROWS = 300  # that one picture can hold
_SLIM_SIZE = 8.0
_FIGURES = 1.62  # the two columns on the right
_LABELS = 3.5  # at most, for the code on the left
_CHARACTER = 0.602 * SIZE / 72  # the width of a character of DejaVu Sans Mono, which matplotlib brings along
_MONO = ("DejaVu Sans Mono",)
_SANS = ("DejaVu Sans",)
# Fonts with Chinese, Japanese and Korean letters, which matplotlib's own lack; used where one of them is installed.
_EAST_ASIAN = (
    "Noto Sans Mono CJK JP",
    "Noto Sans CJK JP",
    "Noto Sans CJK KR",
    "NanumGothic",
    "Malgun Gothic",
    "Apple SD Gothic Neo",
    "Microsoft YaHei",
    "PingFang SC",
    "WenQuanYi Micro Hei",
    "Arial Unicode MS",
)


class QuietFigure(Figure):
    """A figure that warns of no letter, whoever draws it: one that no installed font has is a box; the text beside it has it."""

    def draw(self, renderer: Any) -> None:
        with missing_letters_allowed():
            super().draw(renderer)

    def get_tightbbox(self, *args: Any, **options: Any) -> Any:
        with missing_letters_allowed():
            return super().get_tightbbox(*args, **options)


class ReportFigure(QuietFigure):
    """A figure that a notebook shows as a picture even where nobody has loaded pyplot."""

    def _repr_png_(self) -> bytes:
        return rendered(self, 160)


def draw(
    report: ReportData, *, most: int | None = MOST, title: bool = True, words: bool = True, dark: bool = False
) -> Figure:
    """The picture. most: about how many rows it has, None for all that one picture can hold.

    title, words: the answer above and what stands below; a page that has them as text leaves them out. dark: for a dark page.
    """
    with matplotlib.style.context("default"):
        return _Drawing(report, most, title, words, ON_DARK if dark else ON_LIGHT).figure


def png(
    report: ReportData,
    *,
    dpi: int = 160,
    most: int | None = MOST,
    title: bool = True,
    words: bool = True,
    dark: bool = False,
) -> tuple[bytes, int, int]:
    """The picture as a PNG, and its width and height in pixels. Few colours, so that a saved notebook stays small."""
    inks = ON_DARK if dark else ON_LIGHT
    return few_colours(rendered(draw(report, most=most, title=title, words=words, dark=dark), dpi, inks), inks)


class _File(io.BytesIO):
    """A file for an image. Pillow asks whether it is ``sys.stdout``, which may be an object of the user's: that is not asked."""

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = io.BytesIO.__hash__


@quiet()
def few_colours(raw: bytes, inks: Inks = ON_LIGHT) -> tuple[bytes, int, int]:
    """A PNG with the palette's colours only, and its width and height in pixels."""
    image = Image.open(io.BytesIO(raw)).convert("RGB").quantize(palette=palette_image(inks), dither=Image.Dither.NONE)
    small = _File()
    image.save(small, format="png", optimize=True)
    return small.getvalue(), image.width, image.height


@quiet()
def rendered(figure: Figure, dpi: int, inks: Inks = ON_LIGHT) -> bytes:
    """The figure as a PNG on paper."""
    raw = _File()
    with matplotlib.style.context("default"):
        figure.savefig(raw, format="png", dpi=dpi, facecolor=inks.paper)
    return raw.getvalue()


class _Drawing(Pen):
    def __init__(self, report: ReportData, most: int | None, title: bool, words: bool, inks: Inks) -> None:
        self.report = report
        self.figures = SizeFormat(report)
        self.lines = shown_lines(report, most)
        self.left_out = max(0, len(self.lines) - MAX_ROWS)
        if self.left_out:
            self.lines = [*self.lines[: MAX_ROWS - 50], *self.lines[-50:]]
        text = "".join([*(line.text for line in self.lines), report.answer, *report.notes, report.peak.where])
        super().__init__(*canvas(inks), inks, *fonts(text))
        self.highest = explain.highest_in_use(report)
        self.wanted = (report.error.wanted or 0) if report.error is not None else 0
        self.scale = self._make_scale()
        self.pitch = 0.31 if len(self.lines) <= 40 else 0.24
        told = story_of(report)
        # From the top: several ranks, the answer, head of the columns, rows, axis, the device's gauge, legend, words.
        start = 0.0 if report.ranks is None else self._ranks(report.ranks, title)
        heading = self.wrapped(told.answer, 11.5, weight="bold") if title else []
        tops = self._row_tops(start=start + 0.12 + 0.24 * len(heading) + (0.12 if heading else 0) + 0.28)
        rows_end = tops[-1] + self._pitch(self.lines[-1]) if self.lines else tops[0]
        gauge_top = rows_end + 0.42
        legend = self._legend_items()
        legend_lines = self.legend_lines(legend)
        legend_top = gauge_top + (0.36 if self.highest else 0.04)
        table = self._table() if words else []
        sentences = self._sentences(told.obstacle, told.others) if words else []
        table_top = legend_top + LINE * len(legend_lines) + 0.1
        words_top = table_top + LINE * len(table) + (0.1 if table else 0)
        height = words_top + LINE * len(sentences) + (0.1 if sentences else 0.02)
        self.figure.set_size_inches(WIDTH, height)
        self.axes.set_ylim(height, 0)
        self._headline(heading, start)
        self._column_heads(tops[0])
        self.grid(self.scale, tops[0], rows_end)
        for line, top in zip(self.lines, tops, strict=False):
            self._row(line, top)
        if self.left_out:
            self._gap_note(tops)
        if self.highest:
            self._gauge(gauge_top)
        self.legend(legend, legend_lines, legend_top)
        for number, cells in enumerate(table):
            self._table_row(cells, table_top + LINE * (number + 0.5), number == 0)
        for number, (sentence, colour) in enumerate(sentences):
            self.text(MARGIN, words_top + LINE * (number + 0.5), sentence, color=colour)

    def _ranks(self, ranks: Ranks, title: bool) -> float:
        """All ranks above the report of one: their answer, their bars, and whose report follows. Where it begins, in inches."""
        answer = self.wrapped(ranks.answer, 11.5, weight="bold") if title else []
        self._headline(answer, 0.0)
        top = 0.12 + 0.24 * len(answer)
        bars = Bars(list(map(_rank_line, families(ranks)[:MOST_RANKS])), ranks.highest or 0, "MiB at the peak", self)
        bars.draw(top)
        self._headline([whose_report(ranks)], top + bars.height)
        return top + bars.height + 0.24

    def _headline(self, lines: Sequence[str], top: float) -> None:
        for number, line in enumerate(lines):
            self.text(MARGIN, top + 0.12 + 0.24 * (number + 0.5), line, size=11.5, weight="bold")

    # Layout

    def _make_scale(self) -> Scale:
        longest = max((self._label_width(line) for line in self.lines), default=0.0)
        left = MARGIN + min(_LABELS, max(1.2, longest)) + 0.14
        largest = max((line.row.peak_allocated for line in self.lines), default=0)
        failed = next((line.row.allocated for line in self.lines if line.row.kind == "error"), 0)
        # A request that is far larger than what there is would leave slivers of it: then its box is broken off.
        wanted = failed + self.wanted
        top_bytes = max(largest, wanted) if wanted <= 1.6 * largest else 1.25 * largest
        return Scale(left, WIDTH - _FIGURES - MARGIN, max(1, round(top_bytes * 1.02)))

    def _label_width(self, line: Line) -> float:
        return self._prefix_width(line) + self.width(line.text + self._suffix(line), **self._label_font(line))

    def _prefix_width(self, line: Line) -> float:
        indent = 2 * line.depth + (columns(line.iteration) + 1 if line.iteration else 0)
        return indent * _CHARACTER * (_SLIM_SIZE / SIZE if line.is_still else 1)

    def _label_font(self, line: Line) -> dict[str, Any]:
        size = _SLIM_SIZE if line.is_still else SIZE
        if line.row.kind == PEAK:
            return {"size": size, "weight": "bold"}
        return {"size": size, "mono": True} if line.is_statement else {"size": size, "style": "italic"}

    def _suffix(self, line: Line) -> str:
        return f"  {what_failed.failure_word(self.report)}" if line.row.kind == "error" and line.depth == 0 else ""

    def _row_tops(self, start: float) -> list[float]:
        tops = []
        for number, line in enumerate(self.lines):
            if self.left_out and number == len(self.lines) - 50:
                start += self.pitch  # room for the sentence that says so
            tops.append(start)
            start += self._pitch(line)
        return tops or [start]

    def _pitch(self, line: Line) -> float:
        return self.pitch * (0.6 if line.is_still else 0.8 if line.depth and line.row.kind != PEAK else 1)

    # Drawing

    def _column_heads(self, first_top: float) -> None:
        y = first_top - 0.15
        for x, word in ((self._first_x, "MiB allocated"), (WIDTH - MARGIN, "peak within")):
            self.text(x, y, word, color=self.inks.quiet, size=8.5, ha="right")

    @property
    def _first_x(self) -> float:
        return WIDTH - MARGIN - 0.82

    def _row(self, line: Line, top: float) -> None:
        middle = top + self._pitch(line) / 2
        failed = line.row.kind == "error"
        self._label(line, middle)
        thick = self.pitch * (0.2 if line.is_still else 0.74 if line.depth == 0 or line.row.kind == PEAK else 0.46)
        self.bar(
            [(name, line.row.categories.get(name) or 0) for name in ALLOCATED_CATEGORIES], middle, thick, self.scale
        )
        if line.is_still:
            return
        if failed and self.wanted:
            self._request(line.row, middle, thick)
        inside = line.peak_inside
        # What is too near to the end of the state would only look like a smudge.
        if inside is not None and inside - line.row.allocated > self.scale.top_bytes * 0.006:
            self._whisker(line.row.allocated, inside, middle, thick)
        colour = self.inks.alarm if failed else self.inks.text if line.depth == 0 else self.inks.quiet
        points = SIZE if line.depth == 0 or line.row.kind == PEAK else SIZE - 1
        weight = {"color": self.inks.text, "weight": "bold"} if line.row.kind == PEAK else {"color": colour}
        allocated = self.figures.size(line.row.allocated)
        self.text(self._first_x, middle, allocated, mono=True, ha="right", size=points, **weight)
        text = "" if inside is None else self.figures.size(inside)
        if text and text != allocated:
            self.text(WIDTH - MARGIN, middle, text, mono=True, ha="right", color=self.inks.quiet, size=points)

    def _request(self, row: Row, middle: float, thick: float) -> None:
        """What was asked for and not given, as an empty box behind what is allocated; broken off where it has no room."""
        start, end = self.scale.x(row.allocated), self.scale.x(row.allocated + self.wanted)
        right = min(end, self.scale.right)
        low, high = middle - thick / 2, middle + thick / 2
        edges = [([start, right], [low, low]), ([start, right], [high, high])]
        edges += [([right, right], [low, high])] if end <= self.scale.right else []
        for xs, ys in edges:
            self.line(xs, ys, color=self.inks.alarm, linewidth=1.1, zorder=4)
        word = self.fitting(f"{self.figures.size(self.wanted)} wanted", right - start - 0.03, size=8)
        if word.endswith("wanted"):
            self.text((start + right) / 2, middle, word, ha="center", size=8, color=self.inks.alarm)

    def _whisker(self, start: int, end: int, middle: float, thick: float) -> None:
        """From what is allocated to the highest inside."""
        x = self.scale.x(end)
        self.line([self.scale.x(start), x], [middle, middle], color=self.inks.text, linewidth=0.9, zorder=4)
        edge = [middle - thick * 0.36, middle + thick * 0.36]
        self.line([x, x], edge, color=self.inks.text, linewidth=1.6, zorder=4)

    def _label(self, line: Line, middle: float) -> None:
        room = self.scale.left - 0.14 - MARGIN - self._prefix_width(line)
        x = MARGIN + self._prefix_width(line)
        font = self._label_font(line)
        quiet = self.inks.quiet
        if line.iteration:
            size = _SLIM_SIZE if line.is_still else SIZE
            self.text(MARGIN, middle, line.iteration, mono=True, color=quiet, size=size)
        suffix = self._suffix(line)
        text = self.fitting(line.text, room - (self.width(suffix, **font) if suffix else 0), **font) + suffix
        failed, plain = line.row.kind == "error", line.row.kind == PEAK or (line.is_statement and line.depth == 0)
        self.text(x, middle, text, color=self.inks.alarm if failed else self.inks.text if plain else quiet, **font)

    def _gap_note(self, tops: list[float]) -> None:
        y = tops[-50] - self.pitch / 2
        text = f"… {self.left_out:,} more rows in the table"
        self.text(MARGIN, y, text, color=self.inks.quiet, style="italic")

    # The device, legend and words

    def _gauge(self, top: float) -> None:
        """How full the device was at most: all of it as one thin bar, in the order of a bar's categories."""
        highest = self.highest or 0
        capacity = max(self.report.device.capacity, highest)
        every: list[Row | Peak] = [*self.report.checkpoints, self.report.peak]
        states = [state for state in every if state.device_used is not None]
        fullest = max(states, key=lambda state: state.device_used or 0)
        scale = Scale(self.scale.left, self.scale.right, max(1, capacity))
        middle = top + 0.12
        self.text(MARGIN, middle, "nvidia-smi at its highest", color=self.inks.quiet, style="italic", size=9)
        low, high = middle - 0.05, middle + 0.05
        xs = [scale.left, scale.right, scale.right, scale.left, scale.left]
        self.line(xs, [low, low, high, high, low], color=self.inks.quiet, linewidth=0.6)
        self.bar([(name, fullest.categories.get(name) or 0) for name in CATEGORIES], middle, 0.1, scale)
        self.line([scale.x(highest)] * 2, [middle - 0.09, middle + 0.09], color=self.inks.text, linewidth=1.2, zorder=4)
        of = f" of {self.figures.size(capacity)}" if self.report.device.capacity else ""
        text = f"{self.figures.size(highest)}{of}"
        self.text(WIDTH - MARGIN, middle, text, mono=True, ha="right", color=self.inks.quiet, size=SIZE - 1)

    def _legend_items(self) -> list[tuple[str, str]]:
        """(what it says, category, or "" for the mark); only what can be seen."""
        visible = self.scale.top_bytes / 2000
        rows = [line.row for line in self.lines]
        bars: list[Row | RankRow] = [*rows, *(self.report.ranks.rows if self.report.ranks is not None else ())]
        items = [
            (LABELS[name], name)
            for name in ALLOCATED_CATEGORIES
            if any((row.categories.get(name) or 0) > visible for row in bars)
        ]
        if self.highest:
            seen = max(self.report.device.capacity, self.highest) / 500
            rest = [name for name in CATEGORIES if name not in ALLOCATED_CATEGORIES]
            items += [
                (LABELS[name], name) for name in rest if any((row.categories.get(name) or 0) > seen for row in rows)
            ]
        near = self.scale.top_bytes * 0.006
        if any(line.peak_inside is not None and line.peak_inside - line.row.allocated > near for line in self.lines):
            items.append((MARKED, ""))
        return items

    def _table(self) -> list[list[str]]:
        rows = tensor_table(self.report)
        heads = [TENSOR_HEADS[0], tensor_heading(self.report), *TENSOR_HEADS[2:]]
        return [heads, *rows] if rows else []

    def _table_row(self, cells: Sequence[str], y: float, is_head: bool) -> None:
        """The size, and three columns of words, which take what room there is."""
        colour = self.inks.quiet if is_head else self.inks.text
        self.text(MARGIN + 0.7, y, cells[0], mono=True, ha="right", size=8.5, color=colour)
        starts = [MARGIN + 0.9, MARGIN + 4.4, MARGIN + 8.0, WIDTH - MARGIN]
        for cell, x, end in zip(cells[1:], starts, starts[1:], strict=False):
            self.text(x, y, self.fitting(cell, end - x - 0.1, size=8.5), size=8.5, color=colour)

    def _sentences(self, obstacle: str, others: Sequence[str]) -> list[tuple[str, str]]:
        """The words below the picture, broken into lines, with their colours: what stood in the way first, in red."""
        quiet = [*others, *explain.other_devices(self.report)]
        result = [(line, self.inks.alarm) for line in self.wrapped(obstacle)]
        return result + [(line, self.inks.quiet) for sentence in quiet for line in self.wrapped(sentence)]


def _rank_line(family: tuple[RankRow, list[RankRow]]) -> BarLine:
    """A bar for a rank at its peak, and those that are like it."""
    first, members = family
    sizes = [(name, first.categories.get(name, 0)) for name in ALLOCATED_CATEGORIES]
    label = "  ".join(filter(None, [names(first, members), STATE_WORDS[first.state]]))
    return BarLine(label, sizes, first.peak_allocated, alarm=first.state != DONE)


def canvas(inks: Inks = ON_LIGHT) -> tuple[Figure, Any]:
    """A figure of one inch's height, which grows when the rows are known, and axes in inches that fill it."""
    figure = ReportFigure(figsize=(WIDTH, 1), dpi=100, facecolor=inks.paper, edgecolor=inks.paper)
    axes = figure.add_axes((0, 0, 1, 1), frameon=False)
    axes.set_xlim(0, WIDTH)
    axes.set_axis_off()
    return figure, axes


def fonts(text: str) -> tuple[list[str], list[str]]:
    """The mono and the sans family, each with a fallback for wide letters where the text has some and a font is there."""
    mono, sans = list(_MONO), list(_SANS)
    if columns(text) > len(text):
        installed = {entry.name for entry in font_manager.fontManager.ttflist}
        fallback = next((name for name in _EAST_ASIAN if name in installed), None)
        if fallback:
            mono.append(fallback)
            sans.append(fallback)
    return mono, sans
