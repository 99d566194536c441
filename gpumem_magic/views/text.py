"""The report for a terminal: one line a row, then the categories, then the sentences. Works without colour."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from gpumem_magic.report.model import ALLOCATED_CATEGORIES, CATEGORIES, LABELS, ReportData
from gpumem_magic.report.ranks import Ranks
from gpumem_magic.report.rows import MOST
from gpumem_magic.views import explain, ranks, what_failed
from gpumem_magic.views.inside import inside_lines
from gpumem_magic.views.lines import MARKED, PEAK, Line, SizeFormat, columns, fit, lines, shown_lines, text_width, wrap
from gpumem_magic.views.palette import ASCII_LETTERS, LETTERS
from gpumem_magic.views.story import TENSOR_HEADS, more, story_of, tensor_heading, tensor_table

_HEADS = ("allocated", "change", "peak")
MARK = "|"
_MOVES = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_GAP = 2
_LEAST_WORDS = 20  # columns that a cell of words keeps, if it can


def render(
    report: ReportData,
    *,
    width: int | None = None,
    ascii_only: bool = False,
    bars: bool = True,
    table: bool = True,
    most: int | None = MOST,
    folds: bool = True,
    page: str = "",
    name: str = "report",
) -> str:
    """The report as text, without an end of line at its end: the answer, the rows, the tensors at the peak, what else to know.

    width: columns; by default the terminal's, or 100 where there is none. ascii_only: for terminals that show nothing else.
    bars: a stacked bar in each line. table: the tensors. most: about how many rows are shown, None for all. folds: whether some
    sentences are left to who asks for more. page: what has more, for a reader in no Python. name: as in `more`.
    """
    width = text_width(width)
    told = story_of(report)
    blocks = [] if report.ranks is None else _ranks(report.ranks, width)
    blocks.append(_wrap(told.answer, width))
    if explain.used_device(report):
        blocks[-1] += f"\n{_wrap(told.obstacle, width)}" if told.obstacle else ""
        shown = shown_lines(report, most)
        blocks.append(_rows(report, shown, width, ascii_only, bars))
        blocks.append(_wrap(explain.gauge(report), width))
        if table:
            blocks.append(_tensors(report, width))
    blocks.append("\n".join(_wrap(one, width) for one in (*told.others, *(() if folds else told.folded))))
    if explain.used_device(report):
        hidden = len(lines(report, peak=False)) - sum(line.row.kind != PEAK for line in shown)
        blocks.append(_wrap(more(told.folded if folds else (), max(0, hidden), page, name), width))
    blocks += [
        render(
            other,
            width=width,
            ascii_only=ascii_only,
            bars=bars,
            table=table,
            most=most,
            folds=folds,
            page=page,
            name=f"{name or 'report'}.devices[{place}]",
        )
        for place, other in enumerate(report.devices)
    ]
    return _cleaned(blocks, ascii_only)


def _ranks(found: Ranks, width: int) -> list[str]:
    """All ranks' answer, their table, what differs, and whose report follows."""
    rows = ranks.table(found)
    widths = [max(columns(row[place]) for row in rows) for place in range(len(rows[0]))]
    words = len(rows[0]) - 1
    widths[words] = max(_LEAST_WORDS, min(widths[words], width - sum(widths[:words]) - _GAP * words))
    lines = [
        (" " * _GAP)
        .join(
            _pad(cell, size) if place in (0, words) or not (cell[:1].isdigit() or row is rows[0]) else cell.rjust(size)
            for place, (cell, size) in enumerate(zip(row, widths, strict=True))
        )
        .rstrip()
        for row in rows
    ]
    said = [_wrap(sentence, width) for sentence in ranks.sentences(found)]
    return [_wrap(found.answer, width), "\n".join(lines), "\n".join(said), ranks.heading(found)]


def in_full(report: ReportData, *, width: int | None = None, ascii_only: bool = False) -> str:
    """What a report says besides its rows: everything that is folded in it, categories, modules, how the bytes are known."""
    width = text_width(width)
    words = [verdict] if (verdict := what_failed.verdict(report)) else []
    words += explain.remarks(report)
    words += [sentence] if (sentence := explain.evidence(report)) else []
    blocks = [
        _wrap(explain.answer(report), width),
        _wrap(explain.headline(report), width),
        "\n".join(_wrap(sentence, width) for sentence in words),
        _categories(report),
        "\n".join(_fitting(line, width) for line in inside_lines(report.inside)),
        *(in_full(other, width=width, ascii_only=ascii_only) for other in report.devices),
    ]
    return _cleaned(blocks, ascii_only)


def _cleaned(blocks: Sequence[str], ascii_only: bool) -> str:
    # A report may come from anybody's file: its texts must not move the cursor, change colours or turn the direction of writing.
    text = _MOVES.sub("\ufffd", "\n\n".join(block for block in blocks if block))
    return _to_ascii(text) if ascii_only else text


def _to_ascii(text: str) -> str:
    return text.replace("…", "~").replace("×", "x").encode("ascii", "replace").decode()


def _wrap(sentence: str, width: int) -> str:
    return "\n".join(wrap(sentence, width, indent="  "))


def _fitting(line: str, width: int) -> str:
    """A line of a tree is cut where it is too long, as its place in the tree is its beginning; a sentence is wrapped."""
    return fit(line, width) if line.startswith(" ") else _wrap(line, width)


def _pad(text: str, width: int) -> str:
    text = fit(text, width)
    return text + " " * (width - columns(text))


