"""``gpumem show --events``: what the allocator did, event by event."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

from gpumem_magic.attribution.sites import folded
from gpumem_magic.attribution.view import DeviceView
from gpumem_magic.report.model import LABELS
from gpumem_magic.snapshot.model import Frame
from gpumem_magic.snapshot.whole_file import printable
from gpumem_magic.units import human

AROUND = 20
"""So many events are listed around a moment."""


def events(view: DeviceView, position: int, between: Sequence[int] | None) -> Iterator[str]:
    """All between two events, both included, or those around a position; `>` stands before the one that led to it."""
    if not view.end:
        yield ""
        yield "The file has no events, only a state."
        return
    begin, last = between or (position - 1 - AROUND // 2, position - 1 + AROUND // 2)
    begin, end = max(begin, 0), min(last + 1, view.end)
    if begin >= end:
        return
    about = {}
    for one in view.timeline.allocations:
        about.update({at: one for at in (one.completed, one.freed, one.born) if at is not None and begin <= at < end})

    @cache
    def telling(frames: tuple[Frame, ...]) -> str:
        lines = folded(frames) if frames else ()
        return next((line for line in lines if not line.startswith("(")), "")

    first = view.log.events[0].time_us
    yield ""
    yield f"Events {begin:,} to {end - 1:,}:"
    for number in range(begin, end):
        event = view.log.events[number]
        tenant = about.get(number)
        what = LABELS[view.labels[tenant.index].category] if tenant is not None else ""
        if event.action == "oom":
            what = f"the driver had {human(event.address)} free"
        words = [word for word in (what, printable(telling(event.frames)), printable(event.metadata)) if word]
        time = f"{(event.time_us - first) / 1000:>12,.3f} ms" if event.time_us else ""
        size = human(event.size) if event.size else ""
        mark = ">" if number == position - 1 else " "
        yield f"{mark} {number:>9,}{time}  {printable(event.action):<14} {size:>10}  {', '.join(words)}".rstrip()
