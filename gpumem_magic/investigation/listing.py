"""The lines of the cell that a report is about, to be shown beside its figures.

A report holds the statements that ran, with their lines, and not the cell. The cell is looked up in the session's history; where
it is not there (a report from a file, a script), the statements stand alone.
"""

# IPython's objects carry no types.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpumem_magic.looks.shell import running_shell
from gpumem_magic.report.model import ReportData
from gpumem_magic.views.lines import first_line


@dataclass(frozen=True)
class ListedLine:
    """number: as the notebook shows it, the first line of the cell being 1."""

    number: int
    text: str


def listing_of(report: ReportData, source: str | None = None) -> tuple[ListedLine, ...]:
    """The cell's lines, or those of the statements that ran where the cell is not known. source: the cell's text, if at hand."""
    wanted = {row.line: first_line(row.statement) for row in report.checkpoints if row.line > 0 and row.statement}
    candidates = [source] if source is not None else _history()
    for text in candidates:
        lines = text.replace("\r\n", "\n").replace("\r", "\n").rstrip("\n").split("\n")
        if wanted and _is_cell_of(lines, wanted):
            return tuple(ListedLine(number, line) for number, line in enumerate(lines, start=1))
    return tuple(ListedLine(line, text) for line, text in sorted(wanted.items()))


def _is_cell_of(lines: list[str], wanted: dict[int, str]) -> bool:
    """Whether every statement stands on its line. Two on one line (``a; b``) are both within it."""
    return all(
        line <= len(lines) and (text.removesuffix("…").strip() in first_line(lines[line - 1]))
        for line, text in wanted.items()
    )


def _history() -> Iterable[str]:
    """The cells of this session as they were typed, newest first."""
    history = getattr(running_shell(), "history_manager", None)
    cells: list[str] = list(getattr(history, "input_hist_raw", ()))
    return reversed(cells)
