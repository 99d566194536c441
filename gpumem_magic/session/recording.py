"""The recording under way, made with the device that is chosen, and the report of the last one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpumem_magic.devices.base import DeviceError
from gpumem_magic.patching import OwnBuiltins
from gpumem_magic.recording import under_way
from gpumem_magic.recording.progress import CellProgress
from gpumem_magic.recording.quiet import no_automatic_collection
from gpumem_magic.session.device import Chosen, for_recording
from gpumem_magic.session.launches import Launches
from gpumem_magic.uninterrupted import whole

if TYPE_CHECKING:
    from gpumem_magic.causes.why import Why
    from gpumem_magic.recording.model import Failed, Recording
    from gpumem_magic.recording.recorder import Recorder
    from gpumem_magic.report.model import ReportData
    from gpumem_magic.user_report import Report

_last: Report | None = None


class ActiveRecording:
    """A recording under way. At most one in a process: `open_recording` makes it, `close` ends it, and `put_back` whatever
    interrupts it."""

    def __init__(
        self,
        what: Chosen,
        recorder: Recorder,
        why: Why,
        is_running: Callable[[], bool],
        words: Callable[[ReportData], ReportData],
    ) -> None:
        self.is_running = is_running
        self._words = words
        self._chosen = what
        self._recorder = recorder
        self._why = why
        self._lines = True
        self._source = ""
        self._limit: Any = None
        self._builtins = OwnBuiltins()
        self._launches = Launches(open_recording)

    def start(self, user_ns: Mapping[str, Any] | None) -> None:
        self._recorder.start(user_ns)
        self._why.start(user_ns, self._recorder.position)
        self._launches.watch()

    def observer(
        self, max_iterations: int | None = None, lines: bool = True, *, until_repeat: bool = False, source: str = ""
    ) -> CellProgress:
        """Who is told of the cell's statements. source: the program's text, by which loops that train are known."""
        from gpumem_magic.recording.limit import IterationLimit
        from gpumem_magic.recording.repetition import ENOUGH

        self._lines, self._source = lines, source
        self._why.read(source)
        if max_iterations is not None or until_repeat:
            self._limit = IterationLimit(
                max_iterations,
                lambda: until_repeat and self._recorder.alike >= ENOUGH,
                lambda: sum(map(self._recorder.position, self._recorder.logs)),
            )
            self._limit.install()
        return CellProgress(self._recorder, self._limit, source)

    def put_back(self) -> None:
        """Puts everything back that was replaced. May be called twice, also where an interrupt ended the first call."""
        with whole:
            try:
                self._launches.put_back()
                self._why.put_back()
                if self._limit is not None:
                    self._limit.remove()
            finally:
                self._recorder.put_back()
                self._chosen.end_logs()
            under_way.close(self)

    def close(
        self,
        error: BaseException | None = None,
        failed: Failed | None = None,
        user_ns: Mapping[str, Any] | None = None,
        left: BaseException | None = None,
    ) -> Report:
        """Ends the recording and makes the report, which becomes `last_report()`. The error is read and not kept.

        left: what ended the program where that is no error."""
        # A program may put what it likes in the place of `len`; our own work, and PyTorch's, is done with Python's.
        return self._builtins.run(self._closed, error, failed, user_ns, left)

    def _closed(
        self,
        error: BaseException | None,
        failed: Failed | None,
        user_ns: Mapping[str, Any] | None,
        left: BaseException | None,
    ) -> Report:
        global _last
        from gpumem_magic.report.build import build_with_labels
        from gpumem_magic.session.eager_runs import remark
        from gpumem_magic.user_report import Report

        under_way.end()
        self._launches.put_back()
        try:
            with no_automatic_collection():
                # Its patches came last, and go first.
                self._why.stop(user_ns, error)
                recording = self._recorder.finish(error, failed, user_ns, left)
        finally:
            self.put_back()
        recording = replace(recording, primary=self._primary(recording), holds=self._why.holds(recording.logs))
        report, labels = build_with_labels(recording, lines=self._lines, explain=self._why.explain)
        self._chosen.remember(labels)
        remarks = (*self._chosen.notes, *self._own_notes(recording), *report.remarks, *self._on_choices(recording))
        if report.source is not None and (beside := remark(self._source, report.source)):
            remarks = (*remarks, beside)
        _last = Report.of(self._words(self._launches.with_ranks(replace(report, remarks=remarks))))
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
            notes.append(f"Stopped as asked, after {self._limit.ran()}.")
        elif (
            self._recorder.alike >= ENOUGH
            and not recording.error
            and any(log.events for log in recording.logs.values())
        ):
            notes.append("The last iterations repeat exactly: `%%gpumem --until-repeat` ends a run there.")
        return notes

    def _on_choices(self, recording: Recording) -> list[str]:
        if not self._chosen.turned_on or any(log.events for log in recording.logs.values()):
            return []
        return [
            "Where an earlier cell chose the device (`device = 'cuda' if torch.cuda.is_available() else 'cpu'`), there was no "
            "GPU yet: run it again."
        ]


def open_recording(
    device: str | None = None,
    *,
    names: frozenset[str] = frozenset(),
    user_ns: Mapping[str, Any] | None = None,
    own_file: str | None = None,
    is_running: Callable[[], bool] = lambda: True,
    words: Callable[[ReportData], ReportData] = lambda report: report,
) -> ActiveRecording:
    """Begins to record on the chosen device (None: the one that is on or chosen, else this computer's GPU, else a virtual T4).

    names: the variables that the program mentions, looked up in user_ns; own_file: the file name of its code; is_running:
    whether the program still runs, for who finds its recording later; words: tells the report in the words of who reads it,
    where that is no notebook. Raises DeviceError where the device can't be used, or a
    recording is under way.
    """
    if under_way.is_any():
        raise DeviceError("a recording is under way already: measure one program at a time")
    from gpumem_magic.causes.why import Why
    from gpumem_magic.recording.recorder import Recorder

    what = for_recording(device)
    recorder = Recorder(what.machine, primary=what.primary, names=names, own_file=own_file)
    why = Why(what.machine, user_ns)
    active = ActiveRecording(what, recorder, why, is_running, words)
    try:
        # Known before anything is replaced: an interrupt leaves nothing that `under_way.abandon` does not find.
        with whole:
            under_way.open(active)
            active.start(user_ns)
            under_way.begin(recorder)
    except BaseException:
        active.put_back()
        raise
    return active


def last_report() -> Report | None:
    """The report of the last measured cell, statement or script; None before the first."""
    return _last


def remember(report: Report) -> None:
    """Makes a report that was put together of several the last one."""
    global _last
    _last = report


def mark(name: str) -> None:
    """Names this moment of a program that is being measured: it shows as a part of its statement's row. Else does nothing."""
    recording = under_way.current()
    if recording is not None:
        recording.mark(str(name))


def begin_range(label: str) -> Callable[[bool], None]:
    """Begins a part of the row that is being measured; the answer ends it. Does nothing where nothing is measured."""
    recording = under_way.current()
    return recording.begin_range(label) if recording is not None else lambda failed: None
