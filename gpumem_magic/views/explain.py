"""Sentences from a report. Each is short, and says no more than the numbers do."""

from __future__ import annotations

from collections.abc import Sequence

from gpumem_magic.devices.base import DeviceFacts
from gpumem_magic.recording.model import StandIn
from gpumem_magic.report.model import ALLOCATED_CATEGORIES, CATEGORIES, Peak, ReportData, Row
from gpumem_magic.report.model import LABELS as LEGEND
from gpumem_magic.units import MIB, amount, counted, mib, percent
from gpumem_magic.views.lines import Line, lines
from gpumem_magic.views.what_failed import failure, trial_sentences, verdict

EVIDENCE_WORDS = {
    "identity": "identity (a live object holds it)",
    "lifetime": "lifetime and phase",
    "stack": "stack",
    "inferred": "inferred",
    "unknown": "unknown",
}
# In a list of words the comma of the legend's "cached, free" would mislead.
LABELS = LEGEND | {"cached": "cached"}
# Rounding of one part in so many of the peak is told.
_SEEN_ROUNDING = 100
# A category is large from one part in so many of the peak.
_LARGE = 10


def device_name(device: DeviceFacts) -> str:
    name = device.name
    if device.kind == "virtual" and not name.lower().startswith("virtual"):
        name = f"virtual {name}"
    return f"{name} (cuda:{device.index})" if device.index else name


def headline(report: ReportData) -> str:
    """The peak, where it was, the device, and how full that was at most."""
    peak, device = report.peak, report.device
    where = f" at {peak.where}" if peak.where else ""
    start = f"Peak {amount(peak.allocated)} allocated{where}"
    highest = highest_in_use(report)
    kind, size = ("reserved", peak.reserved) if highest is None else ("in use", highest)
    if not device.capacity:
        return f"{start}; at most {amount(size)} {kind} on the {device_name(device)}."
    used = mib(size) if size >= 100 * MIB else amount(size)
    share = percent(size, device.capacity)
    return f"{start}; at most {used} of {amount(device.capacity)} ({share}) {kind} on the {device_name(device)}."


def highest_in_use(report: ReportData) -> int | None:
    """The highest that nvidia-smi would have shown, in bytes; None where its figure was not available."""
    states: list[Row | Peak] = [*report.checkpoints, report.peak]
    figures = [
        state.device_used + max(0, state.peak_reserved - state.reserved)
        for state in states
        if state.device_used is not None
    ]
    return max(figures, default=None)


def used_device(report: ReportData) -> bool:
    """Whether anything was on the device, or asked for: else there is nothing to draw."""
    states: list[Row | Peak] = [*report.checkpoints, report.peak]
    failed = report.error is not None and report.error.requested is not None
    # Where PyTorch keeps no figures, the driver's alone tell that something was.
    moved = len({row.device_used for row in report.checkpoints}) > 1
    return failed or moved or any(state.peak_reserved or state.peak_allocated for state in states)


def answer(report: ReportData) -> str:
    """What a reader should know first, in a sentence or two."""
    if not used_device(report) and report.error is None:
        # That a virtual card was turned on, where one was, comes before that nothing was put on it.
        nothing = f"Nothing was allocated on the {device_name(report.device)}."
        return " ".join(report.notes[0].split()) if report.notes else nothing
    return report.answer or (failure(report) if report.error is not None else headline(report))


def gauge(report: ReportData) -> str:
    """How full the device was, whoever filled it; empty where the driver does not say."""
    highest, device = highest_in_use(report), report.device
    if highest is None:
        peak = max((row.peak_reserved for row in report.checkpoints), default=report.peak.reserved)
        # A file without events is one moment.
        words = "reserved at most" if len(report.checkpoints) > 1 else "had reserved"
        return f"{device_name(device)}: PyTorch {words} {amount(peak)}; nvidia-smi's figure was not available."
    first = next((row for row in report.checkpoints if row.device_used is not None), None)
    before = f"{amount(first.device_used or 0)} before, " if first is not None and first.kind == "before" else ""
    share = f" of {amount(device.capacity)} ({percent(highest, device.capacity)})" if device.capacity else ""
    return f"nvidia-smi, {device_name(device)}: {before}at most {amount(highest)}{share}{_beside(report)}."


