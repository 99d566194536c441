"""What every face of a report shows, line by line: rows and their parts in order, with the change from the line before.

Here, and only here, is decided which rows are shown, what a row is called and how long its bar is.
"""

from __future__ import annotations

import re
import shutil
import unicodedata
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from gpumem_magic.report.model import CATEGORIES, ReportData, Row
from gpumem_magic.report.rows import (
    ALIKE,
    MOST,
    REST,
    ROW,
    STILL,
    TURN,
    Entry,
    function_of,
    opened,
    shows_statement,
    telling_parts,
)
from gpumem_magic.units import MIB, amount, counted

_USUAL, _NARROWEST, _WIDEST = 100, 60, 160
_LEAST_CELL = 12
PEAK = "peak"  # the kind of the line that shows the report's peak; no row of the schema has it
ELLIPSIS = "…"
MARKED = "the peak within the row"  # what the mark beside a bar says
_FORWARD = re.compile(r"forward((?: of .*)?) \d+", re.DOTALL)  # one of several in a row
_NUMBERED = re.compile(r"(.*) \(\d+\)", re.DOTALL)  # the second and further calls of one kind in a statement
_NAMED = 2  # of parts that share a line, so many by name
_TOLD = 100  # what the turns of a loop keep is said from one part in so many of the peak


@dataclass(frozen=True)
class Line:
    """A row as it is shown. depth: 0 for statements, more for parts. before: the row that `change` is measured from.

    change: what nvidia-smi would show more than before, in bytes (of reserved, where one of the two has no figure of the
    device); None where there is nothing to measure from. entry: what the line stands for, where rows are folded.
    """

    row: Row
    depth: int
    before: Row | None
    change: int | None
    entry: Entry | None = None

    @property
    def is_folded(self) -> bool:
        """Several rows as one line, or turns of a loop that have no rows."""
        return self.entry is not None and self.entry.kind != ROW

    @property
    def is_still(self) -> bool:
        """Statements in which nothing moved that a bar could show."""
        return self.entry is not None and self.entry.kind == STILL

    @property
    def grown(self) -> int | None:
        """The allocated bytes more than before; None where there is nothing to measure from."""
        return None if self.before is None else self.row.allocated - self.before.allocated

    @property
    def peak_inside(self) -> int | None:
        """The highest allocated bytes inside it, where that is more than before it and after it."""
        around = self.row.allocated if self.before is None else max(self.row.allocated, self.before.allocated)
        return self.row.peak_allocated if self.row.kind != PEAK and self.row.peak_allocated > around else None

    @property
    def iteration(self) -> str:
        """``2:`` or, in nested loops, ``1.3:``, or ``1.3-1.9:``; empty outside loops and for parts, whose line above says it."""
        entry = self.entry
        if entry is not None and self.is_folded and entry.turns and not entry.in_call:
            return f"{numbers_of(entry)}:"
        if self.row.kind == "part" or self.depth or not self.row.iteration:
            return ""
        return ".".join(str(number) for number in self.row.iteration) + ":"

    @property
    def text(self) -> str:
        """The statement's first line as it was written, after the name of a function that was opened; the label of a row that
        is no statement; or what was folded, in words."""
        if self.entry is not None and self.is_folded:
            return words_of(self.entry)
        label, statement = self.row.label, self.row.statement.strip()
        if self.row.kind not in ("statement", "error") or not statement:
            return first_line(label) or self.row.kind
        return f"{function_of(self.row)}{first_line(statement)}"

    @property
    def is_statement(self) -> bool:
        return self.row.kind in ("statement", "error", "part") and not self.is_folded

    @property
    def moved_nothing(self) -> bool:
        """A statement in which no byte moved: a ``print``, for example."""
        row, before = self.row, self.before
        return (
            row.kind == "statement"
            and before is not None
            and row.categories == before.categories
            and (row.peak_allocated, row.peak_reserved) == (row.allocated, row.reserved)
        )

    @property
    def used(self) -> int:
        """What nvidia-smi would show, or what PyTorch reserved where that is not known. Bytes."""
        return used(self.row)


def words_of(entry: Entry) -> str:
    """``as 2``, ``lines 3-9: no change``: what stands in place of the rows that are folded."""
    if entry.kind == STILL:
        return f"{_lines_of(entry)}: {little(entry)}"
    if not entry.turns:
        is_of_lines = shows_statement(entry.rows[0])
        return f"{_lines_of(entry)} ({len(entry.rows)} statements)" if is_of_lines else _parts_of(entry)
    words = turns_in_words(entry)
    if not entry.in_call:
        return words
    named = _NUMBERED.fullmatch(entry.row.label)
    stem = named[1] if named else "iteration" if entry.turns == 1 else "iterations"
    if (counted_one := _FORWARD.fullmatch(entry.row.label)) is not None:
        stem = f"forward{'' if entry.turns == 1 else 's'}{counted_one[1]}"
    return f"{stem} {numbers_of(entry)}: {words}"


