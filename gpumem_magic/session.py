"""What the faces (magics, command, `measure`) share: the device that is chosen, the recording under way, the last report."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from gpumem_magic import chosen
from gpumem_magic.chosen import DEFAULT_DEVICE, DeviceError
from gpumem_magic.recording.quiet import no_automatic_collection

if TYPE_CHECKING:
    from gpumem_magic.causes.why import Why
    from gpumem_magic.recording.instrument import Statement
    from gpumem_magic.recording.model import Recording
    from gpumem_magic.recording.recorder import Recorder
    from gpumem_magic.user_report import Report

__all__ = [
    "DEFAULT_DEVICE",
    "ActiveRecording",
    "CellProgress",
    "DeviceError",
    "Measurement",
    "choose_device",
    "device_off",
    "device_state",
    "is_device_chosen",
    "last_report",
    "mark",
    "measure",
    "open_recording",
    "smi_lines",
    "state_text",
]

_last: Report | None = None
_active: ActiveRecording | None = None


# ---- devices


def choose_device(name: str) -> str:
    """Turns a virtual device on, or chooses a real one, and returns a sentence about it. Raises DeviceError."""
    if _active is not None:
        raise DeviceError("a recording is under way: choose the device in a cell that is not measured")
    return chosen.choose(name)


def is_device_chosen() -> bool:
    """Whether a virtual device is on, or a GPU was chosen."""
    return chosen.is_any()


def device_off() -> str:
    """Turns the virtual device off and returns a sentence. Raises DeviceError."""
    if _active is not None:
        raise DeviceError("a recording is under way: turn the device off in a cell that is not measured")
    return chosen.off()


device_state = chosen.state
state_text = chosen.memory_text
smi_lines = chosen.smi_lines


# ---- recordings


class ActiveRecording:
    """A recording under way. At most one in a process: `open_recording` makes it, `close` ends it."""

    def __init__(self, what: chosen.Chosen, recorder: Recorder, why: Why) -> None:
        self._chosen = what
        self._recorder = recorder
        self._why = why
        self._lines = True
        self._limit: Any = None

    def observer(
        self, max_iterations: int | None = None, lines: bool = True, *, until_repeat: bool = False, source: str = ""
    ) -> CellProgress:
        """Who is told of the cell's statements. source: the program's text, by which loops that train are known."""
        from gpumem_magic.recording.limit import IterationLimit
        from gpumem_magic.recording.repetition import ENOUGH

        self._lines = lines
        self._why.read(source)
        if max_iterations is not None or until_repeat:
            self._limit = IterationLimit(max_iterations, lambda: until_repeat and self._recorder.alike >= ENOUGH)
            self._limit.install()
        return CellProgress(self._recorder, self._limit, source)

    def mark(self, label: str) -> None:
        self._recorder.mark(label)

    def begin_range(self, label: str) -> Callable[[bool], None]:
        return self._recorder.begin_range(label)

    def close(
        self,
        error: BaseException | None = None,
        failed: tuple[Statement, tuple[int, ...], tuple[int, ...]] | None = None,
        user_ns: Mapping[str, Any] | None = None,
    ) -> Report:
        """Ends the recording and makes the report, which becomes `last_report()`. The error is read and not kept."""
        global _active, _last
        from gpumem_magic.report.build import build_with_labels
        from gpumem_magic.user_report import Report

        _active = None
        place = None
        if failed is not None:
            statement, iteration, loops = failed
            place = (statement.text, statement.line, iteration, loops)
        try:
            with no_automatic_collection():
                # Its patches came last, and go first.
                self._why.stop(user_ns, error)
                recording = self._recorder.finish(error, place, user_ns)
        finally:
            if self._limit is not None:
                self._limit.remove()
        recording = replace(recording, primary=self._primary(recording))
        report, labels = build_with_labels(recording, lines=self._lines, explain=self._why.explain)
        self._chosen.remember(labels)
        notes = (*self._chosen.notes, *self._own_notes(recording), *report.notes)
        _last = Report.of(replace(report, notes=notes))
        return _last

    def _primary(self, recording: Recording) -> int:
        """The device that the report is about: the one that was asked for, or else the one that the program used."""
        first = recording.primary
        used = [index for index, log in sorted(recording.logs.items()) if log.events or log.start]
        if self._chosen.named or first in used or not used:
            return first
        return used[0]

    def _own_notes(self, recording: Recording) -> list[str]:
        from gpumem_magic.recording.repetition import ENOUGH

        notes = []
        if self._limit is not None and self._limit.stopped:
            count = self._limit.steps
            notes.append(f"Stopped as asked, after {count} training iteration{'s' if count != 1 else ''}.")
        elif self._recorder.alike >= ENOUGH and any(log.events for log in recording.logs.values()):
            notes.append(
                "The last iterations repeat exactly: `%%gpumem --until-repeat` ends a run there and shows the same."
            )
        if self._chosen.turned_on and not any(log.events for log in recording.logs.values()):
            notes.append(
                "There was no GPU before this cell, so code that asked earlier was sent to the CPU "
                "(`device = 'cuda' if torch.cuda.is_available() else 'cpu'`): run the cells that choose the device again."
            )
        return notes


class CellProgress:
    """Passes a cell's statements on to the recorder, and ends loops that are long enough (the observer of `recording.cell`)."""

    def __init__(self, recorder: Recorder, limit: Any, source: str) -> None:
        self._recorder = recorder
        self._limit = limit
        self._source = source.splitlines()

    def before_statement(self, statement: Statement, iteration: tuple[int, ...], loops: tuple[int, ...]) -> None:
        if self._limit is not None:
            self._limit.statement_began(statement)

    def after_statement(self, statement: Statement, iteration: tuple[int, ...], loops: tuple[int, ...]) -> None:
        self._recorder.checkpoint(
            "statement",
            statement.text.partition("\n")[0],
            statement.text,
            statement.line,
            iteration,
            loops,
            header=statement.header,
        )

    def wants_stop(self, loop: Statement, iteration: tuple[int, ...]) -> bool:
        if self._limit is None:
            return False
        return bool(self._limit.loop_turns(loop, iteration, self._calls_step(loop)))

    def _calls_step(self, loop: Statement) -> bool:
        """Whether the loop's body has a line with ``.step(``: it trains, and its iterations are counted by steps."""
        head = self._source[loop.line - 1] if 0 < loop.line <= len(self._source) else ""
        indent = len(head) - len(head.lstrip())
        for line in self._source[loop.line :]:
            if line.strip() and len(line) - len(line.lstrip()) <= indent:
                return False
            if ".step(" in line:
                return True
        return False


