"""The report that a user holds: numbers and strings only, in the ledger's schema 1 (`to_dict`).

A report measures nothing and changes nothing. How it looks is the business of `text`, `figure` and `html`, which are loaded when
they are first needed, so that importing this module costs nothing.
"""

from __future__ import annotations

import os
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpumem_magic.attribution.ledger import TENANT_CATEGORIES
from gpumem_magic.recording.model import StandIn
from gpumem_magic.report.inside import Inside, LayerRow, OperatorRow
from gpumem_magic.report.out_of_memory import OutOfMemory
from gpumem_magic.units import mib

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gpumem_magic.recording.model import Recording
    from gpumem_magic.snapshot.files import LoadedSnapshot
    from gpumem_magic.timeline_page.view import TimelineView

# In the order in which a bar stacks them, bottom (left) to top (right).
CATEGORIES = (
    *TENANT_CATEGORIES,
    "rounding",
    "cached",
    "context",
    "other_processes",
    "context_or_others",
)
# The categories that add up to `allocated`; with `cached` they add up to `reserved`.
ALLOCATED_CATEGORIES = CATEGORIES[: CATEGORIES.index("cached")]
SCHEMA = 1
VIEWS = ("table", "plot")


@dataclass(frozen=True)
class Row:
    """The state after a statement (or part of one), and the peaks inside it. Bytes; None is unavailable, never 0."""

    kind: str  # before | statement | part | error | after
    label: str
    statement: str
    line: int
    iteration: tuple[int, ...]
    parts: tuple[Row, ...]
    allocated: int
    reserved: int
    device_used: int | None
    peak_allocated: int
    peak_reserved: int
    categories: Mapping[str, int | None]


@dataclass(frozen=True)
class Peak:
    """A row's figures at the first moment of maximum allocated, in bytes. where: the statement (and part), in words."""

    where: str
    allocated: int
    reserved: int
    device_used: int | None
    peak_allocated: int
    peak_reserved: int
    categories: Mapping[str, int | None]


@dataclass(frozen=True)
class ReportDevice:
    """kind: "cuda" or "virtual". `total_bytes` is torch's figure, `smi_total_bytes` nvidia-smi's; None where unknown."""

    name: str
    kind: str
    index: int
    uuid: str | None
    total_bytes: int | None
    smi_total_bytes: int | None

    @property
    def capacity(self) -> int | None:
        """What nvidia-smi gives as the total, or torch's figure without it, in bytes; None where neither is known."""
        return self.total_bytes if self.smi_total_bytes is None else self.smi_total_bytes


@dataclass(frozen=True)
class ReportError:
    """The user's error. What follows the line is for an out-of-memory error only, and None where it is not known: four sizes in
    bytes, and the verdict: what stood in the way and which settings would have helped. module: inside a forward, the
    module's name in the outermost one, or its class; operator: what was called there; "" where unknown."""

    type: str
    message: str
    line: int | None
    requested: int | None = None
    rounded: int | None = None
    segment: int | None = None
    largest_free: int | None = None
    verdict: OutOfMemory | None = None
    module: str = ""
    operator: str = ""


@dataclass(frozen=True)
class Folded:
    """A loop (at `line`) of which only `kept` of `total` iterations have rows."""

    line: int
    total: int
    kept: int


@dataclass(frozen=True)
class Owner:
    """Who held memory at the end of the cell, in bytes; over all owners `bytes` add up to what has a name.

    kind: variable | out | traceback | module | thread | cycle | library. frees: what comes back if it alone lets go; statement:
    what lets go of it, None where no single one does. together: statements that free all of `bytes`, where others hold some of it
    too, and together_frees what they free.
    """

    name: str
    kind: str
    type: str
    bytes: int
    frees: int
    statement: str | None
    together: str
    together_frees: int


@dataclass(frozen=True)
class ReportCause:
    """Why memory was what it was. name: the cause's in the catalogue; remedy: what to do, or "". bytes: what is at stake."""

    name: str
    text: str
    remedy: str
    bytes: int