def turns_in_words(entry: Entry) -> str:
    """``7 statements``, ``56 iterations``, ``as 2, each +64.0 MiB``: what turns of a loop did, without their numbers."""
    if entry.kind == TURN:
        return counted(len(entry.rows), "statement")
    if entry.kind not in (ALIKE, REST) or (entry.kind == REST and entry.like is None):
        return counted(entry.turns, "iteration")
    # The first of alike turns may have had to fill what the others find.
    others = entry.inner[-1] if entry.kind == ALIKE and entry.inner and entry.inner[-1].kind == REST else entry
    grown = round((others.change or 0) / others.turns)
    each = "each " if entry.turns > 1 else ""
    is_told = abs(others.change or 0) * _TOLD >= entry.row.peak_allocated > 0
    more = f", {each}{'+' if grown > 0 else '-'}{amount(abs(grown))}" if is_told else ""
    return f"as {_outer(entry)}{entry.like:,}{more}" if entry.like is not None else f"alike{more}"


def numbers_of(entry: Entry) -> str:
    """Which turns of a loop it stands for: ``3``, ``3-9`` or, in nested loops, ``1.3-1.9``."""
    outer = _outer(entry)
    return "-".join(f"{outer}{number:,}" for number in dict.fromkeys((entry.first, entry.last)))


def _outer(entry: Entry) -> str:
    return "".join(f"{number}." for number in entry.outer)


def _lines_of(entry: Entry) -> str:
    numbers = [row.line for row in entry.rows]
    first, last = min(numbers), max(numbers)
    function = function_of(entry.rows[0])
    return f"{function}line {first}" if first == last else f"{function}lines {first}-{last}"


def _parts_of(entry: Entry) -> str:
    names = [*dict.fromkeys(first_line(row.label) for row in entry.rows)]
    others = " and others" if len(names) > _NAMED else ""
    return f"{counted(len(entry.rows), 'part')}: {', '.join(names[:_NAMED])}{others}"


def little(entry: Entry) -> str:
    """What moved in statements in which nothing did that a bar could show."""
    return f"changes of at most {amount(entry.moved)}" if entry.moved else "no change"


def used(row: Row) -> int:
    return row.reserved if row.device_used is None else row.device_used


def change_between(before: Row | None, row: Row) -> int | None:
    """The change of `device_used`, or of `reserved` where either has no `device_used`. Bytes."""
    if before is None:
        return None
    if before.device_used is None or row.device_used is None:
        return row.reserved - before.reserved
    return row.device_used - before.device_used


def peak_row(report: ReportData) -> Row:
    """The report's peak as a row, to be drawn and tabulated like the others."""
    peak = report.peak
    # (Beside the statements of a table it needs no sign that it is one.)
    where = f": {peak.where}".replace("`", "") if peak.where else ""
    return Row(
        kind=PEAK,
        label=f"peak{where}",
        statement="",
        line=0,
        iteration=(),
        parts=(),
        allocated=peak.allocated,
        reserved=peak.reserved,
        device_used=peak.device_used,
        peak_allocated=peak.allocated,
        peak_reserved=peak.reserved,
        categories=peak.categories,
    )


def lines(report: ReportData, *, parts: bool = True, peak: bool = True) -> list[Line]:
    """Before, the statements (with their parts), the peak, and after: every row, nothing folded."""
    shown: list[Line] = []
    before: Row | None = None
    after: list[Line] = []
    for row in report.checkpoints:
        line = Line(row, 0, before, change_between(before, row))
        if row.kind == "after":
            after.append(line)
            # Without rows for statements it is this row that has what happened, and all of it came before.
            if parts:
                _add_parts(shown, row, before, 0)
        else:
            shown.append(line)
            if parts:
                _add_parts(shown, row, before, 1)
        before = row
    return [*shown, *([Line(peak_row(report), 0, None, None)] if peak else []), *after]


def shown_lines(report: ReportData, most: int | None = MOST) -> list[Line]:
    """What a face shows that cannot be opened: about so many lines, or every row, with the peak under what holds it."""
    found = (
        lines(report, peak=False)
        if most is None
        else [
            Line(entry.row, depth, entry.before, change_between(entry.before, entry.row), entry)
            for entry, depth in opened(report, most)
        ]
    )
    place = peak_place(found)
    if place is None or found[place].row.categories == report.peak.categories:
        return found
    holder = found[place]
    row = peak_row(report) if holder.is_folded else replace(peak_row(report), label="at the peak")
    return [*found[: place + 1], Line(row, holder.depth + 1, holder.before, None), *found[place + 1 :]]


