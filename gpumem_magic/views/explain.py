"""Sentences from a report. Each is short, and says no more than the numbers do."""

from __future__ import annotations

from gpumem_magic.devices.base import DeviceFacts
from gpumem_magic.report.failure import Diagnosis, diagnose
from gpumem_magic.report.model import ALLOCATED_CATEGORIES, CATEGORIES, ReportData, Row
from gpumem_magic.report.model import LABELS as LEGEND
from gpumem_magic.report.out_of_memory import place_sentence, trial_sentences
from gpumem_magic.units import MIB, amount, mib
from gpumem_magic.views.lines import Line, lines

EVIDENCE_WORDS = {
    "identity": "identity (a live object holds it)",
    "lifetime": "lifetime and phase",
    "stack": "stack",
    "inferred": "inferred",
    "unknown": "unknown",
}
# In a list of words the comma of the legend's "cached, free" would mislead.
LABELS = LEGEND | {"cached": "cached"}
# What a program's tensors hold; rounding and cached bytes are the allocator's own.
_TENSOR_CATEGORIES = tuple(name for name in ALLOCATED_CATEGORIES if name != "rounding")


def device_name(device: DeviceFacts) -> str:
    name = device.name
    if device.kind == "virtual" and not name.lower().startswith("virtual"):
        name = f"virtual {name}"
    return f"{name} (cuda:{device.index})" if device.index else name


def headline(report: ReportData) -> str:
    """The peak, where it was, the device, and how full that was."""
    peak, device = report.peak, report.device
    where = f" at {peak.where}" if peak.where else ""
    start = f"Peak {amount(peak.allocated)} allocated{where}"
    kind, size = ("reserved", peak.reserved) if peak.device_used is None else ("in use", peak.device_used)
    if not device.capacity:
        return f"{start}; {amount(size)} {kind} on the {device_name(device)}."
    used = mib(size) if size >= 100 * MIB else amount(size)
    share = _percent(size, device.capacity)
    return f"{start}; {used} of {amount(device.capacity)} ({share}) {kind} on the {device_name(device)}."


def change(line: Line) -> str:
    """What a line added and which categories moved: ``+6,292 MiB: optimizer state 4,752, cached 1,540``.

    The three largest moves are named and the rest summed up; what is below half a MiB is left out.
    """
    if line.before is None:
        return ""
    total = f"{mib(line.change or 0, signed=True)} MiB" if abs(line.change or 0) >= MIB / 2 else "no change"
    return f"{total}: {words}" if (words := moves(line)) else total


def moves(line: Line) -> str:
    """The categories of `change`, without the total; empty where none moved by half a MiB."""
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


def verdict(report: ReportData) -> str | None:
    """What went wrong, in words; None without an error."""
    error = report.error
    if error is None:
        return None
    at = "" if error.line is None else f" at line {error.line}"
    found = diagnose(report)
    if found is None:
        message = error.message.strip().partition("\n")[0]
        message = message if len(message) <= 200 else f"{message[:199]}…"
        return f"{error.type}{at}: {message}" if message else f"{error.type}{at}."
    sentences = [_wanted(report, found, at), _free_memory(found)]
    if found.cause == "fragmentation":
        sentences += _fragmentation(report, found)
    elif found.cause == "size":
        sentences.append(_too_big(report, found))
    elif found.cause == "other_process":
        sentences.append(_others(report, found))
    elif found.cause == "limit":
        sentences.append(_limit(report))
    return " ".join(sentence for sentence in sentences if sentence)


def _wanted(report: ReportData, found: Diagnosis, at: str) -> str:
    requested = (report.error.requested if report.error else None) or 0
    text = f"Out of memory{at}: {amount(requested)} wanted"
    extra = []
    if amount(found.wanted) != amount(requested):
        extra.append(f"rounded to {amount(found.wanted)}")
    if found.segment is not None and amount(found.segment) != amount(found.wanted):
        extra.append(f"a segment of {amount(found.segment)}")
    return f"{text} ({', '.join(extra)})." if extra else f"{text}."


def _free_memory(found: Diagnosis) -> str:
    words = []
    if found.device_free is not None:
        words.append(f"{amount(found.device_free)} free on the device")
    if found.cached is not None:
        piece = ""
        if found.cached and found.largest_free is not None:
            piece = f" (largest piece {amount(found.largest_free)})" if found.largest_free else " (no piece of use)"
        words.append(f"{amount(found.cached)} cached but free{piece}")
    return f"There were {', and '.join(words)}." if words else ""


def _limit(report: ReportData) -> str:
    known = None if report.error is None or report.error.verdict is None else report.error.verdict.limit
    if known is not None:
        return f"A limit decides: the device itself had room, and this process may reserve {amount(known)}."
    return "The device itself had room, so something else set the limit (for example set_per_process_memory_fraction)."


def _others(report: ReportData, found: Diagnosis) -> str:
    row = next(row for row in reversed(report.checkpoints) if row.kind == "error")
    held = row.categories.get("other_processes") or 0
    return (
        f"Other processes decide: packed perfectly, {amount(-(found.spare or 0))} were missing, and they hold {amount(held)} "
        "of the device."
    )


def _fragmentation(report: ReportData, found: Diagnosis) -> list[str]:
    spare, capacity = found.spare or 0, report.device.capacity
    if report.error is None or report.error.verdict is None:
        return [f"Fragmentation, not size: packed perfectly, {amount(spare)} would be left."]
    nearly = spare * 20 < capacity
    share = f" ({_percent(spare, capacity)} of the device)" if capacity else ""
    head = "Nearly full, and fragmentation decides" if nearly else "Fragmentation decides, not size"
    return [f"{head}: packed perfectly, {amount(spare)}{share} would be left.", place_sentence(report.error.verdict)]


