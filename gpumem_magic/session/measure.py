"""Measuring a block of Python outside notebooks."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from gpumem_magic.looks.shell import running_shell
from gpumem_magic.recording import under_way
from gpumem_magic.report.model import ReportData
from gpumem_magic.report.script_words import told_in_python
from gpumem_magic.session.recording import ActiveRecording, open_recording

if TYPE_CHECKING:
    from gpumem_magic.user_report import Report


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


def _as_it_is(report: ReportData) -> ReportData:
    return report


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
    active: ActiveRecording | None = None
    error: BaseException | None = None
    nested = under_way.is_any()
    try:
        # In IPython the report's remedies can be typed.
        words = _as_it_is if running_shell() is not None else told_in_python
        active = open_recording(device, names=_names_of(frame.f_code), user_ns=names, words=words)
        yield measurement
    except BaseException as raised:
        error = raised
        raise
    finally:
        try:
            if active is not None:
                measurement._report = active.close(error, user_ns=names)
        finally:
            if not nested:
                under_way.abandon()
            del frame, names, error
