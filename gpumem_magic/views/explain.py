"""Sentences from a report. Each is short, and says no more than the numbers do."""

from __future__ import annotations

from gpumem_magic.allocator.verdict import CAPACITY, FRAGMENTATION, LIMIT, OTHER_PROCESS, FailedRequest
from gpumem_magic.devices.base import DeviceFacts
from gpumem_magic.report.failure import failed_request, failed_row
from gpumem_magic.report.model import ALLOCATED_CATEGORIES, CATEGORIES, Peak, ReportData, ReportError, Row
from gpumem_magic.report.model import LABELS as LEGEND
from gpumem_magic.units import MIB, amount, counted, listed, mib
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
# Rounding of one part in so many of the peak is told.
_SEEN_ROUNDING = 100
# A category is large from one part in so many of the peak.
_LARGE = 10
# What a program's tensors hold; rounding and cached bytes are the allocator's own.
_TENSOR_CATEGORIES = tuple(name for name in ALLOCATED_CATEGORIES if name not in ("rounding", "unknown"))


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


def verdict(report: ReportData) -> str | None:
    """What went wrong, in words; None without an error."""
    error = report.error
    if error is None:
        return None
    at = error.at
    found = failed_request(report)
    if found is None:
        message = error.message.strip().partition("\n")[0]
        message = message if len(message) <= 200 else f"{message[:199]}…"
        return f"{error.type}{at}: {message}" if message else f"{error.type}{at}."
    return " ".join([_wanted(error, at), *obstacle(report)])


def failure(report: ReportData) -> str:
    """What went wrong, without what stood in the way; empty without an error."""
    error = report.error
    if error is None:
        return ""
    at = error.at
    return _wanted(error, at) if failed_request(report) is not None else verdict(report) or ""


def obstacle(report: ReportData, *, told: bool = False) -> list[str]:
    """What stood in the way of a request that failed; nothing where none did. told: beside an answer, which has said by how much
    the memory was too small and how much of it was free."""
    error, found = report.error, failed_request(report)
    if error is None or found is None:
        return []
    total = report.device.total_bytes
    beyond = total is not None and (error.wanted or 0) > total
    if told and found.cause == CAPACITY and (found.spare or 0) < 0 and not beyond:
        return [error.elsewhere] if error.elsewhere else []
    sentences = [_free_memory(found, error)]
    if found.cause == FRAGMENTATION:
        sentences += _fragmentation(found, report, traced=error.verdict is not None)
    elif found.cause == CAPACITY:
        sentences.append(_too_big(found, report, error.wanted or 0))
    elif found.cause == OTHER_PROCESS:
        sentences.append(_others(found, report))
    elif found.cause == LIMIT:
        sentences.append(_limit(found))
    sentences.append(error.elsewhere)
    return [sentence for sentence in sentences if sentence]


def _held_then(report: ReportData, category: str) -> int:
    """What a category had when the request failed; 0 also where a file has no such row."""
    row = failed_row(report)
    return 0 if row is None else row.categories.get(category) or 0


def _wanted(error: ReportError, at: str) -> str:
    requested, wanted = error.requested or 0, error.wanted or 0
    text = f"Out of memory{at}: {amount(requested)} wanted"
    extra = []
    if amount(wanted) != amount(requested):
        extra.append(f"rounded to {amount(wanted)}")
    if error.segment is not None and amount(error.segment) != amount(wanted):
        extra.append(f"a segment of {amount(error.segment)}")
    return f"{text} ({', '.join(extra)})." if extra else f"{text}."


def _free_memory(found: FailedRequest, error: ReportError) -> str:
    words = []
    if found.free is not None:
        words.append(f"{amount(found.free)} free on the device")
    if found.cached is not None:
        piece = ""
        if found.cached and error.largest_free is not None:
            piece = f" (largest piece {amount(error.largest_free)})" if error.largest_free else " (no usable piece)"
        words.append(f"{amount(found.cached)} cached but free{piece}")
    return f"There were {', and '.join(words)}." if words else ""


def _limit(found: FailedRequest) -> str:
    if found.limit is not None:
        return (
            f"A limit was reached: the device had free memory, but this process may reserve only {amount(found.limit)}."
        )
    return "The device had free memory, so something else set a limit (for example set_per_process_memory_fraction)."


def _others(found: FailedRequest, report: ReportData) -> str:
    held = _held_then(report, "other_processes")
    return (
        f"Other processes are in the way: even with perfect packing, {amount(-(found.spare or 0))} would be missing"
        f"{f', and they hold {amount(held)} of the device' if held else ''}."
    )


