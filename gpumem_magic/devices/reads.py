"""Lines of the program that read values which nobody knows: how often, and what is known of them besides."""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import islice
from types import CodeType, FrameType

import torch
from torch.utils.data import dataloader

from gpumem_magic.looks.code import OWN, is_runner_file, whose
from gpumem_magic.looks.decisions import (
    divides,
    is_raised_there,
    is_tried,
    leads_to,
    may_be_of_a_value,
    only_waits,
    waits,
)
from gpumem_magic.looks.objects import kinds_of, text, traceback_of
from gpumem_magic.tracebacks import entries

# Reads of one line behind which a loop is taken to wait for a value.
_MANY = 1000
# Turns for which a loop waits for a flag; and where one has waited in vain, for which the next do.
_TURNS = 300
_MORE = 10
_SCRIPTED = (torch.jit.ScriptFunction, torch._C.ScriptMethod)
# What hands a call on, and under which name it has what is called: `VirtualTensor`, and our ``ScriptFunction.__call__``.
_HANDED_ON = {"__torch_function__": "func", "called": "self"}
# What calls a function of the program's as often as what that gives asks for.
_SOLVERS = ("scipy.integrate", "scipy.optimize")
_SCALED_STEP = torch.amp.GradScaler.step.__code__
# They write down what they are given, and the program goes on as before.
_LOGGERS = frozenset(
    (
        "tensorboardX",
        "tensorboard_logger",
        "wandb",
        "mlflow",
        "comet_ml",
        "neptune",
        "aim",
        "clearml",
        "swanlab",
        "visdom",
    )
)
# Draws the seed of its workers, on the default device.
_SEEDING = dataloader._BaseDataLoaderIter.__init__.__code__
# A module that has moved is no value.
_MOVING = frozenset({torch.nn.Module.cpu.__code__, torch.nn.Module.to.__code__})
_Line = tuple[str, int]


class Reads:
    """counts: how often each line read. supplied: how often it was given a value of the user's.

    returned: how often what it had copied to the host went to a device again, as it was.
    marks: how often it was a whole number ("whole"), a list of them ("list"), a flag ("flag"), a size ("sized"), compared by
    `torch.testing`, which raises or does nothing ("compared"), read by TorchScript in the line's stead ("scripted"), by
    `GradScaler.step`, which skips the optimizer's ("stepping"), copied to the host with a module ("moved"), the seed that a
    DataLoader draws for its workers ("seeding"), read by a library that writes it down ("logged"), or by an operator whose own
    memory goes by it ("working"), or an error came of it that was caught ("caught").
    solved: the lines that read in a function which a solver called: it goes on, or not, by what that gave.
    stacks: where it was called from, at its first read: the program's places, behind an optimizer's own that read in its stead.
    widest: how many a line selected by a mask of several dimensions, where that is the most that there can be.
    instructions: those of the line that read, as a line may have several statements, with their line and column in bytes.
    """

    def __init__(self) -> None:
        self.counts: Counter[_Line] = Counter()
        self.supplied: Counter[_Line] = Counter()
        self.marks: Counter[tuple[str, int, str]] = Counter()
        self.returned: Counter[_Line] = Counter()
        self.solved: set[_Line] = set()
        self.stacks: dict[_Line, tuple[_Line, ...]] = {}
        self.widest: dict[_Line, int] = {}
        self.instructions: dict[_Line, dict[int, tuple[int | None, int | None]]] = defaultdict(dict)
        # The flag that each line was given last, and how often in a row.
        self.flags: dict[_Line, tuple[bool, int]] = {}
        # The lines whose loops were let go.
        self._let_go: set[_Line] = set()
        # The line that read last.
        self.latest: _Line | None = None
        # The error (`id`) that the program handles, and that was looked at.
        self._seen = 0

    def note(
        self, line: _Line, by_user: bool, dtype: torch.dtype | None, sized: bool = False, several: bool = False
    ) -> None:
        if line not in self.stacks:
            self.stacks[line] = tuple(_stack(line))
        self.counts[line] += 1
        if by_user:
            self.supplied[line] += 1
            return
        self.latest = line
        if line not in self.solved and any(name in sys.modules for name in _SOLVERS) and _is_solved():
            self.solved.add(line)
        if sized:
            self.marks[line[0], line[1], "sized"] += 1
        frame, reader = _reader(line)
        if frame is not None and frame.f_lasti not in (known := self.instructions[line]):
            known[frame.f_lasti] = _position(frame.f_code, frame.f_lasti)
        if reader:
            self.marks[line[0], line[1], reader] += 1
        if dtype is not None and not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool):
            self.marks[line[0], line[1], "whole"] += 1
            if several:
                self.marks[line[0], line[1], "list"] += 1
        elif dtype == torch.bool:
            self.marks[line[0], line[1], "flag"] += 1
        if self.counts[line] == _MANY and (reader == "scripted" or (waits(*line) and not self._is_let_go(line))):
            self._warn(
                line,
                _MANY,
                "its loop may never end. values=real behind the card's name computes them; --until-repeat and "
                "--max-iterations end a run",
            )

    def flag(self, line: _Line, value: bool) -> bool:
        """What a line is given for a flag that nobody knows: this value; after many turns of a loop that only waits for the
        other, that one."""
        before, times = self.flags.get(line, (value, 0))
        times = times + 1 if before is value else 1
        self.flags[line] = value, times
        if times < (_MORE if line in self._let_go else _TURNS) or not self._is_let_go(line):
            return value
        if line not in self._let_go:
            self._let_go.add(line)
            self._warn(line, _TURNS, "its loop is ended here. values=real behind the card's name computes them")
        del self.flags[line]
        return not value

    def _is_let_go(self, line: _Line) -> bool:
        return line in self.flags and only_waits(*line)

    def _warn(self, line: _Line, times: int, what: str) -> None:
        warnings.warn(
            f"line {line[1]} of {os.path.basename(line[0])} has read values {times:,} times that the virtual GPU does not "
            f"know: {what}",
            stacklevel=4,
        )

    def may_raise(self, line: _Line) -> None:
        """The line runs an operator that fails for some values. Noted where the program would catch that."""
        stack = tuple(_stack(line))
        if any(whose(place[0]) == OWN and is_tried(*place) for place in (line, *stack)):
            self._mark(line, stack, "tried")

    def works(self, line: _Line) -> None:
        """The line runs an operator whose own memory goes by values that nobody knows."""
        self._mark(line, tuple(_stack(line)), "working")

    def _mark(self, line: _Line, stack: tuple[_Line, ...], mark: str) -> None:
        self.stacks.setdefault(line, stack)
        self.counts[line] += 1
        self.latest = line
        self.marks[line[0], line[1], mark] += 1

    def places(self, line: _Line) -> tuple[tuple[int, int], ...]:
        """Where in the line it was read: lines, and columns in bytes. Empty where Python does not tell, as before 3.11."""
        found = {*self.instructions.get(line, {}).values()}
        known = [(first, column) for first, column in found if first is not None and column is not None]
        return tuple(sorted(known)) if len(known) == len(found) else ()

    def note_caught(self, ending: BaseException | None = None) -> None:
        """To be called where the program may be in an ``except``: marks the lines that its error came of. ending: what it ends
        with, which it did not catch."""
        error = sys.exc_info()[1]
        if error is None or error is ending:
            self._seen = 0
        elif id(error) != self._seen:
            self._seen = id(error)
            if may_be_of_a_value(kinds_of(error), _text_of(error)) or _is_raised(error):
                self._caught(error)

    def _caught(self, error: BaseException) -> None:
        frame = error.__traceback__
        leads = divides if isinstance(error, ZeroDivisionError) else leads_to
        while frame is not None:
            file, raised = frame.tb_frame.f_code.co_filename, frame.tb_lineno
            for name, line in self.counts:
                if name == file and raised is not None and line <= raised and leads(file, line, raised):
                    self.marks[name, line, "caught"] += 1
            frame = frame.tb_next