def _too_big(report: ReportData, found: Diagnosis) -> str:
    total = report.device.total_bytes
    if total is not None and found.wanted > total:
        return f"Too big for the device: it has {amount(total)} in all."
    text = f"Too big for the device: even packed perfectly, {amount(-(found.spare or 0))} were missing."
    row = next(row for row in reversed(report.checkpoints) if row.kind == "error")
    largest = max(_TENSOR_CATEGORIES, key=lambda name: row.categories.get(name) or 0)
    size = row.categories.get(largest) or 0
    return f"{text} The largest share: {LABELS[largest]}, {amount(size)}." if size else text


def failure_word(report: ReportData) -> str:
    """What stands beside the failing statement: ``out of memory``, or the error's type."""
    if report.error is None:
        return ""
    if report.error.requested is not None or report.error.type.rpartition(".")[2] == "OutOfMemoryError":
        return "out of memory"
    return report.error.type


def remarks(report: ReportData) -> list[str]:
    """Everything else that a reader has to know, one sentence each: folding, retries, stand-ins, the unknown, notes."""
    sentences = [
        f"Loop at line {fold.line}: {fold.kept:,} of {fold.total:,} iterations are shown." for fold in report.folded
    ]
    if report.error is not None and report.error.verdict is not None:
        sentences += trial_sentences(report.error.verdict)
    sentences += [_failing_place(report), _retries(report), _stand_ins(report), _unknown(report), _unavailable(report)]
    sentences += [" ".join(note.split()) for note in report.notes]
    return [sentence for sentence in sentences if sentence]


def other_devices(report: ReportData) -> list[str]:
    """One sentence for every other device that was used."""
    return [f"Also used: {headline(other)}" for other in report.devices]


def _failing_place(report: ReportData) -> str:
    error = report.error
    if error is None or not error.module:
        return ""
    return (
        f"It failed in `{error.module}`, at {error.operator}." if error.operator else f"It failed in `{error.module}`."
    )


def _retries(report: ReportData) -> str:
    if not report.retries:
        return ""
    times = "Once an allocation" if report.retries == 1 else f"{report.retries:,} times an allocation"
    return f"{times} did not fit at first: the allocator gave cached memory back to the device and tried again."


def stand_in_count(report: ReportData) -> int:
    return sum(stand_in.count for stand_in in report.stand_ins)


def _stand_ins(report: ReportData) -> str:
    if not report.stand_ins:
        return ""
    places = []
    for stand_in in report.stand_ins[:3]:
        line = stand_in.line.strip()
        place = f"line {line}" if line.isdecimal() else f"`{line}`"
        words = [f"{stand_in.count:,} times"] if stand_in.count > 1 else []
        if stand_in.supplied:
            words.append("supplied" if stand_in.supplied == stand_in.count else f"{stand_in.supplied:,} supplied")
        places.append(f"{place} ({', '.join(words)})" if words else place)
    rest = len(report.stand_ins) - len(places)
    more = f" and {rest} more {'place' if rest == 1 else 'places'}" if rest else ""
    return f"Values on this device are stand-ins; they were read at {', '.join(places)}{more}."


def _unknown(report: ReportData) -> str:
    size = report.peak.categories.get("unknown") or 0
    if report.peak.allocated <= 0 or size * 100 <= report.peak.allocated:
        return ""
    share = _percent(size, report.peak.allocated)
    return f"Unknown: {amount(size)} of what was allocated at the peak ({share}) could not be put in a category."


def _unavailable(report: ReportData) -> str:
    peak = report.peak
    if peak.device_used is None:
        return "nvidia-smi's figure was not available: bars end at what PyTorch reserved."
    if peak.categories.get("context") is None and peak.categories.get("context_or_others") is not None:
        return "The driver could not tell this process from others: context and other processes are one figure."
    return ""


def evidence(report: ReportData) -> str:
    """How the bytes at the peak are known; empty where there are none."""
    total = sum(report.evidence.values())
    if total <= 0:
        return ""
    kinds = sorted(report.evidence.items(), key=lambda item: -item[1])
    words = [f"{EVIDENCE_WORDS.get(kind, kind)} {_percent(size, total)}" for kind, size in kinds if size]
    return f"How the peak's {amount(total)} in tensors are known: {', '.join(words)}."


def alt_text(report: ReportData) -> str:
    """The picture in words, for a reader who does not see it."""
    statements = sum(1 for line in lines(report, parts=False) if line.is_statement)
    peak = report.peak.categories
    largest = sorted(((size or 0, name) for name, size in peak.items() if name in CATEGORIES), reverse=True)[:3]
    shares = ", ".join(f"{LABELS[name]} {amount(size)}" for size, name in largest if size > 0)
    rows = "1 statement" if statements == 1 else f"{statements:,} statements"
    text = f"Stacked bars of GPU memory by category, after each of {rows}. {headline(report)}"
    if shares:
        text += f" Largest at the peak: {shares}."
    return f"{text} {verdict(report)}" if report.error else text


def _percent(part: int, whole: int) -> str:
    share = 100 * part / whole
    if 0 < share < 1:
        return "<1 %"
    # Not "100 %" for what is nearly so.
    return f"{99 if 99 <= share < 100 else round(share)} %"
