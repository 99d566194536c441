"""Coroutines that wait with something on the device: all that were started, before the first of them goes on."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from gpumem_magic.causes.alike import made_at
from gpumem_magic.causes.model import Scene
from gpumem_magic.causes.written import Written
from gpumem_magic.devices.base import CodePlace
from gpumem_magic.owners.model import size_of
from gpumem_magic.report.model import Cause
from gpumem_magic.snapshot.timeline import Allocation
from gpumem_magic.units import human

_SEVERAL = 4
# Copies from the host, or of another type.
_MOVES = "_to_copy"
_WAITS = (ast.Await, ast.AsyncWith, ast.AsyncFor)


def waiting_with_data(scene: Scene) -> Iterator[Cause]:
    """``x = images.cuda()`` in front of ``async with lock:``: of all requests at once."""
    if scene.tensors is None:
        return
    made: dict[CodePlace, list[Allocation]] = defaultdict(list)
    for one in scene.timeline.live_at(scene.moment):
        birth = scene.tensors.birth_of(one)
        if birth is not None and birth.place is not None and birth.kernel == _MOVES and not birth.node:
            made[birth.place].append(one)
    for place, its in sorted(made.items(), key=lambda pair: -size_of(pair[1])):
        if len(its) < _SEVERAL or size_of(its) < scene.part_of_peak(4):
            return
        wait = _waits_behind(scene, place)
        if wait is None:
            continue
        yield Cause(
            "data_ahead",
            f"{len(its)} calls of `{place.own_function}` wait (`{wait.shown}`, {wait.words}) with their data on the device: "
            f"{made_at(scene, its[-1])} moves it there before, {human(size_of(its))} in all.",
            "Move it there behind that, when its turn comes.",
            size_of(its) - its[0].size,
        )
        return


def _waits_behind(scene: Scene, place: CodePlace) -> Written | None:
    """The first statement behind a line of a coroutine, in the same block, that may wait."""
    text = scene.program.text_of(place.own_file, scene.recording.own_file)
    line = place.own_line - text.ahead if text is not None else 0
    function, loops = text.loops_around(line) if text is not None else (None, [])
    # (A loop is one call, that makes them all: for a queue, say.)
    if text is None or loops or not isinstance(function, ast.AsyncFunctionDef):
        return None
    behind = (one for one in function.body if one.lineno > line)
    waiting = next((one for one in behind if any(isinstance(part, _WAITS) for part in ast.walk(one))), None)
    return text.place(waiting) if waiting is not None else None