def _beside(report: ReportData) -> str:
    """What fills the device at the end besides the program's tensors."""
    last = next((row for row in reversed(report.checkpoints) if row.device_used is not None), None)
    if last is None:
        return ""
    sizes = [(name, last.categories.get(name) or 0) for name in CATEGORIES if name not in ALLOCATED_CATEGORIES]
    labels = LABELS | {"cached": "cached but free"}
    words = [f"{labels[name]} {amount(size)}" for name, size in sizes if size >= MIB]
    # Somebody who sees it for the first time wonders.
    normal = ". Cached memory is for PyTorch's next tensors, which is normal"
    chiefly = report.error is None and 2 * (last.categories.get("cached") or 0) > (last.device_used or 0)
    return f"; at the end {', '.join([f'allocated {amount(last.allocated)}', *words])}{normal if chiefly else ''}"


def moves(line: Line) -> str:
    """Which categories a line moved: ``optimizer state 4,752, cached 1,540``; "" where none moved by half a MiB.

    The three largest moves are named and the rest summed up.
    """
    if line.before is None:
        return ""
    sizes = [(name, _move(line.before, line.row, name)) for name in CATEGORIES]
    sizes = sorted((move for move in sizes if abs(move[1]) >= MIB / 2), key=lambda move: -abs(move[1]))
    mixed = any(size < 0 for _, size in sizes)
    words = [f"{LABELS[name]} {mib(size, signed=mixed)}" for name, size in sizes[:3]]
    if len(sizes) > 3:
        words.append(f"others {mib(sum(size for _, size in sizes[3:]), signed=mixed)}")
    return ", ".join(words)


def _move(before: Row, row: Row, category: str) -> int:
    old, new = before.categories.get(category), row.categories.get(category)
    return 0 if old is None or new is None else new - old


def remarks(report: ReportData) -> list[str]:
    """Everything else that a reader may want to know, one sentence each: folding, retries, stand-ins, the unknown, notes."""
    unavailable = ["nvidia-smi's figure was not available."] if report.peak.device_used is None else []
    notes = (" ".join(note.split()) for note in report.notes)
    return [*unavailable, *_left_out(report), *particulars(report), *caveats(report), *notes]


def caveats(report: ReportData) -> list[str]:
    """Where a failure was, and what limits what the figures say."""
    sentences = [
        _failing_place(report),
        _workspace(report),
        _stand_ins(report),
        _unknown(report),
        _one_figure(report),
        _rounding(report),
    ]
    return [sentence for sentence in sentences if sentence]


def _rounding(report: ReportData) -> str:
    """Where a cause's figure and the table's may differ by it."""
    size = report.peak.categories.get("rounding") or 0
    if not report.shown_causes or _SEEN_ROUNDING * size < report.peak.allocated:
        return ""
    return (
        "Sentences count the allocator's blocks, which is what letting go gives back; the tensors above what was asked for. "
        f"The difference is rounding, {amount(size)} at the peak."
    )


def _workspace(report: ReportData) -> str:
    """What the category is, where it is a good part of the peak."""
    size = report.peak.categories.get("workspace") or 0
    if size * _LARGE < report.peak.allocated or size < MIB:
        return ""
    return (
        f"Workspace ({amount(size)} at the peak) is where cuBLAS and cuDNN compute: cuBLAS keeps a block of fixed size for each "
        "stream, whatever your tensors are; cuDNN gives its own back after each call."
    )


