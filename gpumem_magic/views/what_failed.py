"""What went wrong, in sentences: what was asked for, what stood in its way, and which settings would have helped."""

from __future__ import annotations

from gpumem_magic.allocator.verdict import CAPACITY, FRAGMENTATION, LIMIT, OTHER_PROCESS, FailedRequest
from gpumem_magic.report.failure import failed_request, failed_row
from gpumem_magic.report.model import ALLOCATED_CATEGORIES, LABELS, ReportData, ReportError
from gpumem_magic.units import amount, counted, listed, percent

# What a program's tensors hold; rounding and cached bytes are the allocator's own.
_TENSOR_CATEGORIES = tuple(name for name in ALLOCATED_CATEGORIES if name not in ("rounding", "unknown"))
# Less than one part in so many would be left.
_NEARLY = 20


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
    if told and found.cause == FRAGMENTATION and any(one.name == FRAGMENTATION for one in report.causes):
        nearly = (found.spare or 0) * _NEARLY < report.device.capacity
        left = f"{'Nearly full: with' if nearly else 'With'} perfect packing, {_spare(found, report)} would be left."
        return [one for one in (left, place_sentence(found), error.elsewhere) if one]
    if told and found.cause == LIMIT and any(one.name == LIMIT for one in report.causes):
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
    head = (
        "Nearly full, and fragmentation is the cause"
        if spare * _NEARLY < capacity
        else "Fragmentation is the cause, not size"
    )
    return [f"{head}: with perfect packing, {_spare(found, report)} would be left.", place_sentence(found)]


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
    text = f"Nearly full: even with perfect packing, only {_spare(found, report)} would be left"
    if found.lasts is None:
        return f"{text}."
    if found.lasts == 0:
        return f"{text}, too little for one more iteration."
    return f"{text}, enough for at most {counted(found.lasts, 'more iteration')}."


def _spare(found: FailedRequest, report: ReportData) -> str:
    """What perfect packing would leave: ``1,206 MiB (7 % of the device)``."""
    spare, capacity = found.spare or 0, report.device.capacity
    return amount(spare) + (f" ({percent(spare, capacity)} of the device)" if capacity else "")


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
