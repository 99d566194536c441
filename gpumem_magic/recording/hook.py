"""What an instrumented program calls while it runs: it counts loops, tells the observer, and never disturbs the program."""

from __future__ import annotations

import builtins
import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace
from types import CodeType, TracebackType
from typing import Protocol

from gpumem_magic.failures import from_handler, swallows
from gpumem_magic.patching import Patches
from gpumem_magic.recording.instrument import Site, Statement
from gpumem_magic.recording.source import Position

_numbers = itertools.count(1)


class CellObserver(Protocol):
    """Is told, statement by statement, what a cell (or a script) does.

    iteration: 1-based counters of the program's own loops around the statement, outermost first; loops: their lines, same order
    and length. What moved between two calls belongs to the later one.

    A plain statement: `before_statement`, the statement runs, `after_statement`. A jump (``break``, ``continue``, ``raise``):
    both before it jumps. A compound statement: `before_statement` as it begins, then `after_statement` with
    ``statement.header`` each time that its head has worked: the next item of a loop fetched (iteration then counts this
    loop too), its end found (iteration no longer counts it), a test evaluated, a ``with`` entered and left. ``except`` has only
    a header row, at the start of its body. A statement that raises has no `after_statement`.
    """

    def before_statement(self, statement: Statement, iteration: tuple[int, ...], loops: tuple[int, ...]) -> None: ...

    def after_statement(self, statement: Statement, iteration: tuple[int, ...], loops: tuple[int, ...]) -> None: ...

    def wants_stop(self, loop: Statement, iteration: tuple[int, ...]) -> bool:
        """Asked at the head of every iteration, which is the last of `iteration`; True ends the loop as ``break`` would."""


def new_hook_name() -> str:
    """A name for a builtin that no program uses, another one each time."""
    return f"__gpumem_hook_{next(_numbers)}__"


class StatementHook:
    """Passes on to an observer what the calls put in by `Instrumenter` say.

    failure: what went wrong in the observer, in one line, or None. After a failure the observer is left alone and the program
    goes on. Interrupts are the user's and go through.
    """

    def __init__(self, sites: Sequence[Site], observer: CellObserver) -> None:
        self.failure: str | None = None
        self._sites = sites
        self._observer: CellObserver | None = observer
        self._headers = [replace(site.statement, header=True) for site in sites]
        self._lines = [tuple(sites[loop].statement.line for loop in site.loops) for site in sites]
        self._counters = [0] * len(sites)
        self._seen: list[tuple[int, ...] | None] = [None] * len(sites)
        self._current = 0

    def before(self, index: int) -> None:
        __tracebackhide__ = True
        self._counters[index] = 0
        self._current = index
        self._seen[index] = iteration = self._iteration(index)
        if self._observer is not None:
            try:
                self._observer.before_statement(self._sites[index].statement, iteration, self._lines[index])
            except BaseException as error:
                self._failed(error)

    def after(self, index: int) -> None:
        __tracebackhide__ = True
        self._tell(self._sites[index].statement, self._iteration(index), self._lines[index])

    def header(self, index: int) -> None:
        __tracebackhide__ = True
        self._current = index
        self._seen[index] = iteration = self._iteration(index)
        self._tell(self._headers[index], iteration, self._lines[index])

    def next_iteration(self, index: int) -> bool:
        """The head of an iteration of the loop `index`. True: leave the loop."""
        __tracebackhide__ = True
        self._counters[index] += 1
        self._current = index
        header = self._headers[index]
        iteration = (*self._iteration(index), self._counters[index])
        self._tell(header, iteration, (*self._lines[index], header.line))
        if self._observer is None:
            return False
        try:
            return bool(self._observer.wants_stop(header, iteration))
        except BaseException as error:
            self._failed(error)
            return False

    def failed(
        self, traceback: TracebackType | None, codes: Collection[CodeType]
    ) -> tuple[Statement, tuple[int, ...], tuple[int, ...]] | None:
        """The statement of the program (whose module-level code is `codes`) that an error came through, its iteration and
        the lines of its loops. None where the error did not come from the program. Keeps nothing of the traceback."""
        while traceback is not None and traceback.tb_frame.f_code not in codes:
            traceback = traceback.tb_next
        if traceback is None:
            return None
        index = self._at(*_position(traceback))
        site, lines = self._sites[index], self._lines[index]
        iteration = self._seen[index]
        if iteration is None:
            iteration = self._iteration(index)
        if site.statement.kind in ("for", "while") and self._counters[index]:
            # It failed as it fetched the next item.
            iteration, lines = (*iteration, self._counters[index] + 1), (*lines, site.statement.line)
        return site.statement, iteration, lines

    def leave(self, traceback: TracebackType | None, codes: Collection[CodeType]) -> None:
        """Tells the observer that the statement which `failed` would name is over."""
        left = self.failed(traceback, codes)
        if left is not None:
            self._tell(*left)

    def _at(self, line: int, column: int | None) -> int:
        if column is None:
            found = [index for index, site in enumerate(self._sites) if site.start[0] <= line <= site.end[0]]
        else:
            position: Position = (line, column)
            found = [index for index, site in enumerate(self._sites) if site.covers(position)]
        return found[-1] if found and self._current not in found else self._current

    def _iteration(self, index: int) -> tuple[int, ...]:
        counters = self._counters
        return tuple([counters[loop] for loop in self._sites[index].loops])

    def _tell(self, statement: Statement, iteration: tuple[int, ...], loops: tuple[int, ...]) -> None:
        __tracebackhide__ = True
        if self._observer is not None:
            try:
                self._observer.after_statement(statement, iteration, loops)
            except BaseException as error:
                self._failed(error)

    def _failed(self, error: BaseException) -> None:
        """Switches the observer off for its own failure. What interrupts the program goes on its way."""
        if not swallows(error):
            raise error
        self._observer = None
        self.failure = f"{type(error).__name__}: {error}".splitlines()[0]


def installed(name: str, hook: StatementHook | None) -> Patches:
    """Lets programs find `hook` as the builtin `name` for a ``with`` block. None installs nothing.

    (No generator: its context manager would write to the program's error when that passes.)
    """
    patches = Patches()
    if hook is not None:
        patches.set(builtins, name, hook)
    return patches


def without_hooks(traceback: TracebackType | None) -> None:
    """Takes our frames out of an interrupt's traceback: what interrupts us interrupts the statement that we were called at."""
    while traceback is not None:
        inner = traceback.tb_next
        if inner is not None and inner.tb_frame.f_globals is globals():
            traceback.tb_next = from_handler(inner)
        traceback = traceback.tb_next


def _position(traceback: TracebackType) -> tuple[int, int | None]:
    """Line and column (UTF-8 bytes; None before Python 3.11) at which a frame was."""
    code = traceback.tb_frame.f_code
    if hasattr(code, "co_positions") and traceback.tb_lasti >= 0:
        line, _, column, _ = next(itertools.islice(code.co_positions(), traceback.tb_lasti // 2, None))
        if line is not None:
            return line, column
    return traceback.tb_lineno, None
