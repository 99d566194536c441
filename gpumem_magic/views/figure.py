"""The report as a picture: one bar a row, stacked by category, the user's own code on its left and the figures on its right.

The figure is made without pyplot, so no window opens and no current figure changes, and under matplotlib's default style, so that
the user's settings neither shape it nor are changed by it. Only this module imports matplotlib. All lengths are inches: the axes
fill the figure, so that text and bars share one coordinate system whatever the number of rows.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.style
from matplotlib import font_manager
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from PIL import Image

from gpumem_magic.report.model import CATEGORIES, LABELS, ReportData, Row
from gpumem_magic.units import counted
from gpumem_magic.views import explain
from gpumem_magic.views.layout import flow, palette_image, ticks
from gpumem_magic.views.lines import PEAK, Line, SizeFormat, columns, fit, lines, used, wrap
from gpumem_magic.views.palette import ALARM, COLOURS, PAPER, QUIET, TEXT

WIDTH = 11.0
MAX_ROWS = 200
_ALL_ALIKE_UP_TO = 24  # rows; in a longer picture those that moved nothing are slim
_SLIM_SIZE = 7.0
_PARTS_UP_TO = 60  # rows; a picture with more leaves the parts to the table unless they are asked for
_MARGIN = 0.22
_FIGURES = 1.55  # the two columns on the right
_LABELS = 3.5  # at most, for the code on the left
_SIZE = 9.5  # points
_CHARACTER = 0.602 * _SIZE / 72  # the width of a character of DejaVu Sans Mono, which matplotlib brings along
_LINE = 0.215
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


class ReportFigure(Figure):
    """A figure that a notebook shows as a picture even where nobody has loaded pyplot."""

    def _repr_png_(self) -> bytes:
        return rendered(self, 160)


def draw(
    report: ReportData, *, parts: bool | None = None, title: bool = True, words: bool = True, limit: int = MAX_ROWS
) -> Figure:
    """The picture. parts: rows for what happened inside statements (None: where the picture stays readable).

    title, words: the line above and the sentences below; a page that has them as text leaves them out. limit: of rows; the
    middle of a longer report is left out, and said.
    """
    with matplotlib.style.context("default"):
        return _Drawing(report, parts, title, words, max(2, limit)).figure


def png(report: ReportData, *, dpi: int = 160, title: bool = True, words: bool = True) -> tuple[bytes, int, int]:
    """The picture as a PNG, and its width and height in pixels. Few colours, so that a saved notebook stays small."""
    return few_colours(rendered(draw(report, title=title, words=words), dpi))


def few_colours(raw: bytes) -> tuple[bytes, int, int]:
    """A PNG with the palette's colours only, and its width and height in pixels."""
    image = Image.open(io.BytesIO(raw)).convert("RGB").quantize(palette=palette_image(), dither=Image.Dither.NONE)
    small = io.BytesIO()
    image.save(small, format="png", optimize=True)
    return small.getvalue(), image.width, image.height


def rendered(figure: Figure, dpi: int) -> bytes:
    """The figure as a PNG on paper."""
    raw = io.BytesIO()
    with warnings.catch_warnings(), matplotlib.style.context("default"):
        # A letter that no installed font has is drawn as a box; the table beside the picture has it.
        warnings.filterwarnings("ignore", message=".*[Gg]lyph .* missing.*")
        figure.savefig(raw, format="png", dpi=dpi, facecolor=PAPER)
    return raw.getvalue()


def select(report: ReportData, parts: bool | None, limit: int) -> tuple[list[Line], int]:
    """The lines to be drawn, and where the middle was left out (the number of lines left out, 0 for none)."""
    shown = lines(report, parts=parts is not False)
    if parts is None and len(shown) > _PARTS_UP_TO:
        shown = lines(report, parts=False)
    if len(shown) <= limit:
        return shown, 0
    first, last = (limit + 1) // 2, limit // 2
    return [*shown[:first], *shown[-last:]], len(shown) - limit


@dataclass
class _Scale:
    """Bytes to inches: `left` is nothing, `right` is `top_bytes`."""

    left: float
    right: float
    top_bytes: int

    def x(self, size: float) -> float:
        return self.left + (self.right - self.left) * size / self.top_bytes


