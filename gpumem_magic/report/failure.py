"""Why a request failed, as told by the allocator's trace or, without one, by a report's figures."""

from __future__ import annotations

from gpumem_magic.allocator.verdict import CAPACITY, FRAGMENTATION, FailedRequest, cause_of, is_small
from gpumem_magic.report.model import ReportData, Row


def failed_row(report: ReportData) -> Row | None:
    """The last row of a statement that failed."""
    return next((row for row in reversed(report.checkpoints) if row.kind == "error"), None)


def failed_request(report: ReportData) -> FailedRequest | None:
    """None where the report has no out-of-memory error with a size. Without a trace nothing is known of places and settings."""
    error = report.error
    if error is None or error.wanted is None:
        return None
    if error.verdict is not None:
        return error.verdict
    row = failed_row(report)
    total = report.device.total_bytes if report.device.total_bytes is not None else report.device.smi_total_bytes
    free = cached = others = None
    if row is not None:
        cached, others = row.categories.get("cached"), row.categories.get("other_processes")
        if row.device_used is not None and total is not None:
            free = max(0, total - row.device_used)
    spare = None if free is None or cached is None else free + cached - error.wanted
    fits = error.largest_free is not None and error.largest_free >= error.wanted
    needed = error.wanted if error.segment is None else error.segment
    cause = cause_of(free, needed, spare, others=others, fits=fits)
    if cause == FRAGMENTATION and is_small(spare or 0, total or 0):
        cause = CAPACITY
    return FailedRequest(cause, free, cached, spare)