def _rows(report: ReportData, shown: Sequence[Line], width: int, ascii_only: bool, bars: bool) -> str:
    figures = SizeFormat(report)
    table = [_cells(line, figures) for line in shown]
    widths = [max([len(head), *(len(cells[place]) for cells in table)]) for place, head in enumerate(_HEADS)]
    left = width - sum(widths) - _GAP * len(widths)
    # What is folded has words in place of figures, and the room of both.
    needed = max((columns(_name(line, report, width)) for line in shown if not line.is_still), default=0)
    bar_width = 0
    if bars:
        # Names have the first claim on the room up to 40 columns, then the bar up to 40.
        bar_width = min(40, left - min(needed, 40) - _GAP)
        bar_width = max(bar_width, min(24, left - min(needed, 28) - _GAP))
        bar_width = bar_width if bar_width >= 10 else 0
    name_width = min(max(needed, len("MiB")), left - (bar_width + _GAP if bar_width else 0))
    scale = max((line.row.peak_allocated for line in shown), default=0)
    letters = ASCII_LETTERS if ascii_only else LETTERS
    drawn: list[str] = []
    output = [_join(_pad("MiB", name_width), _HEADS, widths)]
    for line, cells in zip(shown, table, strict=True):
        if line.is_still:
            output.append(fit(_name(line, report, width), width))
            continue
        text = _join(_pad(_name(line, report, name_width), name_width), cells, widths)
        if bar_width:
            drawn.append(bar(line, scale, bar_width, letters))
            text += " " * _GAP + drawn[-1]
        output.append(text.rstrip())
    if bars and not bar_width:
        # No room beside the figures: the bars get lines of their own.
        name_width = min(needed, 32, width // 2)
        lively = [line for line in shown if not line.is_still]
        drawn = [bar(line, scale, width - name_width - _GAP, letters) for line in lively]
        names = [_pad(_name(line, report, name_width), name_width) for line in lively]
        output += ["", *((name + " " * _GAP + cells).rstrip() for name, cells in zip(names, drawn, strict=True))]
    seen = {letter for cells in drawn for letter in cells}
    key = [f"{letters[name]} {LABELS[name]}" for name in ALLOCATED_CATEGORIES if letters[name] in seen]
    if MARK in seen:
        key.append(f"{MARK} {MARKED}")
    if key:
        # A line never ends between a letter and its meaning.
        whole = [entry.replace(" ", "\0") for entry in key]
        output += ["", _wrap(f"Bars: {'; '.join(whole)}.", width).replace("\0", " ")]
    return "\n".join(output)


def _tensors(report: ReportData, width: int) -> str:
    """The largest groups of tensors at the peak, or at the failure, as a table that fits."""
    rows = tensor_table(report)
    if not rows:
        return ""
    heads = list(TENSOR_HEADS)
    heads[1] = f"{tensor_heading(report).lower()}"
    table = [heads, *rows]
    table = [[cell for place, cell in enumerate(row) if any(one[place] for one in rows)] for row in table]
    widths = [max(columns(row[place]) for row in table) for place in range(len(table[0]))]
    # What the tensors are is cut last.
    for least in (_LEAST_WORDS, 1):
        for place in (*range(len(widths) - 1, 1, -1), 1):
            over = sum(widths) + _GAP * (len(widths) - 1) - width
            widths[place] = max(min(widths[place], least), widths[place] - max(over, 0))
    return "\n".join(
        (" " * _GAP)
        .join([row[0].rjust(widths[0]), *(_pad(cell, size) for cell, size in zip(row[1:], widths[1:], strict=True))])
        .rstrip()
        for row in table
    )


def _join(name: str, cells: Sequence[str], widths: Sequence[int]) -> str:
    return (" " * _GAP).join([name, *(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))])


def _name(line: Line, report: ReportData, width: int) -> str:
    failed = line.row.kind == "error"
    iteration = f"{line.iteration} " if line.iteration else ""
    name = f"{'  ' * line.depth}{'! ' if failed else ''}{iteration}{line.text}"
    word = f"  {what_failed.failure_word(report)}" if failed and not line.depth else ""
    # The verdict below says it too, so the word yields to the statement.
    return name + word if columns(name + word) <= width else name


def _cells(line: Line, figures: SizeFormat) -> list[str]:
    allocated = figures.size(line.row.allocated)
    inside = "" if line.peak_inside is None else figures.size(line.peak_inside)
    return [
        allocated,
        "" if line.row.kind == PEAK else figures.change(line.grown),
        "" if inside == allocated else inside,
    ]


def bar(line: Line, scale: int, width: int, letters: Mapping[str, str]) -> str:
    """A stacked bar of what is allocated: `scale` bytes fill `width` columns; `|` stands at the highest inside the row."""
    if scale <= 0:
        return ""
    sizes = [(letters[name], max(0, line.row.categories.get(name) or 0)) for name in ALLOCATED_CATEGORIES]
    count = min(width, round(width * sum(size for _, size in sizes) / scale))
    cells = [_most_of(sizes, scale * number // width, scale * (number + 1) // width) for number in range(count)]
    if line.peak_inside is not None:
        place = min(width - 1, round(width * line.peak_inside / scale))
        if place > round(width * line.row.allocated / scale):
            cells += [" "] * (place + 1 - len(cells))
            cells[place] = MARK
    return "".join(cells)


def _most_of(sizes: Sequence[tuple[str, int]], begin: int, end: int) -> str:
    """Who has most of the bytes from `begin` to `end`, where all lie one behind another."""
    most, found, start = 0, "", 0
    for letter, size in sizes:
        here = min(start + size, end) - max(start, begin)
        if here > most:
            most, found = here, letter
        start += size
    return found


def _categories(report: ReportData) -> str:
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
