"""What every face of a report shows, line by line: rows and their parts in order, with the change from the line before.

Here, and only here, is decided which rows are shown, what a row is called and how long its bar is.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Container, Sequence
from dataclasses import dataclass

from gpumem_magic.report.model import CATEGORIES, ReportData, Row
from gpumem_magic.units import MIB

PEAK = "peak"  # the kind of the line that shows the report's peak; no row of the schema has it
PHASES = ("forward", "backward", "optimizer")  # the first word of a phase's label
ELLIPSIS = "…"


@dataclass(frozen=True)
class Line:
    """A row as it is shown. depth: 0 for statements, more for parts. before: the row that `change` is measured from.

    change: what nvidia-smi would show more than before, in bytes (of reserved, where one of the two has no figure of the
    device); None where there is nothing to measure from.
    """

    row: Row
    depth: int
    before: Row | None
    change: int | None

    @property
    def iteration(self) -> str:
        """``2:`` or, in nested loops, ``1.3:``; empty outside loops and for parts, whose line above says it."""
        if self.row.kind == "part" or self.depth or not self.row.iteration:
            return ""
        return ".".join(str(number) for number in self.row.iteration) + ":"

    @property
    def text(self) -> str:
        """The statement's first line as it was written, or the label of a row that is no statement."""
        if self.row.kind in ("statement", "error") and self.row.statement.strip():
            return first_line(self.row.statement)
        return first_line(self.row.label) or self.row.kind

    @property
    def is_statement(self) -> bool:
        return self.row.kind in ("statement", "error", "part")

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
    where = f": {peak.where}" if peak.where else ""
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


def lines(report: ReportData, *, parts: bool = True) -> list[Line]:
    """Before, the statements (with their parts), the peak, and after."""
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
    return [*shown, Line(peak_row(report), 0, None, None), *after]


def _add_parts(shown: list[Line], row: Row, before: Row | None, depth: int) -> None:
    for part in telling_parts(row):
        shown.append(Line(part, depth, before, change_between(before, part)))
        _add_parts(shown, part, before, depth + 1)
        before = part


def telling_parts(row: Row) -> tuple[Row, ...]:
    """The parts that say more than their row: a lone forward inside ``output = model(input)`` does not.

    Marks and ranges are shown in any case: the user asked for them by name.
    """
    if len(row.parts) == 1 and row.kind != "error":
        only = row.parts[0]
        if only.label.partition(" ")[0] in PHASES and not telling_parts(only):
            return ()
    return row.parts


def first_line(text: str) -> str:
    """The first line of a statement; `…` says that there is more. Tabs and control characters become spaces."""
    stripped = text.strip()
    head, newline, _ = stripped.partition("\n")
    clean = "".join(" " if unicodedata.category(character) == "Cc" else character for character in head).rstrip()
    return f"{clean} {ELLIPSIS}" if newline else clean


def columns(text: str) -> int:
    """How many columns a terminal (or a monospaced font) needs for the text."""
    return sum(_columns(character) for character in text)


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


def table(rows: Sequence[Sequence[str]], figures: Container[int] | None = None) -> str:
    """Columns two blanks apart. figures: the numbers of those that go to the right; by default all but the first."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = range(1, len(widths)) if figures is None else figures
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def present(report: ReportData) -> list[str]:
    """The categories that have bytes in a row, a part or the peak, in the order of a bar."""
    rows = [line.row for line in lines(report)]
    return [name for name in CATEGORIES if any(row.categories.get(name) for row in rows)]


class SizeFormat:
    """Bytes to the MiB of a table: whole ones, or with one decimal where the whole report is small."""

    def __init__(self, report: ReportData) -> None:
        largest = max((line.used for line in lines(report, parts=False)), default=0)
        self._decimals = 1 if largest < 100 * MIB else 0

    def size(self, size: int | None) -> str:
        """``16,068``; ``n/a`` for None; ``<1`` for what is there but would read as nothing."""
        if size is None:
            return "n/a"
        return self._small(size) or f"{size / MIB:,.{self._decimals}f}"

    def change(self, size: int | None) -> str:
        """``+6,308``; ``.`` for no change and for nothing to compare with."""
        if not size:
            return "."
        return self._small(size, "+") or f"{size / MIB:+,.{self._decimals}f}"

    def _small(self, size: int, plus: str = "") -> str:
        unit = 0.1 if self._decimals else 1
        if size and abs(size) < unit * MIB / 2:
            return f"{'-' if size < 0 else plus}<{unit:g}"
        return ""
