"""What the variables of functions are as these are left: of a run's first calls, in a trial's own process."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from gpumem_magic.advice.evidence import NamedThings, names_inside
from gpumem_magic.advice.written_functions import WrittenFunction
from gpumem_magic.failures import swallowed

# The first may find an optimizer without its states.
_CALLS = 3


class VariablesWatch:
    """variables: what was found, of the last call that was watched."""

    def __init__(self, found: Iterable[WrittenFunction]) -> None:
        self.variables: dict[WrittenFunction, NamedThings] = {}
        self._by_code = {(one.file, one.line, one.own_name): one for one in found}
        self._calls: Counter[WrittenFunction] = Counter()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, in this thread. A debugger's or a coverage tool's function does without it: the process is a copy."""
        if not self._by_code:
            # (It takes time at each call of a function.)
            yield
            return
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(None)

    def _called(self, frame: FrameType, event: str, given: Any) -> Any:
        code = frame.f_code
        found = self._by_code.get((code.co_filename, code.co_firstlineno, code.co_name))
        if found is None or self._calls[found] >= _CALLS:
            return None
        self._calls[found] += 1
        frame.f_trace_lines = False

        def left(frame: FrameType, event: str, given: Any) -> Any:
            if event == "return":
                try:
                    self.variables[found] = names_inside(frame.f_locals)
                except Exception as error:  # it would be the program's; its changes are fewer so
                    swallowed(error)
            return left

        return left
