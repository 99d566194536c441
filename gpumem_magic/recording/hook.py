"""What an instrumented program calls while it runs: it counts loops, tells the observer, and never disturbs the program."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import CodeType, FrameType, TracebackType
from typing import Protocol

from gpumem_magic.failures import from_handler, swallows
from gpumem_magic.patching import OwnBuiltins
from gpumem_magic.recording.instrument import Site, Statement, rest_name, turn_name
from gpumem_magic.recording.model import Failed
from gpumem_magic.recording.opened_calls import OpenedCalls
from gpumem_magic.recording.rest import MOST_TURNS, ForRest, Rest, WhileRest
from gpumem_magic.recording.source import Position

_numbers = itertools.count(1)


Place = tuple[Statement, tuple[int, ...], tuple[int, ...]]
"""A statement, its iteration, and the lines of its loops: see `CellObserver`."""

# So many iterations, and statements in them, without anything moving on a device: then a loop rests.
QUIET_TURNS = 32
QUIET_STATEMENTS = 64
LOOK_SECONDS = 0.02
# Frames that telling takes at most, beyond those of the cell, a kernel's among them.
_ROOM = 150

_RESTS: dict[str, Callable[[], Rest]] = {"for": ForRest, "while": WhileRest}


class Devices(Protocol):
    """What a run asks of the devices, to know when there is nothing to tell."""

    @property
    def moves(self) -> int:
        """Grows whenever memory moved, or a phase began, as far as was seen."""

    def tell(self, moved: Callable[[bool], None] | None) -> None:
        """Calls `moved` whenever memory moves from now on, where that is known at once; None: no longer.

        It is told whether the move is late: on behalf of an earlier statement.
        """

    def left_out(self, line: int, count: int) -> None:
        """So many iterations of the loop on a line ran untold."""

    def note_moment(self) -> None:
        """Notes the state of now, for `moved_until_now`."""

    def moved_until_now(self, statement: Statement, iteration: tuple[int, ...], loops: tuple[int, ...]) -> None:
        """A row for what moved memory up to the moment that was noted last."""


class CellObserver(Protocol):
    """Is told, statement by statement, what a cell (or a script) does.

    iteration: 1-based counters of the program's own loops around the statement, outermost first; loops: their lines, same order
    and length. What moved between two calls belongs to the later one.

    A plain statement: `before_statement`, the statement runs, `after_statement`. A jump (``break``, ``continue``, ``raise``):
    both before it jumps. A compound statement: `before_statement` as it begins, then `after_statement` with
    ``statement.header`` each time that its head has worked: the next item of a loop fetched (iteration then counts this
    loop too), its end found (iteration no longer counts it), a test evaluated, a ``with`` entered and left. ``except`` has only
    a header row, at the start of its body. A statement that raises has no `after_statement`. An observer whose
    ``wants_beginnings`` is False has no `before_statement` called.
    """

    def before_statement(self, statement: Statement, iteration: tuple[int, ...], loops: tuple[int, ...]) -> None: ...

    def after_statement(self, statement: Statement, iteration: tuple[int, ...], loops: tuple[int, ...]) -> None: ...

    def wants_stop(self, loop: Statement, iteration: tuple[int, ...]) -> bool:
        """Asked at the head of every iteration, which is the last of `iteration`; True ends the loop as ``break`` would."""


def may_end(observer: CellObserver) -> bool:
    """Whether the observer may end a loop; one that does not say so never does."""
    return bool(getattr(observer, "may_end", False))


def new_hook_name() -> str:
    """What stands in the code for the hook, until `instrument.with_constants`: a text that is in no program."""
    return f"gpumem_magic hook {next(_numbers)}"


class StatementHook:
    """Passes on to an observer what the calls put in by `Instrumenter` say.

    A loop rests after so many iterations and statements in which nothing moved on any device: its iterations are only counted
    then, until something moves. A virtual device tells of each allocation; a real one, and frees, are seen at the next look.

    failure: what went wrong in the observer, in one line, or None. After a failure the observer is left alone and the program
    goes on. Interrupts are the user's and go through.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        observer: CellObserver,
        name: str,
        codes: Collection[CodeType],
        functions: Mapping[CodeType, int] | None = None,
    ) -> None:
        self.failure: str | None = None
        self._sites = sites
        self._observer: CellObserver | None = observer
        self._builtins = OwnBuiltins()
        # Where the program allows itself fewer frames, what it does is not told: none would be left for that.
        self._least_limit = _depth() + _ROOM
        self._codes = codes
        self._headers = [replace(site.statement, header=True) for site in sites]
        self._own_lines = [tuple(sites[loop].statement.line for loop in site.loops) for site in sites]
        self._calls = OpenedCalls({} if functions is None else functions, self)
        # Whether the statement that runs called a function that was opened.
        self._opened = False
        # The statement that has begun, if nothing was told since.
        self._began: int | None = None
        # Where an error left a function that was opened, until the error is caught.
        self._interrupted: Place | None = None
        self._counters = [0] * len(sites)
        self._seen: list[tuple[int, ...] | None] = [None] * len(sites)
        self._current = 0
        self._tells_beginnings = bool(getattr(observer, "wants_beginnings", True))
        self._devices: Devices | None = getattr(observer, "devices", None)
        self._rests: dict[int, Rest] = {
            index: _RESTS[site.statement.kind]() for index, site in enumerate(sites) if site.statement.kind in _RESTS
        }
        self._resting: list[int] = []
        # By loop: how many iterations go without a look at the devices, and when the last was.
        self._blocks: dict[int, int] = {}
        self._looked: dict[int, float] = {}
        # Statements, and iterations of each loop, since something moved.
        self._quiet = 0
        self._quiet_turns = Counter[int]()
        self._moves = 0
        self._thread = 0
        # What a loop that may be ended has fetched, until its variable has it.
        self.item: object = None
        # What moved memory untold, and the loops that rested then.
        self._pending: Place | None = None
        self._untold: list[int] = []
        self.constants: dict[str, object] = {name: self}
        for index, rest in self._rests.items():
            self.constants[rest_name(name, index)] = rest
            if isinstance(rest, ForRest):
                self.constants[turn_name(name, index)] = rest.turn

    def before(self, index: int) -> None:
        __tracebackhide__ = True
        if sys.getrecursionlimit() < self._least_limit:
            return
        if self._resting:
            self._count_untold()
        if self._pending is not None:
            self._tell_pending()
        if self._began is not None or self._interrupted is not None:
            self._tell_interrupted(index)
        self._counters[index] = 0
        self._current = self._began = index
        self._opened = False
        self._seen[index] = iteration = self._iteration(index)
        if self._observer is not None and self._tells_beginnings:
            try:
                tell = self._observer.before_statement
                self._builtins.run(tell, self._sites[index].statement, iteration, self._lines(index))
            except BaseException as error:
                self._failed(error)

    def after(self, index: int) -> None:
        __tracebackhide__ = True
        if sys.getrecursionlimit() < self._least_limit:
            return
        if self._resting:
            self._count_untold()
        if self._pending is not None:
            self._tell_pending()
        if self._interrupted is not None:
            self._tell_interrupted(index)
        # What happened in a function that was opened has rows: the call has one where there is more.
        opened, self._opened = self._opened, False
        statement = self._sites[index].statement
        self._tell(
            replace(statement, header=True, ended=True) if opened else statement,
            self._iteration(index),
            self._lines(index),
        )

    def returned(self, index: int, value: object) -> object:
        """A function gives this back."""
        __tracebackhide__ = True
        self.after(index)
        return value

    def skips(self, index: int) -> bool:
        """A function that may be opened was called. True: it runs untold, and does not call `leaves`."""
        __tracebackhide__ = True
        caller = self._began
        if caller is None or self._observer is None or sys.getrecursionlimit() < self._least_limit:
            return True
        if not self._calls.may_begin(index):
            return True
        self._calls.begin(index, caller, (self._iteration(caller), self._lines(caller)))
        self._began = None
        return False

    def leaves(self) -> None:
        """The function that was opened last is over."""
        began = self._began
        if began is not None and self._interrupted is None:
            self._interrupted, self._began = self._place_of(began), None
        self._current = self._calls.end()
        self._opened = True

    def header(self, index: int) -> None:
        __tracebackhide__ = True
        if sys.getrecursionlimit() < self._least_limit:
            return
        if self._resting:
            self._count_untold()
        if self._pending is not None:
            self._tell_pending()
        if self._began != index or self._interrupted is not None:
            self._tell_interrupted(index)
        self._current = index
        self._seen[index] = iteration = self._iteration(index)
        self._tell(self._headers[index], iteration, self._lines(index))

    def _tell_interrupted(self, index: int) -> None:
        """What began and did not end was left by an error that the program has caught: it has its row before `index` goes on."""
        place, self._interrupted = self._interrupted, None
        if place is None and self._began is not None and self._began != index:
            place = self._place_of(self._began)
        if place is not None:
            self._tell(*place)

    def _place_of(self, index: int) -> Place:
        """Of a statement that has begun."""
        return self._sites[index].statement, self._seen[index] or (), self._lines(index)

    def counted(self, index: int) -> None:
        """A ``while`` is about to make a test that is told, or a loop is over."""
        if self._resting and sys.getrecursionlimit() >= self._least_limit:
            self._count_untold()

    def next_iteration(self, index: int) -> bool:
        """The head of an iteration of the loop `index`. True: leave the loop."""
        __tracebackhide__ = True
        if sys.getrecursionlimit() < self._least_limit:
            self._counters[index] += 1
            return False
        self._rests[index].is_told()
        if self._resting:
            self._count_untold()
        if self._pending is not None:
            self._tell_pending()
        self._counters[index] += 1
        self._quiet_turns[index] += 1
        self._current = index
        header = self._headers[index]
        iteration = (*self._iteration(index), self._counters[index])
        self._tell(header, iteration, (*self._lines(index), header.line))
        if self._observer is None:
            return False
        try:
            if self._quiet >= QUIET_STATEMENTS and self._quiet_turns[index] > QUIET_TURNS:
                self._rest(index)
            ends = bool(self._observer.wants_stop(header, iteration))
        except BaseException as error:
            self._failed(error)
            return False
        if ends:
            self.item = None
        return ends

    def take_item(self, index: int) -> object:
        """What the loop `index` has fetched; nothing here keeps it."""
        item, self.item = self.item, None
        return item

    # ---- rest

    def _rest(self, index: int) -> None:
        """The iterations of a loop, from the next one on, are no longer told: about as many as are over in a moment."""
        if self._devices is None:
            return
        self._thread = threading.get_ident()
        self._devices.tell(self._moved)
        now, before = time.perf_counter(), self._looked.get(index)
        block = self._blocks.get(index, 32)
        block = max(1, block // 2) if before is not None and now - before > LOOK_SECONDS else block * 2
        block = min(block, MOST_TURNS)
        self._blocks[index], self._looked[index] = block, now
        if index not in self._resting:
            self._resting.append(index)
        self._rests[index].begin(block)

    def _count_untold(self) -> None:
        """Counts the iterations that ran untold since the last call."""
        for index in self._resting:
            ran = self._rests[index].count()
            if ran:
                self._counters[index] += ran
                if self._devices is not None:
                    self._devices.left_out(self._sites[index].statement.line, ran)

    def _wake(self) -> None:
        """The next iteration of each loop is told."""
        self._count_untold()
        for index in self._resting:
            self._rests[index].stop()
        self._resting.clear()
        self._blocks.clear()
        self._looked.clear()
        self._quiet = 0
        self._quiet_turns.clear()

    def _moved(self, is_late: bool) -> None:
        """Memory moves now, while a loop rests. is_late: on behalf of a statement before, the last that moved any."""
        if self._devices is None:
            return
        try:
            if self._pending is None:
                untold = [index for index in self._resting if self._rests[index].ran]
                self._wake()
                if not untold:
                    # What runs is told as ever.
                    self._devices.tell(None)
                    return
                self._untold = untold
                self._pending = self._running()
                self._has_row(self._pending)
            elif not is_late:
                place = self._running()
                if place != self._pending:
                    self._devices.moved_until_now(*self._pending)
                    self._pending = place
            self._devices.note_moment()
        except BaseException as error:
            self._failed(error)

    def _tell_pending(self) -> None:
        """Gives what moved memory untold its row; from here on all is told again."""
        pending, self._pending = self._pending, None
        if pending is not None and self._devices is not None:
            self._devices.tell(None)
            self._tell(*pending)

    def _running(self) -> Place:
        """The statement that runs now, its iteration and the lines of its loops, as far as they are counted."""
        index = self._current
        frame = sys._current_frames().get(self._thread)
        while frame is not None and frame.f_code not in self._codes and not self._calls.runs(frame.f_code):
            frame = frame.f_back
        if frame is not None:
            index = self._at(*_position(frame.f_code, frame.f_lasti, frame.f_lineno))
        return self._untold_place(index, self._untold)

    def _untold_place(self, index: int, untold: Sequence[int]) -> Place:
        """A statement's place where these loops ran untold until now."""
        site = self._sites[index]
        around = len(self._lines(index)) - len(site.loops)
        outermost = min((site.loops.index(loop) for loop in untold if loop in site.loops), default=None)
        if outermost is None and index in untold:
            # It fetches the next item. A ``while`` has counted that already.
            header = self._headers[index]
            number = self._counters[index] + (header.kind != "while")
            return header, (*self._iteration(index), number), (*self._lines(index), header.line)
        # Loops inside one that rests are not counted.
        depth = around + (len(site.loops) if outermost is None else outermost + 1)
        return site.statement, self._iteration(index)[:depth], self._lines(index)[:depth]

    def _has_row(self, place: Place) -> None:
        """An iteration that ran untold gets a row: it is not left out."""
        header, (iteration, loops) = place[0].header, place[1:]
        if self._devices is not None and iteration and (not header or place[0].kind == "while"):
            self._devices.left_out(loops[-1], -1)

    def failed(self, traceback: TracebackType | None, codes: Collection[CodeType]) -> Failed | None:
        """The statement of the program (whose module-level code is `codes`) that an error came through. None where the error
        did not come from the program. Keeps nothing of the traceback."""
        place = self._left(traceback, codes)
        return None if place is None else (place[0].text, place[0].line, *place[1:])

    def _left(self, traceback: TracebackType | None, codes: Collection[CodeType]) -> Place | None:
        while traceback is not None and traceback.tb_frame.f_code not in codes:
            traceback = traceback.tb_next
        if traceback is None:
            return None
        traceback = self._calls.innermost(traceback)
        untold = [loop for loop in self._resting if self._rests[loop].ran]
        self._count_untold()
        index = self._at(*_position(traceback.tb_frame.f_code, traceback.tb_lasti, traceback.tb_lineno))
        site, lines = self._sites[index], self._lines(index)
        if untold:
            place = self._untold_place(index, untold)
            self._has_row(place)
            return site.statement, *place[1:]
        iteration = self._seen[index]
        if iteration is None:
            iteration = self._iteration(index)
        if site.statement.kind in _RESTS and self._counters[index]:
            # It failed as it fetched the next item.
            iteration, lines = (*iteration, self._counters[index] + 1), (*lines, site.statement.line)
        return site.statement, iteration, lines

    def silence(self) -> None:
        """The observer is told of nothing more."""
        self._observer = self._devices = None

    def leave(self, traceback: TracebackType | None, codes: Collection[CodeType]) -> None:
        """Tells the observer that the statement which `failed` would name is over."""
        left = self._left(traceback, codes)
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
        counters, site = self._counters, self._sites[index]
        own = tuple([counters[loop] for loop in site.loops])
        return own if site.owner is None else (*self._calls.around(site.owner)[0], *own)

    def _lines(self, index: int) -> tuple[int, ...]:
        """The lines of the loops around a statement, those around the calls that led to it among them."""
        own, owner = self._own_lines[index], self._sites[index].owner
        return own if owner is None else (*self._calls.around(owner)[1], *own)

    def _tell(self, statement: Statement, iteration: tuple[int, ...], loops: tuple[int, ...]) -> None:
        __tracebackhide__ = True
        self._began = None
        if self._observer is not None:
            try:
                self._builtins.run(self._observer.after_statement, statement, iteration, loops)
                self._quiet += 1
                if self._devices is not None and self._devices.moves != self._moves:
                    self._moves = self._devices.moves
                    self._wake()
            except BaseException as error:
                self._failed(error)

    def _failed(self, error: BaseException) -> None:
        """Switches the observer off for its own failure. What interrupts the program goes on its way."""
        if not swallows(error):
            raise error
        self._observer = None
        self.failure = f"{type(error).__name__}: {error}".splitlines()[0]


def _depth() -> int:
    """How many frames the caller is in."""
    frame: FrameType | None = sys._getframe()
    count = 0
    while frame is not None:
        frame, count = frame.f_back, count + 1
    return count


def without_hooks(traceback: TracebackType | None) -> None:
    """Takes our frames out of an interrupt's traceback: what interrupts us interrupts the statement that we were called at."""
    while traceback is not None:
        inner = traceback.tb_next
        if inner is not None and inner.tb_frame.f_globals is globals():
            traceback.tb_next = from_handler(inner)
        traceback = traceback.tb_next


def _position(code: CodeType, instruction: int, line: int | None) -> tuple[int, int | None]:
    """Line and column (UTF-8 bytes; None before Python 3.11) at which a frame is; line 0 for an instruction that has none."""
    if hasattr(code, "co_positions") and instruction >= 0:
        start, _, column, _ = next(itertools.islice(code.co_positions(), instruction // 2, None))
        if start is not None:
            return start, column
    return line or 0, None
