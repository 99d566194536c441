"""The iterations of a loop that run untold, for want of anything to tell: a list counts them, at next to no cost.

A rewritten loop asks these which of its two bodies to run (see `instrument.Instrumenter`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Protocol

# So many iterations at a time, which is half a MiB.
MOST_TURNS = 1 << 16
# An interrupt may come after an answer was taken and before it is given back.
_SPARE = 64


class Rest(Protocol):
    """What a loop's hook asks of either kind.

    ran: how many iterations ran untold since `count`.
    """

    @property
    def ran(self) -> int: ...

    def begin(self, iterations: int) -> None:
        """So many iterations, from the next one on, run untold."""

    def stop(self) -> None:
        """The next iteration is told. What ran has been counted."""

    def is_told(self) -> None:
        """An iteration has begun that is told."""

    def count(self) -> int:
        """What `ran` is, counted from here on."""


class ForRest:
    """turn: asked at the head of each iteration. True: it runs untold."""

    __slots__ = ("_answers", "_left", "turn")

    def __init__(self) -> None:
        self._answers = [False] * _SPARE
        self._left = 0
        self.turn: Callable[[], bool] = self._answers.pop

    @property
    def ran(self) -> int:
        return self._left - max(0, len(self._answers) - _SPARE)

    def begin(self, iterations: int) -> None:
        self._left = iterations
        self._answers[:] = [False] * _SPARE + [True] * iterations

    def stop(self) -> None:
        self.begin(0)

    def is_told(self) -> None:
        # (No builtin is called here, where the program's own may stand in its place.)
        if self._answers.__len__() < _SPARE:
            self._answers.append(False)

    def count(self) -> int:
        ran = self.ran
        self._left -= ran
        return ran


class WhileRest:
    """turns: has an item for each test, and the iteration after it, that is not told. A test that ends the loop calls `end`."""

    __slots__ = ("_is_over", "_left", "_list", "turns")

    def __init__(self) -> None:
        self._is_over = False
        self.begin(0)

    @property
    def ran(self) -> int:
        return self._left - operator.length_hint(self.turns)

    def begin(self, iterations: int) -> None:
        self._left = iterations
        self._list: list[tuple[()]] = [()] * iterations
        self.turns: Iterator[tuple[()]] = iter(self._list)

    def stop(self) -> None:
        # The loop goes through this one now.
        self._list.clear()
        self.begin(0)

    def is_told(self) -> None:
        pass

    def count(self) -> int:
        ran = self.ran
        self._left -= ran
        return ran

    def end(self) -> None:
        self._is_over = True
        if self.ran:
            # This test was no iteration.
            self._left -= 1

    def ended(self) -> bool:
        """Whether a test ended the loop, and no ``break``."""
        is_over, self._is_over = self._is_over, False
        return is_over