def _fragmentation(found: FailedRequest, report: ReportData, *, traced: bool) -> list[str]:
    spare, capacity = found.spare or 0, report.device.capacity
    if not traced:
        return [f"Fragmentation, not size: with perfect packing, {amount(spare)} would be left."]
    share = f" ({percent(spare, capacity)} of the device)" if capacity else ""
    head = (
        "Nearly full, and fragmentation is the cause"
        if spare * 20 < capacity
        else "Fragmentation is the cause, not size"
    )
    return [f"{head}: with perfect packing, {amount(spare)}{share} would be left.", place_sentence(found)]


def _too_big(found: FailedRequest, report: ReportData, wanted: int) -> str:
    total = report.device.total_bytes
    if total is not None and wanted > total:
        return f"Too big for the device: it has {amount(total)} in all."
    if found.spare is not None and found.spare >= 0:
        return _full(found, report)
    text = f"Too big for the device: even with perfect packing, {amount(-(found.spare or 0))} would be missing."
    if report.error is not None and report.error.tensors:
        # The answer has said whose the memory was, tensor by tensor.
        return text
    largest = max(_TENSOR_CATEGORIES, key=lambda name: _held_then(report, name))
    size = _held_then(report, largest)
    return f"{text} The largest share: {LABELS[largest]}, {amount(size)}." if size else text


def _full(found: FailedRequest, report: ReportData) -> str:
    spare, capacity = found.spare or 0, report.device.capacity
    share = f" ({percent(spare, capacity)} of the device)" if capacity else ""
    text = f"Nearly full: even with perfect packing, only {amount(spare)}{share} would be left"
    if found.lasts is None:
        return f"{text}."
    if found.lasts == 0:
        return f"{text}, too little for one more iteration."
    return f"{text}, enough for at most {counted(found.lasts, 'more iteration')}."


def place_sentence(found: FailedRequest) -> str:
    """Which place would have done, and who splits it; empty where fragmentation is not the cause."""
    if found.place is None:
        return "No segment has a mostly free range of that size." if found.cause == "fragmentation" else ""
    pieces = [f"{piece.what}: {amount(piece.bytes)}" for piece in found.pieces]
    if found.more_pieces:
        pieces.append(f"{found.more_pieces:,} more")
    place = (
        f"The {amount(found.place)} that {found.left_by} left are" if found.left_by else f"{amount(found.place)} are"
    )
    return f"{place} split by {listed(pieces)}." if pieces else ""


def trial_sentences(found: FailedRequest) -> list[str]:
    """What the settings would have done, one sentence for each kind of outcome."""
    if not found.tried:
        return []
    if not found.trials:
        return ["No allocator setting can make up for the missing memory."]
    helped = found.helpful
    moved = [trial for trial in found.trials if trial.passes and trial.rounds < found.rounds]
    useless = [trial.conf for trial in found.trials if not trial.passes]
    sentences = []
    if helped:
        again = (
            f", and so do {found.rounds} more iterations like the last ({found.requests:,} requests)"
            if found.rounds
            else ""
        )
        later = "" if found.lasts is None else "; the loop keeps more in each, so a later one fails"
        sentences.append(f"When replayed with {listed(helped, 'or')}, the request passes{again}{later}.")
    sentences += [f"With {trial.conf} it passes, and memory runs out {_later(trial.rounds)}." for trial in moved]
    if useless:
        sentences.append(f"{listed(useless)} {'does' if len(useless) == 1 else 'do'} not help.")
    if found.trials and not found.rounds and helped:
        sentences.append("Whether later iterations would pass is not known: no earlier one like the last was recorded.")
    if found.kept and helped:
        sentences.append(
            f"These replays leave the {amount(found.kept)} that were reserved before the recording unchanged."
        )
    return sentences


def _later(rounds: int) -> str:
    if not rounds:
        return "before the next iteration gets that far"
    return "one iteration later" if rounds == 1 else f"{rounds} iterations later"


def failure_word(report: ReportData) -> str:
    """What stands beside the failing statement: ``out of memory``, or the error's type."""
    if report.error is None:
        return ""
    if report.error.requested is not None or report.error.type.rpartition(".")[2] == "OutOfMemoryError":
        return "out of memory"
    return report.error.type


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
    return (
        f"It failed in `{error.module}`, at {error.operator}." if error.operator else f"It failed in `{error.module}`."
    )


def _retries(report: ReportData) -> str:
    if not report.retries:
        return ""
    return f"{counted(report.retries, 'allocation')} did not fit at first: the allocator released cached memory and tried again."


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
    more = f" and {counted(rest, 'more place')}" if rest else ""
    return f"Values on this device are stand-ins; they were read at {', '.join(places)}{more}."


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


def percent(part: int, whole: int) -> str:
    """``7 %``, and not ``100 %`` for what is nearly so."""
    share = 100 * part / whole
    if 0 < share < 1:
        return "<1 %"
    return f"{99 if 99 <= share < 100 else round(share)} %"