class _Drawing:
    def __init__(self, report: ReportData, parts: bool | None, title: bool, words: bool, limit: int) -> None:
        self.report = report
        self.figures = SizeFormat(report)
        self.lines, self.left_out = select(report, parts, limit)
        self.mono, self.sans = _fonts(report)
        self.figure, self.axes = canvas()
        agg: Any = FigureCanvasAgg(self.figure)
        self._renderer = agg.get_renderer()
        self.scale = self._make_scale()
        self.pitch = 0.31 if len(self.lines) <= 40 else 0.24
        # From the top: title, head of the columns, rows, axis, legend, sentences.
        tops = self._row_tops(start=(0.55 if title else 0.12) + 0.28)
        rows_end = tops[-1] + self._pitch(self.lines[-1])
        legend = self._legend_items()
        legend_lines = flow([self._legend_width(name) for name, _ in legend], WIDTH - 2 * _MARGIN)
        legend_top = rows_end + 0.5
        sentences = self._sentences() if words else []
        words_top = legend_top + _LINE * len(legend_lines) + 0.1
        height = words_top + _LINE * len(sentences) + (0.1 if sentences else 0.02)
        self.figure.set_size_inches(WIDTH, height)
        self.axes.set_ylim(height, 0)
        if title:
            self._title()
        self._column_heads(tops[0])
        self._grid(tops[0], rows_end)
        for line, top in zip(self.lines, tops, strict=True):
            self._row(line, top)
        if self.left_out:
            self._gap_note(tops)
        self._legend(legend, legend_lines, legend_top)
        for number, (sentence, colour) in enumerate(sentences):
            self._text(_MARGIN, words_top + _LINE * (number + 0.5), sentence, color=colour)

    # Layout

    def _make_scale(self) -> _Scale:
        longest = max((_label_columns(line, self.report) for line in self.lines), default=0)
        left = _MARGIN + min(_LABELS, max(1.2, longest * _CHARACTER)) + 0.12
        largest = max((_extent(line.row) for line in self.lines), default=0)
        capacity = self.report.device.capacity
        # A device that is nearly empty would show slivers: then the bars get the room, and the capacity is only said.
        self.capacity_shown = 0 < capacity <= 4 * largest
        top_bytes = max(capacity, largest) if self.capacity_shown else largest * 1.08
        return _Scale(left, WIDTH - _FIGURES - _MARGIN, max(1, round(top_bytes)))

    def _row_tops(self, start: float) -> list[float]:
        tops = []
        for number, line in enumerate(self.lines):
            if line.row.kind == PEAK and number:
                start += 0.12  # the peak is no step of the program: a little air before it
            if self.left_out and number == (len(self.lines) + 1) // 2:
                start += self.pitch  # room for the sentence that says so
            tops.append(start)
            start += self._pitch(line)
        return tops

    def _pitch(self, line: Line) -> float:
        return self.pitch * (0.5 if self._slim(line) else 0.8 if line.depth else 1)

    def _slim(self, line: Line) -> bool:
        """In a long picture, statements that moved nothing stand back, so that the others can be seen."""
        return len(self.lines) > _ALL_ALIKE_UP_TO and line.moved_nothing

    def _width(self, text: str, size: float, **font: Any) -> float:
        """How wide the text will be, in inches."""
        properties = FontProperties(family=self.sans, size=size, **font)
        width, _, _ = self._renderer.get_text_width_height_descent(text, properties, ismath=False)
        return float(width) / float(self.figure.dpi)

    # Drawing

    def _text(self, x: float, y: float, text: str, *, mono: bool = False, size: float = _SIZE, **options: Any) -> None:
        options = {"color": TEXT, "ha": "left", "va": "center_baseline", **options}
        # A dollar sign in somebody's code is a dollar sign, and no formula.
        text = text.replace("$", r"\$")
        self.axes.text(x, y, text, family=self.mono if mono else self.sans, size=size, **options)

    def _line(self, xs: Sequence[float], ys: Sequence[float], **options: Any) -> None:
        self.axes.add_line(Line2D(xs, ys, **{"solid_capstyle": "butt", "antialiased": True, **options}))

    def _box(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        self.axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor="none", linewidth=0))

    def _title(self) -> None:
        report = self.report
        where = f" at {report.peak.where}" if report.peak.where else ""
        words = [f"peak {self.figures.size(report.peak.allocated)} MiB allocated{where}"]
        if report.stand_ins:
            words.append("values on the device are stand-ins")
        name = explain.device_name(report.device)
        name = fit(name, 50)
        self._text(_MARGIN, 0.28, name, size=12, weight="bold")
        x = _MARGIN + self._width(name, 12, weight="bold") + 0.22
        text, available = "   ".join(words), WIDTH - _MARGIN - x
        size = min(11.0, max(8.5, 11.0 * available / self._width(text, 11)))
        while self._width(text, size) > available and len(text) > 10:
            text = fit(text, columns(text) - 4)
        self._text(x, 0.28, text, size=size)

    def _column_heads(self, first_top: float) -> None:
        y = first_top - 0.15
        known = any(line.row.device_used is not None for line in self.lines)
        self._text(self._smi_x, y, "nvidia-smi" if known else "reserved", color=QUIET, size=8.5, ha="right")
        self._text(WIDTH - _MARGIN, y, "change", color=QUIET, size=8.5, ha="right")
        capacity = self.report.device.capacity
        if capacity:
            text = f"{self.figures.size(capacity)} MiB"
            if self.capacity_shown:
                x = self.scale.x(capacity)
                self._text(x, y, text, color=ALARM, size=8.5, ha="right" if x > self.scale.right - 1 else "center")
            else:
                self._text(self.scale.right, y, f"capacity {text} →", color=ALARM, size=8.5, ha="right")

    @property
    def _smi_x(self) -> float:
        return WIDTH - _MARGIN - 0.72

    def _grid(self, top: float, bottom: float) -> None:
        axis_y = bottom + 0.03
        self._line([self.scale.left, self.scale.right], [axis_y, axis_y], color=TEXT, linewidth=0.9)
        for size, word in ticks(self.scale.top_bytes):
            x = self.scale.x(size)
            if size:
                self._line([x, x], [top - 0.02, axis_y], color="#EEEEEE", linewidth=0.7, zorder=0)
            self._line([x, x], [axis_y, axis_y + 0.05], color=TEXT, linewidth=0.9)
            self._text(x, axis_y + 0.16, word, ha="center", size=9)
        if self.capacity_shown:
            x = self.scale.x(self.report.device.capacity)
            self._line([x, x], [top - 0.04, axis_y], color=ALARM, linewidth=1.1, linestyle=(0, (4, 3)), zorder=3)

    def _row(self, line: Line, top: float) -> None:
        middle = top + self._pitch(line) / 2
        failed = line.row.kind == "error"
        slim = self._slim(line)
        self._label(line, middle)
        thick = self.pitch * (0.34 if slim else 0.74 if line.depth == 0 else 0.46 if line.depth == 1 else 0.32)
        total, end = 0, self.scale.left
        for category in CATEGORIES:
            size = max(0, line.row.categories.get(category) or 0)
            if not size:
                continue
            total += size
            start, end = end, self.scale.x(total)
            hairline = 0.008 if end - start > 0.03 else 0  # white, between neighbours that have room for one
            self._box(start, middle - thick / 2, end - start - hairline, thick, COLOURS[category])
        if slim:
            return
        self._marks(line.row, middle, thick, total)
        star = "*" if line.row.device_used is None and self._mixed else ""
        colour = ALARM if failed else TEXT if line.depth == 0 else QUIET
        points = _SIZE if line.depth == 0 else _SIZE - 1
        used_text = self.figures.size(line.used) + star
        self._text(self._smi_x, middle, used_text, mono=True, ha="right", color=colour, size=points)
        if line.row.kind != PEAK:
            change = self.figures.change(line.change)
            self._text(WIDTH - _MARGIN, middle, change, mono=True, ha="right", color=QUIET, size=points)

    @property
    def _mixed(self) -> bool:
        known = [line.row.device_used is not None for line in self.lines]
        return any(known) and not all(known)

    def _marks(self, row: Row, middle: float, thick: float, total: int) -> None:
        """A whisker from allocated to the highest allocated inside; a line beyond the bar to the highest reserved inside."""
        # What is too near to the end of the state would only look like a smudge.
        near = self.scale.top_bytes * 0.006
        if row.kind != PEAK and row.peak_allocated - row.allocated > near:
            self._whisker(row.allocated, row.peak_allocated, middle, thick, TEXT, 1.6)
        if row.kind != PEAK and row.peak_reserved - row.reserved > near:
            self._whisker(total, total + row.peak_reserved - row.reserved, middle, thick, QUIET, 1.2)

    def _whisker(self, start: int, end: int, middle: float, thick: float, colour: str, width: float) -> None:
        x = self.scale.x(end)
        self._line([self.scale.x(start), x], [middle, middle], color=colour, linewidth=0.9, zorder=4)
        self._line([x, x], [middle - thick * 0.36, middle + thick * 0.36], color=colour, linewidth=width, zorder=4)

    def _label(self, line: Line, middle: float) -> None:
        failed = line.row.kind == "error"
        available = int((self.scale.left - 0.12 - _MARGIN) / _CHARACTER + 0.01)
        indent = 2 * line.depth + (columns(line.iteration) + 1 if line.iteration else 0)
        x = _MARGIN + indent * _CHARACTER
        if self._slim(line):
            self._text(
                x,
                middle,
                fit(
                    line.text, int((available - indent) * 0.96 * _SIZE / _SLIM_SIZE)
                ),  # small letters are a little wider
                mono=True,
                color=QUIET,
                size=_SLIM_SIZE,
            )
            return
        if line.iteration:
            self._text(_MARGIN, middle, line.iteration, mono=True, color=QUIET)
        if not line.is_statement:
            self._text(x, middle, fit(line.text, int((available - indent) * 1.05)), color=QUIET, style="italic")
            return
        suffix = _suffix(line, self.report)
        text = fit(line.text, max(8, available - indent - columns(suffix))) + suffix
        colour = ALARM if failed else TEXT if line.depth == 0 else QUIET
        self._text(x, middle, text, mono=True, color=colour)

    def _gap_note(self, tops: list[float]) -> None:
        y = tops[len(tops) - len(tops) // 2] - self.pitch / 2
        self._text(_MARGIN, y, f"… {counted(self.left_out, 'more row')} in the table", color=QUIET, style="italic")

    # Legend and sentences

    def _legend_items(self) -> list[tuple[str, str]]:
        """(what it says, category or "allocated" or "reserved" for the two marks); only what can be seen."""
        visible = self.scale.top_bytes / 2000
        rows = [line.row for line in self.lines]
        items = [
            (LABELS[name], name)
            for name in CATEGORIES
            if any((row.categories.get(name) or 0) > visible for row in rows)
        ]
        near = self.scale.top_bytes * 0.006
        states = [row for row in rows if row.kind != PEAK]
        if any(row.peak_allocated - row.allocated > near for row in states):
            items.append(("highest allocated inside", "allocated"))
        if any(row.peak_reserved - row.reserved > near for row in states):
            items.append(("highest reserved inside", "reserved"))
        return items

    def _legend_width(self, text: str) -> float:
        return 0.22 + self._width(text, 9) + 0.22

    def _legend(self, items: list[tuple[str, str]], members_by_line: list[list[int]], top: float) -> None:
        for number, members in enumerate(members_by_line):
            widths = [self._legend_width(items[member][0]) for member in members]
            x = max(_MARGIN, (WIDTH - sum(widths)) / 2)
            y = top + _LINE * (number + 0.5)
            for member, width in zip(members, widths, strict=True):
                text, key = items[member]
                if key in COLOURS:
                    self._box(x, y - 0.055, 0.15, 0.11, COLOURS[key])
                else:
                    colour = TEXT if key == "allocated" else QUIET
                    self._line([x, x + 0.14], [y, y], color=colour, linewidth=0.9)
                    self._line([x + 0.14] * 2, [y - 0.055, y + 0.055], color=colour, linewidth=1.6)
                self._text(x + 0.22, y, text, size=9)
                x += width

    def _sentences(self) -> list[tuple[str, str]]:
        """The words below the picture, broken into lines, with their colours: the verdict first, in red."""
        verdict = explain.verdict(self.report)
        quiet = [*explain.remarks(self.report), *explain.other_devices(self.report)]
        if self._mixed:
            quiet.append("* reserved by PyTorch: nvidia-smi's figure was not available there.")
        result = [(line, ALARM) for line in self._wrapped(verdict or "")]
        return result + [(line, QUIET) for sentence in quiet for line in self._wrapped(sentence)]

    def _wrapped(self, sentence: str) -> list[str]:
        """In lines that fit: first by the width of usual words, then by measuring what came out."""
        available = WIDTH - 2 * _MARGIN
        characters = int(available / (0.545 * _SIZE / 72))
        while any(self._width(line, _SIZE) > available for line in wrap(sentence, characters)) and characters > 20:
            characters = int(characters * 0.94)
        return wrap(sentence, characters)


def canvas() -> tuple[Figure, Any]:
    """A figure of one inch's height, which grows when the rows are known, and axes in inches that fill it."""
    figure = ReportFigure(figsize=(WIDTH, 1), dpi=100, facecolor=PAPER, edgecolor=PAPER)
    axes = figure.add_axes((0, 0, 1, 1), frameon=False)
    axes.set_xlim(0, WIDTH)
    axes.set_axis_off()
    return figure, axes


def _extent(row: Row) -> int:
    """How far to the right a row reaches, marks included, in bytes."""
    total = sum(max(0, size or 0) for size in row.categories.values())
    return max(total + max(0, row.peak_reserved - row.reserved), row.peak_allocated, used(row))


def _suffix(line: Line, report: ReportData) -> str:
    return f"  {explain.failure_word(report)}" if line.row.kind == "error" and line.depth == 0 else ""


def _label_columns(line: Line, report: ReportData) -> int:
    indent = 2 * line.depth + (columns(line.iteration) + 1 if line.iteration else 0)
    return indent + columns(line.text) + len(_suffix(line, report))


def _fonts(report: ReportData) -> tuple[list[str], list[str]]:
    """The mono and the sans family, each with a fallback for wide letters where the report has some and a font is there."""
    mono, sans = list(_MONO), list(_SANS)
    text = "".join([*(line.text for line in lines(report)), *report.notes, report.peak.where])
    if columns(text) > len(text):
        installed = {entry.name for entry in font_manager.fontManager.ttflist}
        fallback = next((name for name in _EAST_ASIAN if name in installed), None)
        if fallback:
            mono.append(fallback)
            sans.append(fallback)
    return mono, sans