def peak_place(found: Sequence[Line]) -> int | None:
    """Which line holds the peak: the first, and of the lines inside it the first that does, and so on."""
    highest = max((line.row.peak_allocated for line in found), default=0)
    chosen: int | None = None
    for place, line in enumerate(found):
        if chosen is not None and line.depth <= found[chosen].depth:
            break
        if line.row.peak_allocated >= highest > 0:
            chosen = place
    return chosen


def _add_parts(shown: list[Line], row: Row, before: Row | None, depth: int) -> None:
    for part in telling_parts(row):
        shown.append(Line(part, depth, before, change_between(before, part)))
        _add_parts(shown, part, before, depth + 1)
        before = part


def first_line(text: str) -> str:
    """The first line of a statement; `…` says that there is more. Tabs and control characters become spaces."""
    stripped = text.strip()
    head, newline, _ = stripped.partition("\n")
    clean = "".join(" " if unicodedata.category(character) == "Cc" else character for character in head).rstrip()
    return f"{clean} {ELLIPSIS}" if newline else clean


def columns(text: str) -> int:
    """How many columns a terminal (or a monospaced font) needs for the text."""
    return len(text) if text.isascii() else sum(_columns(character) for character in text)


def _columns(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def fit(text: str, width: int) -> str:
    """The text, cut to `width` columns with `…` at its end where it is longer."""
    if columns(text) <= width:
        return text
    shown, left = "", width - 1
    for character in text:
        left -= _columns(character)
        if left < 0:
            break
        shown += character
    return shown + ELLIPSIS if width > 0 else ""


def wrap(text: str, width: int, indent: str = "") -> list[str]:
    """The text in lines of at most `width` columns, broken at spaces; `indent` begins every line but the first.

    textwrap would count a wide character as one column. A word that is wider than a line is cut.
    """
    result: list[str] = []
    for word in text.split():
        if result and columns(result[-1]) + 1 + columns(word) <= width:
            result[-1] += f" {word}"
        else:
            start = indent if result else ""
            result.append(start + fit(word, width - len(start)))
    return result


def table(rows: Sequence[Sequence[str]], figures: Container[int] | None = None, width: int | None = None) -> str:
    """Columns two blanks apart. figures: the numbers of those that go to the right; by default all but the first.

    width: of all, where the cells of the others are wrapped as far as that needs.
    """
    widths = [max(map(columns, column)) for column in zip(*rows, strict=True)]
    right = [place for place in range(len(widths)) if place in (range(1, len(widths)) if figures is None else figures)]
    wrapped = {place: widths[place] for place in range(len(widths)) if place not in right}
    while width is not None and wrapped and sum(widths) + 2 * (len(widths) - 1) > width:
        widest = max(wrapped, key=lambda place: widths[place])
        if widths[widest] <= _LEAST_CELL:
            break
        widths[widest] -= 1
    lines = []
    for row in rows:
        cells = [
            wrap(cell, size, " ") if columns(cell) > size else [cell] for cell, size in zip(row, widths, strict=True)
        ]
        for line in zip_longest(*cells, fillvalue=""):
            padded = [
                blank + cell if place in right else cell + blank
                for place, (cell, size) in enumerate(zip(line, widths, strict=True))
                for blank in [" " * (size - columns(cell))]
            ]
            lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def text_width(width: int | None = None) -> int:
    """The columns of a text: so many, or as a terminal has, neither too few nor too many."""
    if width is None:
        width = shutil.get_terminal_size((_USUAL, 24)).columns
    return min(max(width, _NARROWEST), _WIDEST)


def present(report: ReportData) -> list[str]:
    """The categories that have bytes in a row, a part or the peak, in the order of a bar."""
    rows = [line.row for line in lines(report)]
    return [name for name in CATEGORIES if any(row.categories.get(name) for row in rows)]


class SizeFormat:
    """Bytes to the MiB of a table: whole ones, or with one decimal where the whole report is small."""

    def __init__(self, report: ReportData) -> None:
        largest = max((max(used(row), row.peak_allocated) for row in report.checkpoints), default=0)
        self._decimals = 1 if largest < 100 * MIB else 0

    def size(self, size: int | None) -> str:
        """``16,068``; ``n/a`` for None; ``<1`` for what is there but would read as nothing."""
        if size is None:
            return "n/a"
        return self._small(size) or f"{size / MIB:,.{self._decimals}f}"

    def change(self, size: int | None) -> str:
        """``+6,308``; nothing where there is nothing to compare with."""
        if size is None:
            return ""
        if not size:
            return "0"
        return self._small(size, "+") or f"{size / MIB:+,.{self._decimals}f}"

    def _small(self, size: int, plus: str = "") -> str:
        unit = 0.1 if self._decimals else 1
        # (Half of it would be rounded to 0, which is even.)
        if size and abs(size) <= unit * MIB / 2:
            return f"{'-' if size < 0 else plus}<{unit:g}"
        return ""