@dataclass(frozen=True, repr=False, kw_only=True)
class Report:
    """Where one device's memory went. `devices` holds the same for every other device that was used.

    checkpoints: the rows in the order in which they ran. evidence: kind -> bytes at the peak. retries: how often the allocator
    gave cached memory back and tried again. inside: what `layers` and `operators` tell, None where no module ran.
    recording: what it was made from, numbers and strings too, which `timeline` and `save_snapshot` need; not a part of the JSON.
    """

    torch: str
    device: ReportDevice
    checkpoints: tuple[Row, ...]
    peak: Peak
    error: ReportError | None = None
    evidence: Mapping[str, int] = field(default_factory=dict)
    retries: int = 0
    stand_ins: tuple[StandIn, ...] = ()
    folded: tuple[Folded, ...] = ()
    notes: tuple[str, ...] = ()
    overhead_seconds: float = 0.0
    devices: tuple[Report, ...] = ()
    owners: tuple[Owner, ...] = ()
    causes: tuple[ReportCause, ...] = ()
    inside: Inside | None = None
    recording: Recording | LoadedSnapshot | None = field(default=None, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """The ledger's schema 1: dictionaries, lists, strings and numbers, as JSON has them."""
        from gpumem_magic.report.schema import report_to_dict

        return report_to_dict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """Reads what `to_dict` made. Raises ValueError (one line: which key, and what to do) for anything else."""
        from gpumem_magic.report.schema import report_from_dict

        return report_from_dict(data)

    def to_json(self, indent: int | None = None) -> str:
        """`to_dict` as JSON text."""
        from gpumem_magic.report.files import to_json

        return to_json(self, indent)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the JSON (UTF-8) so that `path` holds either all of it or what it held before.

        Raises OSError, in one line, where the folder is missing or cannot be written.
        """
        from gpumem_magic.report.files import save

        save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Reads what `save` wrote. Raises OSError or ValueError, in one line. Memory snapshots: `gpumem_magic.load`."""
        from gpumem_magic.report.files import load

        return load(path)

    def plot(self, *, parts: bool | None = None) -> Figure:
        """The picture as a matplotlib Figure, made without pyplot: nothing global changes, nothing is shown.

        parts: rows for what happened inside statements; by default where the picture stays readable.
        """
        from gpumem_magic.report.figure import draw

        return draw(self, parts=parts)

    def timeline(self) -> TimelineView:
        """Every allocation, stacked over time by category: interactive in a notebook, and `save(path)` writes it as a page.

        Raises ValueError for a report without its recording (one that `Report.load` read).
        """
        from gpumem_magic.timeline_page.view import timeline_of_report

        return timeline_of_report(self)

    def save_snapshot(self, path: str | os.PathLike[str]) -> None:
        """Writes the recording as a pickle that PyTorch's `_memory_viz.py` opens, and `gpumem_magic.load` as this report.

        Raises ValueError for a report without its recording, OSError where it can't be written.
        """
        from gpumem_magic.report.to_file import save_snapshot

        save_snapshot(self, path)

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

    def _inside(self) -> Inside:
        if self.inside is None:
            raise ValueError(
                "this report knows of no module: none ran on the device, or the report comes from a file without"
            )
        return self.inside

    def view(self, kind: str) -> View:
        """Only the "table" or only the "plot", to be displayed. Raises ValueError for another word."""
        if kind not in VIEWS:
            raise ValueError(f"a report has no view {kind!r}: choose one of {', '.join(VIEWS)}")
        return View(self, kind)

    def __repr__(self) -> str:
        from gpumem_magic.report.lines import first_line

        rows = len(self.checkpoints)
        ending = f", {first_line(self.error.type)}" if self.error else ""
        return (
            f"<Report {first_line(self.device.name)}: peak {mib(self.peak.allocated)} MiB allocated, "
            f"{rows} {'row' if rows == 1 else 'rows'}{ending}>"
        )

    def __str__(self) -> str:
        from gpumem_magic.report.text import render

        return render(self)

    def _repr_mimebundle_(
        self, include: Container[str] | None = None, exclude: Container[str] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        from gpumem_magic.report.display import mimebundle

        return mimebundle(self, include=include, exclude=exclude)


@dataclass(frozen=True, repr=False)
class View:
    """One face of a report, for a notebook or a terminal. kind: "table" or "plot"."""

    report: Report
    kind: str

    def __repr__(self) -> str:
        return f"<{self.kind} of {self.report!r}>"

    def __str__(self) -> str:
        from gpumem_magic.report.text import render

        return render(self.report, bars=self.kind == "plot", table=self.kind == "table")

    def _repr_mimebundle_(
        self, include: Container[str] | None = None, exclude: Container[str] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        from gpumem_magic.report.display import mimebundle

        return mimebundle(self.report, kind=self.kind, include=include, exclude=exclude)
