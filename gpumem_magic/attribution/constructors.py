"""Which constructors of a program make modules: their class has a forward, as the stacks of the same recording show."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable

from gpumem_magic.attribution import sites
from gpumem_magic.snapshot.model import Frame

# What tells a class: a module has a forward, an optimizer a step, a set of data its items.
_MODULE = "forward"
_TELLING = frozenset({_MODULE, "step", "__getitem__", "__iter__", "__next__"})


class Makers:
    """Reads the telling methods from all stacks of a recording, once."""

    def __init__(self, stacks: Iterable[tuple[Frame, ...]]) -> None:
        found: dict[str, dict[int, str]] = defaultdict(dict)
        seen: set[int] = set()
        for frames in stacks:
            if id(frames) in seen:
                continue
            seen.add(id(frames))
            for frame in frames:
                if frame.name in _TELLING:
                    found[frame.filename][frame.line] = frame.name
        self._methods = {name: sorted(lines.items()) for name, lines in found.items()}
        self._answers: dict[int, bool] = {}

    def is_module(self, frames: tuple[Frame, ...]) -> bool:
        """Whether this stack's innermost constructor is a module's, or one within another's, as only modules nest."""
        key = id(frames)
        if key not in self._answers:
            self._answers[key] = self._told(frames)
        return self._answers[key]

    def _told(self, frames: tuple[Frame, ...]) -> bool:
        makers = sites.constructors(frames)
        if not makers:
            return False
        told = self._method_after(makers[0])
        if told:
            return told == _MODULE
        return any(self._method_after(one) == _MODULE for one in makers[1:]) or len(makers) > 2

    def _method_after(self, maker: Frame) -> str:
        """The first telling method below a constructor in its file; a class's come after it. "" where none was at work."""
        methods = self._methods.get(maker.filename, [])
        rank = bisect_right(methods, (maker.line, "\uffff"))
        return methods[rank][1] if rank < len(methods) else ""
