"""What a program called the parts of its run: the profiler's annotations beside a file's events, and the events' own metadata."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from gpumem_magic.snapshot.files import LoadedSnapshot
from gpumem_magic.snapshot.model import TraceEvent


class NamedRange(NamedTuple):
    """begin, end: positions."""

    name: str
    begin: int
    end: int


def named_ranges(loaded: LoadedSnapshot, device: int, events: Sequence[TraceEvent]) -> list[NamedRange]:
    """In the order in which they begin: of `torch.profiler.record_function`, by times, and of events in a row with the same
    metadata. One that has no end lasts to the end of the events, if it began among them."""
    return sorted([*_annotated(loaded, device, events), *_with_metadata(events)], key=lambda one: (one.begin, -one.end))


def _annotated(loaded: LoadedSnapshot, device: int, events: Sequence[TraceEvent]) -> Iterator[NamedRange]:
    times = [event.time_us for event in events]
    opened: dict[str, list[int]] = defaultdict(list)
    for note in loaded.snapshot.external_annotations:
        name, when, stage = note.get("name"), note.get("time_us"), note.get("stage")
        if note.get("device") != device or not isinstance(name, str) or not isinstance(when, int) or not times:
            continue
        position = bisect_left(times, when)
        if stage == "START":
            opened[name].append(position)
        elif stage == "END" and opened[name] and (begin := opened[name].pop()) < position:
            yield NamedRange(name, begin, position)
    for name, begins in opened.items():
        yield from (NamedRange(name, begin, len(events)) for begin in begins if 0 < begin < len(events))


def _with_metadata(events: Sequence[TraceEvent]) -> Iterator[NamedRange]:
    for name, run in groupby(range(len(events)), key=lambda number: events[number].metadata):
        if name:
            numbers = list(run)
            yield NamedRange(name, numbers[0], numbers[-1] + 1)
