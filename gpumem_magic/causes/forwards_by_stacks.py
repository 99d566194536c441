"""Forwards through which no backward goes, where a file's stacks are all that is known: what was saved goes all at once."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from gpumem_magic.attribution.places import line_in_program
from gpumem_magic.causes.model import WORTH, Scene
from gpumem_magic.owners.model import size_of
from gpumem_magic.recording.model import BACKWARD
from gpumem_magic.report.model import Cause
from gpumem_magic.snapshot.timeline import Allocation
from gpumem_magic.units import human

# Fewer blocks that go together may be a program's own.
_BLOCKS = 6
# They are a part of the peak, at least one in so many.
_PART = 4


def after_backwards(scene: Scene) -> int:
    """Where the last backward that is over at the moment ended: what is left of the forwards before it, something else keeps."""
    ends = (scene.end_of(one) for one in scene.spans(BACKWARD))
    return max((end for end in ends if end < scene.moment), default=0)


def go_backward(scene: Scene, its: Iterable[Allocation]) -> bool:
    """Whether a backward is under way at the moment, or comes before the last of these has gone."""
    gone = max((one.freed or scene.end for one in its), default=0)
    return any(scene.moment <= scene.end_of(one) and scene.start_of(one) < gone for one in scene.spans(BACKWARD))


def without_backward(scene: Scene) -> Iterator[Cause]:
    """Activations at the peak that are let go together, with nothing made in between, and no backward since they were made."""
    least = max(scene.part_of_peak(_PART), min(WORTH, scene.report.peak.allocated // 2))
    living = scene.living_in(scene.peak, "activations")
    events = scene.recording.logs[scene.device].events
    # (An error lets go of what was to go backward.)
    if size_of(living) < least or any(event.action == "oom" for event in events):
        return
    requests = [number for number, event in enumerate(events) if event.action == "alloc"]
    together: dict[int, list[Allocation]] = defaultdict(list)
    for one in living:
        if one.born >= 0 and one.freed is not None:
            together[bisect_right(requests, one.freed)].append(one)
    gone = max(together.values(), key=size_of, default=[])
    size = size_of(gone)
    if len(gone) < _BLOCKS or size < least:
        return
    first, last = min(one.born for one in gone), max(one.freed or 0 for one in gone)
    backwards = scene.spans(BACKWARD)
    if not backwards or any(scene.start_of(one) < last and first < scene.end_of(one) for one in backwards):
        return
    places = Counter[str]()
    for one in gone:
        places[line_in_program(events[one.born].frames)] += one.size
    ((place, most),) = places.most_common(1)
    by = f" by {place}" if place and 2 * most > size else ""
    yield Cause(
        "missing_no_grad",
        f"{human(size)} of the peak are activations{by} that are let go together, and no backward comes in between.",
        "If nothing goes backward from there, `with torch.no_grad():` lets go of each as soon as the next layer has used it.",
        size,
    )
