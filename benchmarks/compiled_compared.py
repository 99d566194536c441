"""What compiled programs took on a real card, and what they take on the virtual one, step by step and event by event."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpumem_magic.commands.diff_events import words
from gpumem_magic.snapshot.model import Frame, TraceEvent
from gpumem_magic.snapshot.pairing import Pairing, Recorded, pair
from gpumem_magic.snapshot.timeline import Timeline


class Part(NamedTuple):
    """What was done until a step's end. figures: the allocator's, then."""

    name: str
    events: Sequence[TraceEvent]
    figures: dict[str, Any]


class Saved(NamedTuple):
    name: str
    error: str
    libraries: dict[str, Any]
    parts: dict[str, Part]


def read(path: Path) -> Saved:
    """A file of `compiled_programs.py`."""
    with lzma.open(path, "rt") as file:
        data = json.load(file)
    frames = [Frame(*one) for one in data["frames"]]
    stacks = [tuple(frames[number] for number in stack) for stack in data["stacks"]]
    events = [
        TraceEvent(action, address, size, stream, frames=stacks[stack])
        for action, address, size, stream, stack in data["events"]
    ]
    return Saved(
        data["name"], data["error"], data["libraries"], {one.name: one for one in _parts(events, data["rows"])}
    )


def _parts(events: Sequence[TraceEvent], rows: Sequence[dict[str, Any]]) -> Iterator[Part]:
    """Each step's events: the figures say how many blocks had been asked for and given back at its end."""
    begun = place = asked = freed = 0
    for row in rows:
        while place < len(events) and (asked < row["allocations"] or freed < row["frees"]):
            asked += events[place].action == "alloc"
            freed += events[place].action == "free_completed"
            place += 1
        yield Part(row["step"], events[begun:place], row)
        begun = place


def compared(real: Part, virtual: Part) -> Pairing:
    return pair(_alone(real), _alone(virtual))


def explained(real: Part, virtual: Part, most: int = 12) -> str:
    """A step's differences: A is the card."""
    return "\n".join(words(_alone(real), _alone(virtual), compared(real, virtual), most))


def _alone(part: Part) -> Recorded:
    return Recorded((), part.events, Timeline((), part.events))


def line(real: Saved, virtual: Saved) -> str:
    """A row of the table."""
    shared = [name for name in real.parts if name in virtual.parts]
    if real.error or virtual.error or "step 1" not in shared:
        return f"{real.name:<26} {'on the card ' + real.error if real.error else virtual.error}"[:160]
    first, last = ((real.parts[name].figures, virtual.parts[name].figures) for name in ("step 1", shared[-1]))
    steps = [
        compared(real.parts[name], virtual.parts[name]) for name in shared if name not in ("begin", "made", "step 1")
    ]
    asked, pairs = sum(len(one.a) + len(one.b) for one in steps), sum(len(one.pairs) for one in steps)
    # (Replays of CUDA graphs ask for nothing.)
    matched = 2 * pairs / asked if asked else 1.0
    exact = sum(one.exact for one in steps) / pairs if pairs else 1.0
    freed_alike = sum(one.freed_alike for one in steps) / pairs if pairs else 1.0
    began = compared(real.parts["step 1"], virtual.parts["step 1"])
    return (
        f"{real.name:<26} {last[0]['max_allocated']:>13,} {last[1]['max_allocated'] - last[0]['max_allocated']:>+12,}"
        f" {first[0]['max_allocated']:>13,} {first[1]['max_allocated'] - first[0]['max_allocated']:>+12,}"
        f" {last[0]['reserved'] >> 20:>7,} {(last[1]['reserved'] - last[0]['reserved']) >> 20:>+5,}"
        f" {matched:8.2%} {exact:8.2%} {freed_alike:8.2%} {began.matched:8.2%}"
    )


HEADING = (
    f"{'program':<26} {'later peak':>13} {'off by':>12} {'first peak':>13} {'off by':>12} {'MiB':>7} {'off':>5}"
    " matched  to byte  as freed  first"
)