def _position(code: CodeType, offset: int) -> tuple[int | None, int | None]:
    if sys.version_info < (3, 11):
        return None, None
    first, _, column, _ = next(islice(code.co_positions(), offset // 2, None), (None, None, None, None))
    return first, column


def _is_raised(error: BaseException) -> bool:
    """Whether a ``raise`` raised it, and not Python or what is written in C."""
    *_, last = [None, *entries(traceback_of(error))]
    return last is not None and is_raised_there(last.tb_frame.f_code.co_filename, last.tb_lineno or 0)


def _text_of(error: BaseException) -> str:
    """An error's text as it was given, without asking the error."""
    given = BaseException.args.__get__(error)  # type: ignore[attr-defined]
    return given[0] if given and type(given[0]) is str else ""


def _reader(line: _Line) -> tuple[FrameType | None, str]:
    """The frame of the line, and who reads in its stead: `torch.testing` ("compared"), as `torch.jit.trace` has it check what it
    traced, a function or module in TorchScript ("scripted"), whose calls are handed on as other functions' are,
    `GradScaler.step` ("stepping"), a module that moves to the host ("moved"), a DataLoader ("seeding"), or a library that only
    writes it down ("logged"), to which the line may belong; else "".
    """
    frame: FrameType | None = sys._getframe(2)
    reader = ""
    while frame is not None and (frame.f_code.co_filename, frame.f_lineno) != line:
        if not reader and frame.f_globals.get("__name__", "").startswith("torch.testing."):
            reader = "compared"
        handed = _HANDED_ON.get(frame.f_code.co_name)
        if not reader and handed is not None and isinstance(frame.f_locals.get(handed), _SCRIPTED):
            reader = "scripted"
        if not reader and frame.f_code is _SCALED_STEP:
            reader = "stepping"
        if not reader and frame.f_code in _MOVING:
            reader = "moved"
        if not reader and frame.f_code is _SEEDING:
            reader = "seeding"
        frame = frame.f_back
    if not reader and frame is not None and text(frame.f_globals.get("__name__")).partition(".")[0] in _LOGGERS:
        reader = "logged"
    return frame, reader


def _is_solved() -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_SOLVERS):
            return True
        frame = frame.f_back
    return False


def _stack(line: _Line) -> Iterator[_Line]:
    """The line of an optimizer or schedule that reads, then the program's; where a library reads, those of its package, too."""
    frame: FrameType | None = sys._getframe(2)
    package = None
    while frame is not None:
        place, name = (frame.f_code.co_filename, frame.f_lineno or 0), frame.f_globals.get("__name__", "")
        if name.startswith("IPython.") or is_runner_file(place[0]):
            # What runs the shell or the script is no part of the program.
            return
        if place == line:
            package = name.partition(".")[0]
        if package is None:
            if name.startswith("torch.optim."):
                yield place
        elif whose(place[0]) == OWN or name.partition(".")[0] == package:
            yield place
        frame = frame.f_back
