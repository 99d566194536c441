"""Loops of the program, where a file's stacks are all that is known: a function comes back to a line, or is called again."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from gpumem_magic.attribution.sites import is_python, tells_a_part
from gpumem_magic.causes.model import Scene, found_once
from gpumem_magic.snapshot.model import Frame

# The program's functions around a request, outermost first, without those of modules and optimizers.
_Way = tuple[Frame, ...]
# A function's line, or a function: what is around it, its file and name.
_Function = tuple[_Way, str, str]


class LoopInStacks(NamedTuple):
    """begins: the events at which its turns begin. once: ``turn of the loop at train.py:15-31``, ``call of step() at …``."""

    once: str
    begins: Sequence[int]

    @property
    def noun(self) -> str:
        return self.once.partition(" ")[0]

    def between(self, begin: int, end: int) -> LoopInStacks:
        """With those of its turns that begin between two positions."""
        first, last = (bisect_left(self.begins, position) for position in (begin, end))
        return self._replace(begins=self.begins[first:last])


@found_once
def loops_of(scene: Scene) -> list[LoopInStacks]:
    """The lines to which functions come back, and then the functions that are called again and again."""
    events = scene.recording.logs[scene.device].events
    ways: dict[tuple[int, ...], _Way] = {}
    # To each line: the events at which its function came to it, and the line that it came from, 0 where it was called anew.
    came: dict[tuple[_Function, int], list[tuple[int, int]]] = defaultdict(list)
    calls: dict[_Function, list[int]] = defaultdict(list)
    # The lines that a function has come to since it was called.
    reached: dict[_Function, set[int]] = defaultdict(set)
    before: _Way = ()
    for number, event in enumerate(events):
        if event.action != "alloc" or not event.frames:
            continue
        # (A file's equal frames are one object.)
        key = tuple(map(id, event.frames))
        if (way := ways.get(key)) is None:
            way = ways[key] = _way_of(event.frames)
        # Autograd's threads have none of the program's functions, or begin with an operator's own.
        if not way or way == before:
            continue
        depth = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(way, before, strict=False)))
        for level in range(depth, len(way)):
            now, was = way[level], before[level].line if level < len(before) else 0
            function = way[:level], now.filename, now.name
            if level > depth or not was or before[level][:2] != now[:2]:
                reached[function].clear()
                calls[function].append(number)
                was = 0
            if was > now.line or now.line not in reached[function]:
                came[function, now.line].append((number, was if was > now.line else 0))
            reached[function].add(now.line)
        before = way
    found = [loop for (function, line), its in came.items() for loop in _of_a_line(function, line, its)]
    return found + [
        LoopInStacks(f"call of {function[2]}() at {_place(function[0][-1])}", its)
        for function, its in calls.items()
        if function[0]
    ]


def _of_a_line(function: _Function, line: int, came: Sequence[tuple[int, int]]) -> Iterator[LoopInStacks]:
    """The loop that begins there, and those around it, which come back to it from lines further on."""
    sources = Counter(source for _, source in came if source)
    for least in sorted(sources):
        begins = [event for event, source in came if not source or source >= least]
        last, _ = max(sources.items(), key=lambda pair: (pair[0] >= least, pair[1]))
        place = _place(Frame(function[1], function[2], line), last)
        yield LoopInStacks(f"turn of the loop at {place}", begins)


def _way_of(frames: Sequence[Frame]) -> _Way:
    python = [frame for frame in reversed(frames) if is_python(frame)]
    return tuple(takewhile(lambda frame: not tells_a_part(frame), python))


def _place(frame: Frame, last: int = 0) -> str:
    """``train.py:15-31 fit``; last: the last line of several."""
    name = os.path.basename(frame.filename.replace("\\", "/"))
    lines = f"{frame.line}-{last}" if last > frame.line else f"{frame.line}"
    return f"{name}:{lines}" if frame.name == "<module>" else f"{name}:{lines} {frame.name}"
