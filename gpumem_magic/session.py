"""What the faces (magics, command, `measure`) share: the device that is chosen, the recording under way, the last report."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpumem_magic.recording.instrument import Statement
    from gpumem_magic.recording.recorder import Recorder
    from gpumem_magic.report.model import Report
    from gpumem_magic.virtual.gpu import VirtualMachine

DEFAULT_DEVICE = "T4"

_last: Report | None = None
_active: ActiveRecording | None = None


class DeviceError(Exception):
    """A device cannot be used. The text is one line and says what to do."""


# ---- devices


def choose_device(name: str) -> str:
    """Turns a virtual device on and returns a sentence about it. Raises DeviceError."""
    from gpumem_magic.virtual import catalog, gpu

    if _active is not None:
        raise DeviceError("a recording is under way: choose the device in a cell that is not measured")
    before = gpu.current()
    try:
        if isinstance(catalog.parse(name), catalog.RealDevice):
            return _choose_real(name)
        left = _live_storages(before)
        machine = gpu.turn_on(name)
    except (gpu.DeviceError, catalog.UnknownDevice) as error:
        raise DeviceError(str(error)) from None
    lost = f" {left} tensors of {before.spec.text} can't be used any more." if before is not None and left else ""
    return f"{_machine_words(machine)} is on: code on cuda runs without a GPU, and without computing.{lost}"


def _choose_real(name: str) -> str:
    from gpumem_magic.virtual import gpu

    if gpu.current() is not None:
        device_off()
    raise DeviceError(_real_device_words(name))


def _real_device_words(name: str) -> str:
    import torch

    if not torch.cuda.is_available():
        return f"{name}: this computer has no CUDA GPU that PyTorch can use; `%gpumem_device` lists the virtual ones"
    return f"{name}: real GPUs can't be measured yet; `%gpumem_device T4` (before CUDA is used) measures without one"


def device_off() -> str:
    """Turns the virtual device off and returns a sentence. Raises DeviceError."""
    from gpumem_magic.virtual import gpu

    if _active is not None:
        raise DeviceError("a recording is under way: turn the device off in a cell that is not measured")
    machine = gpu.current()
    if machine is None:
        return "No virtual device was on."
    try:
        left = gpu.turn_off()
    except gpu.DeviceError as error:
        raise DeviceError(str(error)) from None
    words = f"The virtual {machine.spec.text} is off, and PyTorch is as it was."
    if left:
        words += f" {left} tensors were still on it: they can't be used any more."
    return words


def device_state() -> str:
    """What is on, and the names that there are, for a bare ``%gpumem_device``."""
    from gpumem_magic.virtual import catalog, gpu

    machine = gpu.current()
    state = "No virtual device is on." if machine is None else f"{_machine_words(machine)} is on."
    return f"{state}\n\n{catalog.describe()}"


def state_text() -> str:
    """The memory of every device now, one line each, for a bare ``%gpumem``."""
    from gpumem_magic.units import human
    from gpumem_magic.virtual import gpu

    machine = gpu.current()
    if machine is None:
        return (
            f"No device is on. `%%gpumem` turns a virtual {DEFAULT_DEVICE} on where there is no GPU; "
            "`%gpumem_device NAME` chooses another."
        )
    machine.settle()
    lines = []
    for device in machine.devices:
        now = device.counters()
        lines.append(
            f"cuda:{device.index}  virtual {device.model.name}  allocated {human(now.allocated)}  "
            f"reserved {human(now.reserved)}  nvidia-smi {_smi_line(device)}"
        )
    return "\n".join(lines)


def smi_lines() -> list[str]:
    """``3769MiB / 16160MiB`` for every device. Raises DeviceError where there is none."""
    from gpumem_magic.virtual import gpu

    machine = gpu.current()
    if machine is None:
        raise DeviceError("no device is on: `%gpumem_device NAME` turns a virtual one on")
    machine.settle()
    return [_smi_line(device) for device in machine.devices]


def _smi_line(device: Any) -> str:
    from gpumem_magic.virtual import smi

    return smi.line(device.used_bytes(), device.model.smi_total_bytes)


def _machine_words(machine: VirtualMachine) -> str:
    names = [device.model.name for device in machine.devices]
    count = f"{len(names)} x " if len(names) > 1 else ""
    name = names[0] if names[0].startswith("Virtual") else f"virtual {names[0]}"
    return f"A {count}{name} ({machine.spec.text})"


def _live_storages(machine: VirtualMachine | None) -> int:
    if machine is None:
        return 0
    machine.settle()
    return len(machine.engine.table)


def _machine_for(name: str | None) -> tuple[VirtualMachine, list[str]]:
    """The machine to record, turned on if need be, and what to tell the reader about that."""
    import torch

    from gpumem_magic.virtual import catalog, gpu

    machine = gpu.current()
    if name is not None and (machine is None or not _is_on(name, machine)):
        choose_device(name)
        machine = gpu.current()
    if machine is not None:
        return machine, []
    if torch.cuda.is_available():
        raise DeviceError(_real_device_words("cuda"))
    try:
        machine = gpu.turn_on(DEFAULT_DEVICE)
    except (gpu.DeviceError, catalog.UnknownDevice) as error:
        raise DeviceError(str(error)) from None
    return machine, [
        f"No GPU is here and no device was chosen: this ran on a virtual {DEFAULT_DEVICE}, which stays on. "
        "`%gpumem_device NAME` chooses another, `%gpumem_device off` ends it."
    ]


def _is_on(name: str, machine: VirtualMachine) -> bool:
    from gpumem_magic.virtual import catalog

    try:
        spec = catalog.parse(name)
    except catalog.UnknownDevice as error:
        raise DeviceError(str(error)) from None
    return isinstance(spec, catalog.DeviceSpec) and spec.models == machine.spec.models


# ---- recordings


class ActiveRecording:
    """A recording under way. At most one in a process: `open_recording` makes it, `close` ends it."""

    def __init__(self, machine: VirtualMachine, recorder: Recorder, notes: list[str]) -> None:
        self._machine = machine
        self._recorder = recorder
        self._notes = notes
        self._turned_on_here = bool(notes)
        self._lines = True
        self._limit: Any = None

    def observer(
        self, max_iterations: int | None = None, lines: bool = True, *, until_repeat: bool = False, source: str = ""
    ) -> CellProgress:
        """Who is told of the cell's statements. source: the program's text, by which loops that train are known."""
        from gpumem_magic.recording.limit import IterationLimit
        from gpumem_magic.recording.repetition import ENOUGH

        self._lines = lines
        if max_iterations is not None or until_repeat:
            self._limit = IterationLimit(max_iterations, lambda: until_repeat and self._recorder.alike >= ENOUGH)
            self._limit.install()
        return CellProgress(self._recorder, self._limit, source)

    def mark(self, label: str) -> None:
        self._recorder.mark(label)

    def close(
        self,
        error: BaseException | None = None,
        failed: tuple[Statement, tuple[int, ...], tuple[int, ...]] | None = None,
        user_ns: Mapping[str, Any] | None = None,
    ) -> Report:
        """Ends the recording and makes the report, which becomes `last_report()`. The error is read and not kept."""
        global _active, _last
        from gpumem_magic.report.build import build_with_labels

        _active = None
        place = None
        if failed is not None:
            statement, iteration, loops = failed
            place = (statement.text, statement.line, iteration, loops)
        try:
            recording = self._recorder.finish(error, place, user_ns)
        finally:
            if self._limit is not None:
                self._limit.remove()
        report, labels = build_with_labels(recording, lines=self._lines)
        for device in self._machine.devices:
            device.remember(labels.get(device.index, {}))
        _last = replace(report, notes=(*self._notes, *self._own_notes(recording), *report.notes))
        return _last

    def _own_notes(self, recording: Any) -> list[str]:
        from gpumem_magic.recording.repetition import ENOUGH

        notes = []
        if self._limit is not None and self._limit.stopped:
            count = self._limit.steps
            notes.append(f"Stopped as asked, after {count} training iteration{'s' if count != 1 else ''}.")
        elif self._recorder.alike >= ENOUGH and any(log.events for log in recording.logs.values()):
            notes.append(
                "The last iterations repeat exactly: `%%gpumem --until-repeat` ends a run there and shows the same."
            )
        if self._turned_on_here and not any(log.events for log in recording.logs.values()):
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
    """Begins to record on the chosen device (None: the one that is on, else a virtual T4 where there is no GPU).

    names: the variables that the program mentions, looked up in user_ns; own_file: the file name of its code. Raises DeviceError
    where the device can't be used, or a recording is under way.
    """
    global _active
    if _active is not None:
        raise DeviceError("a recording is under way already: measure one program at a time")
    from gpumem_magic.recording.recorder import Recorder

    machine, notes = _machine_for(device)
    recorder = Recorder(machine, primary=machine.face.current_device(), names=names, own_file=own_file)
    recorder.start(user_ns)
    _active = ActiveRecording(machine, recorder, notes)
    return _active


# ---- what users call


def last_report() -> Report | None:
    """The report of the last measured cell, statement or script; None before the first."""
    return _last


def mark(name: str) -> None:
    """Names this moment of a program that is being measured: it shows as a part of its statement's row. Else does nothing."""
    if _active is not None:
        _active.mark(str(name))


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

    device: a name as for ``%gpumem_device``; None is the device that is on, else a virtual T4 where there is no GPU. Raises
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
