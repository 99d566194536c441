"""The answer: a report in a sentence or two. The peak or the failure, where it was, of what it is, and what to do."""

from __future__ import annotations

from gpumem_magic.report.model import LABELS, ReportData, TensorGroup
from gpumem_magic.units import amount, human


def answer_of(report: ReportData) -> str:
    """From the report's own figures and causes."""
    lead = _failure(report) or _peak(report)
    if report.causes:
        return f"{lead}. {report.causes[0].sentence}"
    largest = next((group for group in _tensors(report) if group.category), None)
    return f"{lead}, chiefly {_in_words(largest)}." if largest is not None else f"{lead}."


def _peak(report: ReportData) -> str:
    where = f" at {report.peak.where}" if report.peak.where else ""
    return f"Peak {amount(report.peak.allocated)} allocated{where}"


def _failure(report: ReportData) -> str:
    error = report.error
    if error is None:
        return ""
    at = "" if error.line is None else f" at line {error.line}"
    if error.requested is None:
        return f"{error.type}{at}"
    row = next((row for row in reversed(report.checkpoints) if row.kind == "error"), report.peak)
    return f"Out of memory{at}: {amount(error.requested)} wanted, {amount(row.allocated)} allocated"


def _tensors(report: ReportData) -> tuple[TensorGroup, ...]:
    return report.error.tensors if report.error is not None and report.error.tensors else report.peak.tensors


def _in_words(group: TensorGroup) -> str:
    made = f" of line {group.line}" if group.line else ""
    return f"{human(group.bytes)} of {LABELS[group.category]}{made}"
