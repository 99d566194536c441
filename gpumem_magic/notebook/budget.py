"""Budgets of a cell: the most that it may use, and the most that it may leave behind. For graded notebooks and CI."""

from __future__ import annotations

from dataclasses import dataclass

from gpumem_magic.report.model import ALLOCATED_CATEGORIES, LABELS, ReportData
from gpumem_magic.units import human


class BudgetExceeded(Exception):
    """A cell used, or left, more memory than it was allowed. The text is one line."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: no line of the cell is to blame, and ours are of no interest."""
        return [f"{type(self).__name__}: {self}"]


@dataclass(frozen=True)
class Budget:
    """In bytes, None for what is not limited. peak: of allocated memory, inside the cell. growth: allocated after less before.

    On every device that the report is about.
    """

    peak: int | None = None
    growth: int | None = None

    def exceeded(self, report: ReportData) -> str | None:
        """What was exceeded, in one line with the largest owner; None where the budget was kept."""
        found = []
        for one in (report, *report.devices):
            where = f" on cuda:{one.device.index}" if report.devices else ""
            if self.peak is not None and one.peak.peak_allocated > self.peak:
                at = f" at {one.peak.where}" if one.peak.where else ""
                found.append(
                    f"the peak{where} was {human(one.peak.peak_allocated)}{at}, but the budget is {human(self.peak)}"
                )
            growth = _growth(one)
            if self.growth is not None and growth > self.growth:
                found.append(
                    f"the cell left {human(growth)} more allocated{where} than it found, but only "
                    f"{human(self.growth)} is allowed"
                )
        if not found:
            return None
        return "; ".join(found) + _most(report)


def _most(report: ReportData) -> str:
    """Who holds more than half of the peak, or else the largest category in it."""
    largest = max(report.owners, key=lambda owner: owner.bytes, default=None)
    if largest is not None and 2 * largest.bytes > report.peak.allocated:
        return f"; most is held by `{largest.name}` ({human(largest.bytes)})"
    size, name = max((report.peak.categories.get(name) or 0, name) for name in ALLOCATED_CATEGORIES)
    return f"; the largest part of the peak: {LABELS[name]} ({human(size)})" if size else ""


def _growth(report: ReportData) -> int:
    if not report.checkpoints:
        return 0
    return report.checkpoints[-1].allocated - report.checkpoints[0].allocated
