"""Summaries of errors: for each group of metrics the median of every source, the median of those, and the worst."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from accuracy.table import Row
from gpumem_magic.units import MIB

MARGIN = 0.02


@dataclass(frozen=True)
class Result:
    """A row that was made: what the virtual device says, in bytes, beside the printed figure."""

    row: Row
    predicted_bytes: int

    @property
    def predicted_mib(self) -> float:
        return self.predicted_bytes / MIB

    @property
    def error(self) -> float:
        """Relative, beyond half a unit of the last printed digit: 0.01 for one percent too much."""
        difference = self.predicted_mib - self.row.value_mib
        beyond = max(0.0, abs(difference) - self.row.resolution_mib / 2)
        return math.copysign(beyond, difference) / self.row.value_mib

    @property
    def to_the_digit(self) -> bool:
        """Whether the prediction is within one unit of the last digit that the source printed."""
        return abs(self.predicted_mib - self.row.value_mib) <= self.row.resolution_mib * 1.0001

    @property
    def runs_out(self) -> bool:
        """Whether a run that is given only the predicted figure would lack memory (beyond the printed precision)."""
        return self.lacks(1.0)

    def lacks(self, factor: float) -> bool:
        """Likewise with the prediction times `factor`."""
        return self.predicted_mib * factor < self.row.value_mib and not self.to_the_digit


@dataclass(frozen=True)
class Summary:
    """Errors of one group of metrics; relative, without sign except `worst`."""

    group: str
    rows: int
    by_source: dict[str, float]
    median_of_medians: float
    worst: float
    worst_row: int
    to_the_digit: int
    running_out: int
    running_out_with_margin: int
    """The same with MARGIN added to every prediction."""


def summarise(results: Sequence[Result]) -> list[Summary]:
    """One summary for each group of metrics, in the order in which they first occur."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.row.group or "", []).append(result)
    return [_summary(group, members) for group, members in groups.items()]


def _summary(group: str, members: Sequence[Result]) -> Summary:
    sources: dict[str, list[float]] = {}
    for result in members:
        sources.setdefault(result.row.source, []).append(abs(result.error))
    by_source = {source: statistics.median(errors) for source, errors in sources.items()}
    worst = max(members, key=lambda result: abs(result.error))
    return Summary(
        group=group,
        rows=len(members),
        by_source=by_source,
        median_of_medians=statistics.median(by_source.values()),
        worst=worst.error,
        worst_row=worst.row.number,
        to_the_digit=sum(result.to_the_digit for result in members),
        running_out=sum(result.runs_out for result in members),
        running_out_with_margin=sum(result.lacks(1 + MARGIN) for result in members),
    )
