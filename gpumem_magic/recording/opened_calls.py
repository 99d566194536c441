"""The calls of a script's opened functions (`functions`): which run now, and in which iterations they were called."""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Mapping
from types import CodeType, TracebackType

# Functions are opened inside each other so deep at most.
MOST_CALLS = 4

Around = tuple[tuple[int, ...], tuple[int, ...]]
"""The iterations around a call, and the lines of their loops."""


class OpenedCalls:
    """codes: the functions' code -> the index of their ``def``, which stands for them. hook: what their code calls."""

    def __init__(self, codes: Mapping[CodeType, int], hook: object) -> None:
        self._codes = codes
        self._hook = hook
        # Those that run now, each with the statement that called it.
        self._running: list[tuple[int, int]] = []
        self._around: dict[int, Around] = {}
        self._thread = threading.get_ident()

    def around(self, function: int) -> Around:
        """Of a function's last call."""
        return self._around[function]

    def may_begin(self, function: int) -> bool:
        """Whether a call of it can be told: not in another thread, in itself, or too deep."""
        is_here = threading.get_ident() == self._thread and len(self._running) < MOST_CALLS
        return is_here and all(function != one for one, _ in self._running)

    def begin(self, function: int, caller: int, around: Around) -> None:
        self._around[function] = around
        self._running.append((function, caller))

    def end(self) -> int:
        """The innermost is over. The statement that called it."""
        return self._running.pop()[1]

    def runs(self, code: CodeType) -> bool:
        """Whether this is the code of one that runs now."""
        function = self._codes.get(code)
        return function is not None and any(function == one for one, _ in self._running)

    def innermost(self, traceback: TracebackType) -> TracebackType:
        """The last of an error's frames whose statements were told: in the program, or in a function that was opened."""
        found, inner = traceback, traceback.tb_next
        while inner is not None:
            code = inner.tb_frame.f_code
            if code in self._codes and inner.tb_lasti >= self._told_from(code):
                found = inner
            inner = inner.tb_next
        return found

    def _told_from(self, code: CodeType) -> int:
        """Where in a function's code its told statements begin: behind those that are not told."""
        calls = [one.offset for one in dis.get_instructions(code) if one.argval is self._hook]
        return calls[1] if len(calls) > 1 else sys.maxsize
