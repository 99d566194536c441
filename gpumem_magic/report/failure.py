"""Why a request failed, as told by the allocator's trace or, without one, by a report's figures."""

from __future__ import annotations

import textwrap
from itertools import pairwise

from gpumem_magic.allocator.verdict import CAPACITY, FRAGMENTATION, FailedRequest, cause_of, is_small
from gpumem_magic.devices.base import Counters
from gpumem_magic.recording.model import Checkpoint, Moment, Recording
from gpumem_magic.report.model import ReportData, ReportError, Row
from gpumem_magic.snapshot.timeline import Timeline

# What errors of CUDA's libraries say where they got no memory: CUBLAS_STATUS_ALLOC_FAILED, cudaErrorMemoryAllocation.
_OF_MEMORY = ("memory", "alloc")
# What ends a program without a reason to tell.
_ENDS = ("KeyboardInterrupt", "SystemExit", "GeneratorExit")
# A headline in which an error's own words are longer, in characters, is cut to as many: the error itself has them all.
_WORDS = 160


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


def steps(recording: Recording, device: int) -> list[tuple[Checkpoint, Moment, Counters, Counters]]:
    """Each checkpoint with the moment before it, and the counters then and at it."""
    points = [point for point in recording.checkpoints if device in point.moment.counters]
    return [
        (point, before.moment, before.moment.counters[device], point.moment.counters[device])
        for before, point in pairwise(points)
    ]


def is_of_memory(error: ReportError) -> bool:
    """Whether an error says that memory ran out, or that something could not be allocated."""
    said = f"{error.type} {error.message}".lower()
    return error.requested is not None or any(word in said for word in _OF_MEMORY)


def error_in_words(error: ReportError) -> str:
    """An error of another kind in sentences: ``KeyError at line 5: 'images'. Memory did not run out.``"""
    kind = error.type.rpartition(".")[2]
    # (Who interrupts a program asks for no reason.)
    beside = "" if is_of_memory(error) or not kind.endswith(("Error", "Exception")) else " Memory did not run out."
    return f"{named_error(error)}{beside}"


def named_error(error: ReportError) -> str:
    """An error's kind, place and own words, cut where they are long."""
    said = "" if error.type in _ENDS else " ".join(error.message.replace("`", "'").split())
    whole = f"{error.type}{error.at}{': ' if said else ''}{said.rstrip('.')}"
    # What a long one says behind its sentence, in parentheses, is left out first.
    opened = whole.rfind(" (")
    if len(said) > _WORDS and 0 < opened <= _WORDS and whole.find(")", opened) == len(whole) - 1:
        return f"{whole[:opened]}."
    end = "" if whole.endswith(("!", "?")) else "."
    return f"{whole}{end}" if len(said) <= _WORDS else textwrap.shorten(whole, _WORDS, placeholder=" …")


def failed_requests(recording: Recording, device: int) -> list[tuple[Checkpoint, int, int]]:
    """For each request that failed, the checkpoint of the row in which it did, where the row starts, and the event."""
    found = []
    for point, moment, before, now in steps(recording, device):
        # (Before it gives up, the allocator empties its cache.)
        if now.retries > before.retries:
            start, end = moment.positions[device], point.moment.positions[device]
            events = recording.logs[device].events[start:end]
            found += [(point, start, start + number) for number, one in enumerate(events) if one.action == "oom"]
    return found


def caught_requests(recording: Recording, device: int) -> list[tuple[Checkpoint, int, int]]:
    """Those that failed, where the program caught the error and went on."""
    failed = failed_requests(recording, device)
    # The last is the error that ended the program.
    return failed[:-1] if _ended_by_one(recording) else failed


def peak_is_of_a_failed_attempt(recording: Recording, device: int, timeline: Timeline) -> bool:
    """Whether the peak was reached on the way to a request that failed, with nearly all of it still there."""
    if _ended_by_one(recording):
        return False
    peak, position = timeline.peak(0, len(timeline))
    return any(
        start < position <= event + 1 and 10 * timeline.allocated_at(event) >= 9 * peak
        for _, start, event in caught_requests(recording, device)
    )


def _ended_by_one(recording: Recording) -> bool:
    return recording.error is not None and recording.error.requested is not None