def particulars(report: ReportData) -> list[str]:
    """What only some readers want to know: what settings would have done, retries."""
    verdict = report.error.verdict if report.error is not None else None
    sentences = [] if verdict is None else trial_sentences(verdict)
    return [sentence for sentence in (*sentences, _retries(report)) if sentence]


def _left_out(report: ReportData) -> list[str]:
    return [
        f"Loop at line {fold.line}: {fold.kept:,} of {fold.total:,} iterations have rows." for fold in report.folded
    ]


def other_devices(report: ReportData) -> list[str]:
    """One sentence for every other device that was used."""
    return [f"Also used: {headline(other)}" for other in report.devices]


def _failing_place(report: ReportData) -> str:
    error = report.error
    if error is None or not error.module:
        return ""
    called = f", calling `{error.operator}`" if error.operator else ""
    return f"It failed in the forward of `{error.module}`{called}."


def _retries(report: ReportData) -> str:
    if not report.retries:
        return ""
    return f"{counted(report.retries, 'allocation')} did not fit at first: the allocator released cached memory and tried again."


def _stand_ins(report: ReportData) -> str:
    if not report.stand_ins:
        return ""
    back = [one for one in report.stand_ins if one.returned == one.count]
    read = [one for one in report.stand_ins if one.returned < one.count]
    said = [f"were read at {_places(read)}"] if read else []
    said += [f"went to the host and back at {_places(back)}"] if back else []
    return f"Values on this device are stand-ins; they {', and '.join(said)}."


def _places(stand_ins: Sequence[StandIn]) -> str:
    places = []
    for stand_in in stand_ins[:3]:
        line = stand_in.line.strip()
        place = f"line {line}" if line.isdecimal() else f"`{line}`"
        words = [f"{stand_in.count:,} times"] if stand_in.count > 1 else []
        if stand_in.supplied:
            words.append("supplied" if stand_in.supplied == stand_in.count else f"{stand_in.supplied:,} supplied")
        places.append(f"{place} ({', '.join(words)})" if words else place)
    rest = len(stand_ins) - len(places)
    more = f" and {counted(rest, 'more place')}" if rest else ""
    return f"{', '.join(places)}{more}"


def _unknown(report: ReportData) -> str:
    size = report.peak.categories.get("unknown") or 0
    if report.peak.allocated <= 0 or size * 100 <= report.peak.allocated:
        return ""
    share = percent(size, report.peak.allocated)
    return f"Unknown: {amount(size)} ({share}) of the memory allocated at the peak could not be put in a category."


def _one_figure(report: ReportData) -> str:
    peak = report.peak
    if (
        peak.device_used is not None
        and peak.categories.get("context") is None
        and peak.categories.get("context_or_others") is not None
    ):
        return "The driver could not tell this process from others: context and other processes are one figure."
    return ""


def evidence(report: ReportData) -> str:
    """How the bytes at the peak are known; empty where there are none."""
    total = sum(report.evidence.values())
    if total <= 0:
        return ""
    kinds = sorted(report.evidence.items(), key=lambda item: -item[1])
    words = [f"{EVIDENCE_WORDS.get(kind, kind)} {percent(size, total)}" for kind, size in kinds if size]
    return f"Evidence for the peak's {amount(total)} in tensors: {', '.join(words)}."


def alt_text(report: ReportData) -> str:
    """The picture in words, for a reader who does not see it."""
    statements = sum(1 for line in lines(report, parts=False) if line.is_statement)
    peak = report.peak.categories
    largest = sorted(((size or 0, name) for name, size in peak.items() if name in CATEGORIES), reverse=True)[:3]
    shares = ", ".join(f"{LABELS[name]} {amount(size)}" for size, name in largest if size > 0)
    rows = f"{'each of ' if statements != 1 else ''}{counted(statements, 'statement')}"
    text = f"Stacked bars of GPU memory by category, after {rows}. {answer(report)}"
    if shares:
        text += f" Largest at the peak: {shares}."
    return f"{text} {verdict(report)}" if report.error else text
