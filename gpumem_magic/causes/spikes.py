"""One batch that is larger than the others, and makes the peak, or memory run out, alone."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from math import prod

from gpumem_magic.causes.model import WORTH, Iteration, Scene
from gpumem_magic.devices.base import Birth
from gpumem_magic.report.model import Cause
from gpumem_magic.units import human, shape_words

# So many others show what is usual.
_OTHERS = 3


def largest_batch(scene: Scene) -> Iterator[Cause]:
    """The iteration of the peak, or of the request that failed, had an input of the same line that was longer than in all others,
    and takes half as much again as any of them."""
    turns, now = _turns(scene)
    others = [scene.timeline.peak(one.start, one.end)[0] for number, one in enumerate(turns) if number != now]
    if len(others) < _OTHERS:
        return
    error = scene.report.error
    wanted = (error.wanted or 0) if error is not None and error.requested is not None else 0
    size, usual = scene.timeline.allocated_at(scene.moment) + wanted, max(others)
    found = _longer(scene, turns, now)
    if found is None or size - usual < max(WORTH, usual // 2):
        return
    here, most = found
    place = here.place
    own = place is not None and place.own_file == scene.recording.own_file
    at = f" (line {place.own_line})" if own and place is not None else ""
    what = f"`{place.expression or place.text}`" if place is not None else "its input"
    turn = scene.turn_of(scene.moment - 1)
    which = f"Iteration {'.'.join(map(str, turn[1]))}" if turn is not None else "One iteration"
    than = "those before" if wanted else "the others"
    yield Cause(
        "largest_batch",
        f"{which} {'asks for' if wanted else 'takes'} far more than {than}: {what}{at} is {shape_words(here.shape or ())} "
        f"there, and at most {shape_words(most)} in those, whose peak is {human(usual)}.",
        "Cut what is longer, or put fewer of the long ones into a batch; the longest batch first shows at once whether it fits.",
        size - usual,
        describes=True,
    )


def _turns(scene: Scene) -> tuple[Sequence[Iteration], int]:
    """The turns of the loop around the moment, with the one that failed, and the number of the moment's."""
    for turns in sorted(scene.loops, key=len, reverse=True):
        # What came of the one that failed may be a part of a turn.
        whole = scene.finished(turns)
        now = bisect_right([one.end for one in whole], scene.moment - 1)
        if scene.report.error is not None and now == len(whole) > 0:
            return [*whole, Iteration(whole[-1].end, scene.end)], now
        if now < len(whole) and whole[now].start < scene.moment:
            return whole, now
    return (), 0


def _longer(scene: Scene, turns: Sequence[Iteration], now: int) -> tuple[Birth, tuple[int, ...]] | None:
    """The first tensor of that iteration that nothing else of it went into and that is longer than what its line made in all
    others; and the largest of those."""
    log = scene.recording.logs[scene.device]
    ends = [one.end for one in turns]
    made: dict[object, dict[int, Birth]] = {}
    for event, birth in scene.births:
        number = bisect_right(ends, event)
        came = log.origins.get(event) in ("host_copy", "factory")
        if came and birth.shape and birth.place is not None and not birth.node and number < len(ends):
            made.setdefault((birth.place, birth.kernel), {}).setdefault(number, birth)
    for its in made.values():
        here = its.pop(now, None)
        shapes = [one.shape for one in its.values() if one.shape]
        if here is None or here.shape is None or 2 * len(shapes) < len(turns) - 1:
            continue
        most = max(shapes, key=prod)
        pairs = list(zip(here.shape, most, strict=False))
        if len(here.shape) == len(most) and all(one >= other for one, other in pairs) and here.shape != most:
            return here, most
    return None