def open_recording(
    device: str | None = None,
    *,
    names: frozenset[str] = frozenset(),
    user_ns: Mapping[str, Any] | None = None,
    own_file: str | None = None,
) -> ActiveRecording:
    """Begins to record on the chosen device (None: the one that is on or chosen, else this computer's GPU, else a virtual T4).

    names: the variables that the program mentions, looked up in user_ns; own_file: the file name of its code. Raises DeviceError
    where the device can't be used, or a recording is under way.
    """
    global _active
    if _active is not None:
        raise DeviceError("a recording is under way already: measure one program at a time")
    from gpumem_magic.causes.why import Why
    from gpumem_magic.recording.recorder import Recorder

    what = chosen.for_recording(device)
    recorder = Recorder(what.machine, primary=what.primary, names=names, own_file=own_file)
    why = Why(what.machine, user_ns)
    recorder.start(user_ns)
    why.start(user_ns, recorder.position)
    _active = ActiveRecording(what, recorder, why)
    return _active


# ---- what users call


def last_report() -> Report | None:
    """The report of the last measured cell, statement or script; None before the first."""
    return _last


def mark(name: str) -> None:
    """Names this moment of a program that is being measured: it shows as a part of its statement's row. Else does nothing."""
    if _active is not None:
        _active.mark(str(name))


def begin_range(label: str) -> Callable[[bool], None]:
    """Begins a part of the row that is being measured; the answer ends it. Does nothing where nothing is measured."""
    return _active.begin_range(label) if _active is not None else lambda failed: None


class _FrameNames(Mapping[str, Any]):
    """The variables of a running function as they are now, and the globals behind them."""

    def __init__(self, frame: FrameType) -> None:
        self._frame = frame

    def __getitem__(self, name: str) -> Any:
        variables = self._frame.f_locals
        return variables[name] if name in variables else self._frame.f_globals[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._frame.f_globals, **self._frame.f_locals})

    def __len__(self) -> int:
        return len({**self._frame.f_globals, **self._frame.f_locals})


def _names_of(code: CodeType) -> frozenset[str]:
    return frozenset((*code.co_varnames, *code.co_cellvars, *code.co_freevars, *code.co_names))


class Measurement:
    """What ``with measure() as m`` gives: `m.report` is there after the block."""

    def __init__(self) -> None:
        self._report: Report | None = None

    @property
    def report(self) -> Report:
        """The report. Raises RuntimeError inside the block, which is not over yet."""
        if self._report is None:
            raise RuntimeError("the report is made at the end of the `with` block")
        return self._report


@contextmanager
def measure(device: str | None = None) -> Iterator[Measurement]:
    """Measures a block of code outside notebooks: rows before and after, with its iterations, phases, ranges and marks.

    device: a name as for ``%gpumem_device``; None is the device that is on, else this computer's GPU, else a virtual T4. Raises
    DeviceError before the block where the device can't be used. The block's own error goes through, and the report is there.
    """
    measurement = Measurement()
    # The caller's frame, behind contextlib's: its variables name what lives on the device.
    frame = sys._getframe(2)
    names = _FrameNames(frame)
    active = open_recording(device, names=_names_of(frame.f_code), user_ns=names)
    error: BaseException | None = None
    try:
        yield measurement
    except BaseException as raised:
        error = raised
        raise
    finally:
        measurement._report = active.close(error, user_ns=names)
        del frame, names, error
