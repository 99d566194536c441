"""Why an allocation failed, from the figures of a report."""

from __future__ import annotations

from dataclasses import dataclass

from gpumem_magic.report.model import ReportData


@dataclass(frozen=True)
class Diagnosis:
    """Why an allocation failed, in bytes; None is unknown.

    cause: "fragmentation" (it would have fitted, packed perfectly), "size" (it would not), "other_process" (it would without
    what other processes hold), "limit" (the device itself had room), "unknown" (a figure is missing). spare: what would be
    left, packed perfectly; negative is what was missing.
    """

    cause: str
    wanted: int
    segment: int | None
    device_free: int | None
    cached: int | None
    largest_free: int | None
    spare: int | None


def diagnose(report: ReportData) -> Diagnosis | None:
    """None where the report has no out-of-memory error with a size."""
    error = report.error
    if error is None or error.requested is None:
        return None
    wanted = error.requested if error.rounded is None else error.rounded
    if (told := error.verdict) is not None:
        cause = "size" if told.cause == "capacity" else told.cause
        return Diagnosis(cause, wanted, error.segment, told.free, told.cached, error.largest_free, told.spare)
    row = next((row for row in reversed(report.checkpoints) if row.kind == "error"), None)
    total = report.device.total_bytes if report.device.total_bytes is not None else report.device.smi_total_bytes
    free = None
    if row is not None and row.device_used is not None and total is not None:
        free = max(0, total - row.device_used)
    cached = None if row is None else row.categories.get("cached")
    spare = None if free is None or cached is None else free + cached - wanted
    if free is not None and free >= (wanted if error.segment is None else error.segment):
        cause = "limit"
    elif spare is None:
        cause = "unknown"
    elif spare < 0:
        others = None if row is None else row.categories.get("other_processes")
        cause = "size" if spare + (others or 0) < 0 else "other_process"
    elif error.largest_free is None or error.largest_free < wanted:
        cause = "fragmentation"
    else:
        cause = "unknown"
    return Diagnosis(cause, wanted, error.segment, free, cached, error.largest_free, spare)
