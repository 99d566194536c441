"""What other settings would have done with a recorded program, where the recording can tell.

What was recorded is read from the recording. What would have been is replayed, and believed only where a replay with the recorded
settings gives exactly what was recorded: then the emulator and the capacity that it was given are right for this program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpumem_magic.allocator.program import Program
from gpumem_magic.allocator.replayable import Replayable
from gpumem_magic.allocator.settings import parse_with_notes
from gpumem_magic.allocator.verdict import capacity_of
from gpumem_magic.allocator.what_if import Outcome, what_if
from gpumem_magic.snapshot.model import TraceEvent
from gpumem_magic.snapshot.timeline import Timeline
from gpumem_magic.units import counted

_RELEASES = frozenset({"segment_free", "segment_unmap"})
_STEADY = (
    "The recording can't tell: most of the memory was there before it began, placed under its own settings. "
    "Record the program from its start."
)
_GETS = frozenset({"segment_alloc", "segment_map"})


@dataclass(frozen=True)
class OtherSettings:
    """was: what was recorded. would_be: None where `cannot_tell` says why there is nothing to say. available: what there was to
    have, in bytes; None is unknown. at_most: whether that is an upper bound, from when cached memory had to be given back. kept:
    bytes that were reserved before the recording."""

    was: Outcome
    would_be: Outcome | None
    cannot_tell: str
    available: int | None
    at_most: bool
    kept: int


def with_other_settings(one: Replayable, conf: str) -> OtherSettings:
    """The recorded settings, and those that `conf` names changed. Raises ValueError for damaged recordings, and where the
    emulator does not have what `conf` names."""
    settings, notes = parse_with_notes(conf, one.settings)
    if notes:
        raise ValueError(" ".join(notes))
    timeline = Timeline(one.seed.start, one.events, one.settings)
    was = recorded_outcome(one.events, timeline)
    kept = timeline.reserved_at(0)
    capacity = capacity_of(one.events, timeline, one.settings)
    at_most = capacity.available is None
    if at_most:
        capacity = replace(capacity, available=most_available(one.events, timeline))
    found = OtherSettings(was, None, "", capacity.available, at_most and capacity.available is not None, kept)
    if settings == one.settings:
        return replace(found, cannot_tell="The recording had these settings already.")
    program = Program(one.seed.start, one.events, one.final)
    again = what_if(program, one.settings, capacity, device=one.device)
    if not _is_alike(again, was):
        return replace(found, cannot_tell=_difference(again, was))
    would = what_if(program, settings, capacity, device=one.device)
    if 2 * kept > was.peak_reserved and not (would.passed and not would.failed):
        return replace(found, cannot_tell=_STEADY)
    return replace(found, would_be=would)


def recorded_outcome(events: Sequence[TraceEvent], timeline: Timeline) -> Outcome:
    """What was recorded, in the figures of a replay. `retries` are those that gave something back: others leave no trace."""
    end = len(timeline)
    reserved, position = timeline.peak_reserved(0, end)
    # The new memory is there, the request that it is for comes next.
    while position < end and events[position - 1].action in _GETS and events[position].action in (*_GETS, "alloc"):
        position += 1
    failures = sum(event.action == "oom" for event in events)
    given_back = sum(1 for _ in _requests_after_releases(events))
    cached = reserved - timeline.allocated_at(position)
    return Outcome(
        timeline.peak(0, end)[0], reserved, cached, given_back, 0, failures, 0, (), False, given_back=given_back
    )


def most_available(events: Sequence[TraceEvent], timeline: Timeline) -> int | None:
    """What there was to have at most: where cached memory was given back for a request, the driver had refused before.

    None where that never was, or the bound is below what was reserved at another time.
    """
    bounds = []
    for first, found in _requests_after_releases(events):
        needed, last = 0, found
        while last < len(events) and events[last].action in _GETS:
            needed, last = needed + events[last].size, last + 1
        if needed:
            bounds.append(timeline.reserved_at(first) + needed - 1)
    least = min(bounds, default=None)
    return least if least is not None and least >= timeline.peak_reserved(0, len(timeline))[0] else None


def _requests_after_releases(events: Sequence[TraceEvent]) -> list[tuple[int, int]]:
    """Where cached memory was given back for a request: the index of the first release, and of what the request then got."""
    found = []
    first = -1
    for index, event in enumerate(events):
        if event.action in _RELEASES:
            first = index if first < 0 else first
            continue
        if first >= 0 and (event.action in _GETS or event.action == "oom"):
            found.append((first, index))
        first = -1
    return found


def _is_alike(again: Outcome, was: Outcome) -> bool:
    return not again.failed and not again.passed and _figures(again) == _figures(was)


def _figures(outcome: Outcome) -> tuple[int, int, int]:
    return outcome.peak_allocated, outcome.peak_reserved, outcome.given_back


def _difference(again: Outcome, was: Outcome) -> str:
    if again.failed:
        what = f"fails a request (event {again.failed[0].event:,}) that was served"
    elif again.passed:
        what = "serves a request that failed"
    elif again.given_back != was.given_back:
        what = f"gives cached memory back for {counted(again.given_back, 'request')}, and it was {was.given_back:,}"
    else:
        what = "does not reserve what was reserved"
    told = "The recording can't tell: it does not show how much memory there was at each moment"
    return f"{told} (a replay with its own settings {what})."
