"""The report that a user holds: its data, and what can be asked of it.

How it looks and how it is written is the business of other rooms, which are loaded when they are first needed, so that importing
this module costs nothing.
"""

from __future__ import annotations

import os
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpumem_magic.report.inside import ActivationBreakdown, LayerRow, OperatorRow
from gpumem_magic.report.model import ReportData, Row, TensorGroup
from gpumem_magic.report.rows import MOST
from gpumem_magic.report.schema import report_from_dict, report_to_dict
from gpumem_magic.units import mib
from gpumem_magic.views.quiet import quiet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gpumem_magic.timeline_page.view import TimelineView
    from gpumem_magic.views.compared import Comparison

VIEWS = ("table", "plot")
EXPLANATION = "explanation"


class Report(ReportData):
    """Where one device's memory went. `devices` holds the same for every other device that was used."""

    devices: tuple[Report, ...]

    @classmethod
    def of(cls, data: ReportData) -> Report:
        """The object for a report's data."""
        return cls(**{**vars(data), "devices": tuple(map(cls.of, data.devices))})

    def to_dict(self) -> dict[str, Any]:
        """The ledger's schema 1: dictionaries, lists, strings and numbers, as JSON has them."""
        return report_to_dict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """Reads what `to_dict` made. Raises ValueError (one line: which key, and what to do) for anything else."""
        return cls.of(report_from_dict(data))

    def to_json(self, indent: int | None = None) -> str:
        """`to_dict` as JSON text."""
        from gpumem_magic.files.report_file import to_json

        return to_json(self, indent)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the JSON (UTF-8) so that `path` holds either all of it or what it held before.

        Raises OSError, in one line, where the folder is missing or cannot be written.
        """
        from gpumem_magic.files.report_file import save

        save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Reads what `save` wrote. Raises OSError or ValueError, in one line. Memory snapshots: `gpumem_magic.load`."""
        from gpumem_magic.files.report_file import load

        return cls.of(load(path))

    @quiet()
    def plot(self, *, rows: int | None = MOST, dark: bool = False) -> Figure:
        """The picture as a matplotlib Figure, made without pyplot: nothing global changes, nothing is shown.

        rows: about how many it has, None for all. dark: light letters on dark paper.
        """
        from gpumem_magic.views.figure import draw

        return draw(self, most=rows, dark=dark)

    def timeline(self) -> TimelineView:
        """Every allocation, stacked over time by category: interactive in a notebook, and `save(path)` writes it as a page.

        Raises ValueError for a report without its recording (one that `Report.load` read).
        """
        from gpumem_magic.timeline_page.view import timeline_of_reports

        return timeline_of_reports([self])

    def save_snapshot(self, path: str | os.PathLike[str]) -> None:
        """Writes the recording as a pickle that PyTorch's `_memory_viz.py` opens, and `gpumem_magic.load` as this report.

        Raises ValueError for a report without its recording, OSError where it can't be written.
        """
        from gpumem_magic.files.saved import save_snapshot

        save_snapshot(self, path)

    def tensors(self, at: str | Row = "peak") -> tuple[TensorGroup, ...]:
        """What is allocated at a moment: alike tensors as groups, the largest first, which add up to `allocated`.

        at: "peak", "failure" (the request that failed), or a row of `checkpoints` (the state after it). Raises ValueError for
        another word, without a failure, and for a row of a report without its recording (one that `Report.load` read).
        """
        if at == "peak":
            return self.peak.tensors
        if at == "failure":
            if self.error is None or self.error.requested is None:
                raise ValueError("no request for memory failed in this report")
            return self.error.tensors
        if not isinstance(at, Row):
            raise ValueError(f"no moment {at!r}: give 'peak', 'failure' or a row of the report's checkpoints")
        if self.source is None or at.position < 0:
            raise ValueError(
                "this report was read from a file without its recording: only 'peak' and 'failure' are known"
            )
        from gpumem_magic.report.tensors import groups_at

        return groups_at(self.source, at.position)

    def layers(self) -> LayerRow:
        """What each module left in activations, as a tree with its parameters and gradients, in bytes; the top is the whole.

        The moment is `inside.moment`. Raises ValueError for a report in which no module ran on the device.
        """
        return self._inside().layers

    def operators(self) -> tuple[OperatorRow, ...]:
        """The same activations by the class of the operators that keep them for backward: each byte is counted once.

        Raises ValueError for a report in which no module ran on the device.
        """
        return self._inside().operators

    def _inside(self) -> ActivationBreakdown:
        if self.inside is None:
            raise ValueError(
                "this report has no modules: none ran on the device, or the file that it comes from has none"
            )
        return self.inside

    def diff(self, other: ReportData) -> Comparison:
        """This report and a later one side by side, to be printed or displayed: what `other` has more or less, and where."""
        from gpumem_magic.views.compared import Comparison

        return Comparison(self, other)

    def explain(self) -> View:
        """Everything that the report says in words, what it folds included, and the categories: print it, or display it."""
        return View(self, EXPLANATION)

    def show(self, rows: int | str = "all") -> View:
        """The report with more rows, or fewer, to be printed or displayed: about so many, or "all". Raises ValueError for another
        word."""
        if rows != "all" and not isinstance(rows, int):
            raise ValueError(f'a report cannot show {rows!r} rows: give a number, or "all"')
        return View(self, None, None if isinstance(rows, str) else rows)

    def view(self, kind: str | None, name: str = "report") -> View:
        """Only the "table", only the "plot", or all of it (None), to be displayed. name: the variable that the text speaks of,
        "" where there is none. Raises ValueError for another kind."""
        if kind is not None and kind not in VIEWS:
            raise ValueError(f"a report has no view {kind!r}: choose one of {', '.join(VIEWS)}")
        return View(self, kind, name=name)

    def __repr__(self) -> str:
        from gpumem_magic.views.lines import first_line

        rows = len(self.checkpoints)
        ending = f", {first_line(self.error.type)}" if self.error else ""
        return (
            f"<Report {first_line(self.device.name)}: peak {mib(self.peak.allocated)} MiB allocated, "
            f"{rows} {'row' if rows == 1 else 'rows'}{ending}>"
        )

    def __str__(self) -> str:
        from gpumem_magic.views.text import render

        return render(self)

    def _repr_mimebundle_(
        self, include: Container[str] | None = None, exclude: Container[str] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        from gpumem_magic.views.display import mimebundle

        return mimebundle(self, include=include, exclude=exclude)


@dataclass(frozen=True, repr=False)
class View:
    """One face of a report, for a notebook or a terminal. kind: "table", "plot", the explanation, or None for the whole report.

    rows: about how many are shown, None for all. name: the report's variable, "" where it has none.
    """

    report: Report
    kind: str | None
    rows: int | None = MOST
    name: str = "report"

    def __repr__(self) -> str:
        return f"<{self.kind or 'rows'} of {self.report!r}>"

    def __str__(self) -> str:
        from gpumem_magic.views.text import in_full, render

        if self.kind == EXPLANATION:
            return in_full(self.report)
        return render(self.report, bars=self.kind != "table", table=self.kind != "plot", most=self.rows, name=self.name)

    def _repr_mimebundle_(
        self, include: Container[str] | None = None, exclude: Container[str] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        if self.kind == EXPLANATION:
            return {"text/plain": str(self)}, {}
        from gpumem_magic.views.display import mimebundle

        return mimebundle(self.report, kind=self.kind, most=self.rows, name=self.name, include=include, exclude=exclude)


def load(path: str | os.PathLike[str]) -> Report:
    """The report of a snapshot file: a recording that this package saved, or anybody's (see `snapshot.files.read`).

    Raises SnapshotFileError (a ValueError, in one line) for what is not one, OSError where it can't be opened.
    """
    from gpumem_magic.files.loaded import load

    return Report.of(load(path))
