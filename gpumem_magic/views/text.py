"""The report for a terminal: one line a row, then the categories, then the sentences. Works without colour."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence

from gpumem_magic.report.model import CATEGORIES, LABELS, ReportData, Row
from gpumem_magic.views import explain
from gpumem_magic.views.inside import inside_lines
from gpumem_magic.views.lines import PEAK, Line, SizeFormat, columns, fit, lines, present, wrap
from gpumem_magic.views.palette import ASCII_LETTERS, LETTERS

DEFAULT_WIDTH = 100
_NARROWEST, _WIDEST = 60, 160
_HEADS = ("allocated", "reserved", "nvidia-smi", "change", "peak")
_SMI = _HEADS.index("nvidia-smi")
MARK = "|"
_MOVES = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_GAP = 2


def render(
    report: ReportData, *, width: int | None = None, ascii_only: bool = False, bars: bool = True, table: bool = True
) -> str:
    """The report as text, without an end of line at its end.

    width: columns; by default the terminal's, or 100 where there is none. ascii_only: for terminals that show nothing else.
    bars: a stacked bar in each line. table: the categories before, at the peak and after.
    """
    if width is None:
        width = shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns
    width = min(max(width, _NARROWEST), _WIDEST)
    blocks = [_wrap(explain.headline(report), width), _rows(report, width, ascii_only, bars)]
    if table:
        blocks.append(_categories(report, width))
        blocks.append("\n".join(_fitting(line, width) for line in inside_lines(report.inside)))
    words = explain.remarks(report)
    if sentence := explain.evidence(report):
        words.append(sentence)
    if verdict := explain.verdict(report):
        words.insert(0, verdict)
    blocks.append("\n".join(_wrap(sentence, width) for sentence in words))
    blocks += [render(other, width=width, ascii_only=ascii_only, bars=bars, table=table) for other in report.devices]
    # A report may come from anybody's file: its texts must not move the cursor, change colours or turn the direction of writing.
    text = _MOVES.sub("\ufffd", "\n\n".join(block for block in blocks if block))
    return _to_ascii(text) if ascii_only else text


def _to_ascii(text: str) -> str:
    return text.replace("…", "~").encode("ascii", "replace").decode()


def _wrap(sentence: str, width: int) -> str:
    return "\n".join(wrap(sentence, width, indent="  "))


def _fitting(line: str, width: int) -> str:
    """A line of a tree is cut where it is too long, as its place in the tree is its beginning; a sentence is wrapped."""
    return fit(line, width) if line.startswith(" ") else _wrap(line, width)


def _pad(text: str, width: int) -> str:
    text = fit(text, width)
    return text + " " * (width - columns(text))


def _rows(report: ReportData, width: int, ascii_only: bool, bars: bool) -> str:
    shown = lines(report)
    figures = SizeFormat(report)
    # A column of nothing but "n/a" would only take room from the rest; a sentence below says it.
    places = [place for place, _ in enumerate(_HEADS) if place != _SMI or any(line.row.device_used for line in shown)]
    heads = [_HEADS[place] for place in places]
    table = [[_cells(line, figures)[place] for place in places] for line in shown]
    widths = [max(len(head), *(len(cells[place]) for cells in table)) for place, head in enumerate(heads)]
    left = width - sum(widths) - _GAP * len(widths)
    needed = max(columns(_name(line, report, width)) for line in shown)
    bar_width = 0
    if bars:
        # Names have the first claim on the room up to 32 columns, then the bar up to 40.
        bar_width = min(40, left - min(needed, 32) - _GAP)
        bar_width = bar_width if bar_width >= 10 else 0
    name_width = min(max(needed, len("MiB")), left - (bar_width + _GAP if bar_width else 0))
    scale = max((max(line.used, line.row.peak_allocated) for line in shown), default=0)
    letters = ASCII_LETTERS if ascii_only else LETTERS
    drawn: list[str] = []
    output = [_join(_pad("MiB", name_width), heads, widths)]
    for line, cells in zip(shown, table, strict=True):
        text = _join(_pad(_name(line, report, name_width), name_width), cells, widths)
        if bar_width:
            drawn.append(bar(line.row, scale, bar_width, letters))
            text += " " * _GAP + drawn[-1]
        output.append(text.rstrip())
    if bars and not bar_width:
        # No room beside the figures: the bars get lines of their own.
        name_width = min(needed, 32, width // 2)
        drawn = [bar(line.row, scale, width - name_width - _GAP, letters) for line in shown]
        names = [_pad(_name(line, report, name_width), name_width) for line in shown]
        output += ["", *((name + " " * _GAP + cells).rstrip() for name, cells in zip(names, drawn, strict=True))]
    seen = {letter for cells in drawn for letter in cells}
    key = [f"{letters[name]} {LABELS[name]}" for name in present(report) if letters[name] in seen]
    if MARK in seen:
        key.append(f"{MARK} highest allocated inside the statement")
    if key:
        # A line never ends between a letter and its meaning.
        whole = [entry.replace(" ", "\0") for entry in key]
        output += ["", _wrap(f"Bars: {'; '.join(whole)}.", width).replace("\0", " ")]
    return "\n".join(output)


def _join(name: str, cells: Sequence[str], widths: Sequence[int]) -> str:
    return (" " * _GAP).join([name, *(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))])


def _name(line: Line, report: ReportData, width: int) -> str:
    failed = line.row.kind == "error"
    iteration = f"{line.iteration} " if line.iteration else ""
    name = f"{'  ' * line.depth}{'! ' if failed else ''}{iteration}{line.text}"
    word = f"  {explain.failure_word(report)}" if failed and not line.depth else ""
    # The verdict below says it too, so the word yields to the statement.
    return name + word if columns(name + word) <= width else name


def _cells(line: Line, figures: SizeFormat) -> list[str]:
    row = line.row
    inside = row.peak_allocated if row.kind != PEAK and row.peak_allocated > row.allocated else None
    return [
        figures.size(row.allocated),
        figures.size(row.reserved),
        figures.size(row.device_used),
        figures.change(line.change),
        "" if inside is None else figures.size(inside),
    ]


def bar(row: Row, scale: int, width: int, letters: Mapping[str, str]) -> str:
    """A stacked bar of letters: `scale` bytes fill `width` columns; `|` stands at the highest allocated inside the row."""
    if scale <= 0:
        return ""
    cells: list[str] = []
    total = 0
    for name in CATEGORIES:
        total += max(0, row.categories.get(name) or 0)
        cells += [letters[name]] * (min(width, round(width * total / scale)) - len(cells))
    place = min(width - 1, round(width * row.peak_allocated / scale))
    if row.kind != PEAK and place > round(width * row.allocated / scale):
        cells += [" "] * (place + 1 - len(cells))
        cells[place] = MARK
    return "".join(cells)


def _categories(report: ReportData, width: int) -> str:
    """Before, peak and after of every category that has bytes, with the change from before to after."""
    before = next((row for row in report.checkpoints if row.kind == "before"), None)
    after = report.checkpoints[-1] if report.checkpoints else None
    states = (before, report.peak, after)
    names = [name for name in CATEGORIES if any(state and state.categories.get(name) for state in states)]
    if not names:
        return ""
    figures = SizeFormat(report)
    table = []
    for name in names:
        sizes = [state.categories.get(name) if state else None for state in states]
        moved = None if sizes[0] is None or sizes[2] is None else sizes[2] - sizes[0]
        table.append([LABELS[name], *(figures.size(size) for size in sizes), figures.change(moved)])
    rows = [["category (MiB)", "before", "peak", "after", "change"], *table]
    widths = [max(columns(row[place]) for row in rows) for place in range(5)]
    return "\n".join(
        (" " * _GAP).join([_pad(row[0], widths[0]), *(row[place].rjust(widths[place]) for place in range(1, 5))])
        for row in rows
    )
