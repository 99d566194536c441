"""Memory events of the profiler's traces (`profile_memory=True`) and of its timelines (`export_memory_timeline`, raw), as a
recording that is compared like a snapshot's.

Each event has the size of the block that the allocator gave, not what was asked for; the virtual side is told in blocks, too.
Where there are no addresses (traces of PyTorch 1.9, timelines), a free is that of the youngest block of its size, on both sides.
A timeline of sums (``.json``) tells changes of one microsecond as one: what is freed together is taken apart.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations_with_replacement, pairwise
from pathlib import Path

from gpumem_magic.snapshot.model import ACTIVE, Block, Frame, Segment, TraceEvent
from gpumem_magic.snapshot.pairing import Recorded
from gpumem_magic.snapshot.timeline import Timeline

# `c10::DeviceType` of CUDA.
_CUDA = 1
# Actions of a timeline's rows (``_ACTION_TO_INDEX`` of torch/profiler/_memory_profiler.py).
_CREATE, _DESTROY = 2, 4


def read(path: Path, device: int = 0) -> tuple[Recorded, bool]:
    """A trace's recording of that card, and whether it has addresses. Raises ValueError where it has no memory events."""
    content = path.read_bytes()
    trace = json.loads(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content)
    if isinstance(trace, list):
        return _of_blocks(_raw(trace) if len(trace) != 2 else _summed(trace[1]), False), False
    events = [event for event in trace["traceEvents"] if event.get("name") == "[memory]"]
    # A trace tells one thread after the other: backward's may come before that of the forward.
    events.sort(key=lambda event: float(event.get("ts", 0)))
    found = [event["args"] for event in events]
    found = [one for one in found if (one["Device Type"], one["Device Id"]) == (_CUDA, device)]
    if not found:
        raise ValueError("the trace has no memory events of the card")
    addressed = all("Addr" in one for one in found)
    return _of_blocks(((one.get("Addr", 0), one["Bytes"]) for one in found), addressed), addressed


def in_blocks(recording: Recorded, addressed: bool) -> Recorded:
    """A snapshot's recording as a trace has it: the sizes of its blocks."""
    changes: list[tuple[int, int, int]] = []
    for life in recording.timeline.allocations:
        if life.born >= 0:
            changes.append((life.born, life.address, life.size))
        if life.freed is not None:
            changes.append((life.freed, life.address, -life.size))
    frames = {index: event.frames for index, event in enumerate(recording.events)}
    changes.sort()
    return _of_blocks(
        ((address, size) for _, address, size in changes), addressed, [frames[event] for event, _, _ in changes]
    )


def _raw(rows: Iterable[Sequence[int]]) -> Iterable[tuple[int, int]]:
    return ((0, size) for _, action, size, _ in rows if action in (_CREATE, _DESTROY))


def _summed(totals: Iterable[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Of a timeline that has only how much there was of each category after each microsecond."""
    live: Counter[int] = Counter()
    for before, after in pairwise(sum(one) for one in totals):
        if after > before:
            live[after - before] += 1
            yield 0, after - before
        elif after < before:
            for size in _freed_at_once(before - after, live):
                live[size] -= 1
                yield 0, -size


def _freed_at_once(size: int, live: Counter[int]) -> Iterable[int]:
    """A block of that size; where there is none, two or three that are as much together."""
    sizes = [one for one, count in live.items() if count > 0]
    for others in range(3):
        for chosen in combinations_with_replacement(sizes, others):
            parts = Counter((*chosen, size - sum(chosen)))
            if all(live[part] >= count for part, count in parts.items()):
                return parts.elements()
    return [size]


def _of_blocks(
    changes: Iterable[tuple[int, int]], addressed: bool, frames: Sequence[tuple[Frame, ...]] = ()
) -> Recorded:
    """From (address, bytes), frees below 0. Each block has a place of its own; what was not allocated here was there before."""
    events, start = [], []
    live: dict[int, list[int]] = defaultdict(list)
    for number, (address, size) in enumerate(changes):
        key = address if addressed else abs(size)
        stack = frames[number] if frames else ()
        place = (number + 1) << 40
        if size > 0:
            live[key].append(place)
            events.append(TraceEvent("alloc", place, size, frames=stack))
            continue
        if live[key]:
            place = live[key].pop()
        else:
            start.append(Segment(0, place, -size, 0, "large", (Block(place, -size, -size, ACTIVE),)))
        events += [TraceEvent(action, place, -size, frames=stack) for action in ("free_requested", "free_completed")]
    return Recorded(start, events, Timeline(start, events))
