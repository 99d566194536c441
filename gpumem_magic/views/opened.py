"""The report that opens: what was allocated at the peak, its course through the run, and the rows, each with what is in it.

It works without scripts: rows are `details`, and figures appear where a pointer rests by the style sheet alone. The scale is
what is allocated; what is cached, the context and the capacity are a thin gauge beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpumem_magic.report.course import ITERATION, STEP, Stretch, course_of, shortened
from gpumem_magic.report.model import ALLOCATED_CATEGORIES, CATEGORIES, LABELS, ReportData
from gpumem_magic.units import amount, counted, mib
from gpumem_magic.views import explain
from gpumem_magic.views.elements import details, legend, paragraph, quoted, stack
from gpumem_magic.views.lines import SizeFormat
from gpumem_magic.views.opened_row import OpenedRows, tensors

# What the device has beside what is allocated.
_BESIDE = CATEGORIES[len(ALLOCATED_CATEGORIES) :]
_FEWEST = 3


def opened(report: ReportData) -> str:
    """The three parts, in one element."""
    parts = [_peak(report), _course(course_of(report)), OpenedRows(report).html()]
    return f'<div class="gpumem-parts">{"".join(parts)}</div>'


# The peak


def _peak(report: ReportData) -> str:
    peak = report.peak
    sizes = [(name, size) for name in ALLOCATED_CATEGORIES if (size := peak.categories.get(name) or 0) > 0]
    if not sizes:
        return ""
    figures = SizeFormat(report)
    said = ", ".join(f"{LABELS[name]} {amount(size)}" for name, size in sizes)
    colours = legend({name: figures.size(size) for name, size in sorted(sizes, key=lambda one: -one[1])})
    where = f"The {amount(peak.allocated)} at the peak, by category (MiB)"
    return (
        f"<section>{paragraph(where, 'gpumem-head')}"
        f'<div class="gpumem-bar gpumem-tips" role="img" aria-label="{quoted(said)}">'
        f"{stack(sizes, peak.allocated, 'data-tip')}</div>"
        f"{colours}{_gauge(report)}{_tensors(report)}</section>"
    )


def _gauge(report: ReportData) -> str:
    """How full the device was at the peak: a thin bar, and its figures in words."""
    peak, capacity = report.peak, report.device.capacity
    beside = [(name, size) for name in _BESIDE if (size := peak.categories.get(name) or 0) > 0]
    used = peak.allocated + sum(size for _, size in beside)
    whole = max(capacity, used)
    of = f" of {amount(capacity)}" if capacity else ""
    parts = [
        f"{amount(peak.allocated)} allocated",
        *(f"{amount(size)} {explain.LABELS[name]}" for name, size in beside),
    ]
    said = f"{amount(used)}{of} in use on the {explain.device_name(report.device)} then: {', '.join(parts)}."
    share = 100 * peak.allocated / max(whole, 1)
    first = f'<i class="gpumem-ink" style="width:{share:.4g}%"></i>'
    return (
        f'<div class="gpumem-gauge" role="img" aria-label="{quoted(said)}">{first}{stack(beside, whole)}</div>'
        f"{paragraph(said, 'gpumem-quiet')}"
    )


def _tensors(report: ReportData) -> str:
    table = tensors(report.peak.tensors, report.peak.categories, "tensors")
    return details("The tensors at the peak", table) if table else ""


# The course


def _course(stretches: Sequence[Stretch]) -> str:
    """A column for each iteration: up to the lowest in full, up to the highest pale."""
    there = [one for one in stretches if not one.missing]
    top = max((one.high for one in there), default=0)
    if len(there) < _FEWEST or not top:
        return ""
    said = f"Allocated through {_over(stretches)}; at most {amount(top)}."
    return (
        f"<section>{paragraph(said, 'gpumem-head')}"
        f'<div class="gpumem-course gpumem-tips" role="img" aria-label="{quoted(said)}">'
        f"{''.join(_column(one, top, stretches) for one in shortened(stretches))}</div></section>"
    )


def _over(stretches: Sequence[Stretch]) -> str:
    """What the strip goes through, and for one loop what is allocated at both ends of it."""
    turns = [one for one in stretches if one.unit in (ITERATION, STEP)]
    if not turns:
        return "the cell"
    if any("." in one.first for one in turns) or len({one.first for one in turns}) < len(turns):
        return "the loops"
    first, last = turns[0], turns[-1]
    ends = f": {amount(first.after)} after the first, {amount(last.after)} after the last"
    return f"{counted(sum(one.count for one in turns), turns[0].unit)}{ends if first is not last else ''}"


def _column(one: Stretch, top: int, stretches: Sequence[Stretch]) -> str:
    # What is not there keeps its width, up to a half of the strip.
    whole = sum(each.count for each in stretches if not each.missing)
    wide = f"flex-grow:{min(one.count, whole)}" if one.count > 1 else ""
    if one.missing:
        tip = f"{one.words}: not recorded"
        return f'<i class="gpumem-gone" style="{wide}" data-tip="{quoted(tip)}"></i>'
    low, high = 100 * one.low / top, 100 * one.high / top
    tip = f"{one.words}: {mib(one.low)} to {mib(one.high)} MiB"
    return f'<i style="--l:{low:.3g}%;--h:{high:.3g}%{";" if wide else ""}{wide}" data-tip="{quoted(tip)}"></i>'
