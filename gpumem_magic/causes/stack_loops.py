"""Loops of the program, where a file's stacks are all that is known: a function comes back to a line, or is called again."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile
from typing import NamedTuple

from gpumem_magic.attribution.places import line_in_words
from gpumem_magic.attribution.sites import is_python, tells_a_part
from gpumem_magic.causes.model import Scene, found_once
from gpumem_magic.snapshot.model import Frame

# The program's functions around a request, outermost first, without those of modules and optimizers: each with the number of the
# way to it.
_Way = tuple[tuple[int, Frame], ...]
# A function as it is called from somewhere: the number of the way to it, its file and name.
_Function = tuple[int, str, str]
# Whoever calls himself is followed so far.
_DEEPEST = 64
# A line of a loop is come back to from few others.
_SOURCES = 8


class LoopInStacks(NamedTuple):
    """begins: the events at which its turns begin. once: ``turn of the loop at train.py:15-31``, ``call of step() at …``."""

    once: str
    begins: Sequence[int]

    @property
    def noun(self) -> str:
        return self.once.partition(" ")[0]

    @property
    def several(self) -> str:
        """``turns of the loop at …``."""
        return self.once.replace(self.noun, f"{self.noun}s", 1)

    def between(self, begin: int, end: int) -> LoopInStacks:
        """With those of its turns that begin between two positions."""
        first, last = (bisect_left(self.begins, position) for position in (begin, end))
        return self._replace(begins=self.begins[first:last])


@found_once
def loops_of(scene: Scene) -> list[LoopInStacks]:
    """The lines to which functions come back, and then the functions that are called again and again."""
    ways = _Ways()
    # To each line: the events at which its function came to it, and the line that it came from, 0 where it was called anew.
    came: dict[tuple[_Function, int], list[tuple[int, int]]] = defaultdict(list)
    calls: dict[_Function, list[int]] = defaultdict(list)
    # The lines that a function has come to since it was called.
    reached: dict[_Function, set[int]] = defaultdict(set)
    before: _Way = ()
    for number, event in enumerate(scene.recording.logs[scene.device].events):
        if event.action != "alloc" or not event.frames:
            continue
        way = ways.of(event.frames)
        # Autograd's threads have none of the program's functions, or begin with an operator's own.
        if not way or way is before:
            continue
        depth = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(way, before, strict=False)))
        for level in range(depth, len(way)):
            (around, now), was = way[level], before[level][1].line if level < len(before) else 0
            function = around, now.filename, now.name
            if level > depth or not was or before[level][1][:2] != now[:2]:
                reached[function].clear()
                calls[function].append(number)
                was = 0
            source = was if was > now.line else 0
            if source or now.line not in reached[function]:
                came[function, now.line].append((number, source))
            reached[function].add(now.line)
        before = way
    found = [loop for (function, line), its in came.items() if len(its) > 1 for loop in _of_a_line(function, line, its)]
    return found + [
        LoopInStacks(f"call of {function[2]}() at {line_in_words(ways.callers[function[0]])}", its)
        for function, its in calls.items()
        if function[0] and len(its) > 1
    ]


class _Ways:
    """The ways of all stacks, of which each part has a number; callers: its innermost frame, by the number."""

    def __init__(self) -> None:
        self.callers: dict[int, Frame] = {}
        self._numbers: dict[tuple[int, Frame], int] = {}
        self._known: dict[tuple[int, ...], _Way] = {}
        self._equal: dict[_Way, _Way] = {}

    def of(self, frames: Sequence[Frame]) -> _Way:
        # (A file's equal frames are one object.)
        key = tuple(map(id, frames))
        if (way := self._known.get(key)) is None:
            way = self._followed(frames)
            way = self._known[key] = self._equal.setdefault(way, way)
        return way

    def _followed(self, frames: Sequence[Frame]) -> _Way:
        python = (frame for frame in reversed(frames) if is_python(frame))
        way, around = [], 0
        for frame in islice(takewhile(lambda frame: not tells_a_part(frame), python), _DEEPEST):
            way.append((around, frame))
            around = self._numbers.setdefault((around, frame), len(self._numbers) + 1)
            self.callers[around] = frame
        return tuple(way)


def _of_a_line(function: _Function, line: int, came: Sequence[tuple[int, int]]) -> Iterator[LoopInStacks]:
    """The loop that begins there, and those around it, which come back to it from lines further on."""
    sources = Counter(source for _, source in came if source)
    for least in sorted(source for source, _ in sources.most_common(_SOURCES)):
        begins = [event for event, source in came if not source or source >= least]
        last, _ = max(sources.items(), key=lambda pair: (pair[0] >= least, pair[1]))
        place = line_in_words(Frame(function[1], function[2], line), last)
        yield LoopInStacks(f"turn of the loop at {place}", begins)
