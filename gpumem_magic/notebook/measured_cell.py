"""Measuring one run of a cell: started before it, ended and shown after it, also where the cell fails."""

# IPython's errors carry no types.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import threading
from collections.abc import Collection
from traceback import walk_stack
from types import CodeType, TracebackType
from typing import Any, Protocol

from IPython.core.error import UsageError

from gpumem_magic.devices.base import DeviceError
from gpumem_magic.failures import swallows
from gpumem_magic.looks.objects import is_a
from gpumem_magic.notebook.giving import give_report
from gpumem_magic.notebook.shell_hooks import result_of_cell, show_as_plain_once
from gpumem_magic.recording import under_way
from gpumem_magic.recording.cell import CellRun
from gpumem_magic.recording.hook import without_hooks
from gpumem_magic.recording.progress import StopRun
from gpumem_magic.session import recording
from gpumem_magic.tracebacks import cut
from gpumem_magic.uninterrupted import whole


class Magics(Protocol):
    """What is needed of the magics: their shell, and the cell that one of them measures now."""

    shell: Any
    running: MeasuredCell | None


class MeasuredCell:
    """The measuring around one run. What fails in it becomes a warning; the cell's own result or error stands.

    Used as ``try: with cell: ... finally: cell.end()``: an interrupt may come before `__enter__` has ended, and again
    while `__exit__` works. runs: the code objects of the functions that do so.
    """

    def __init__(self, magics: Magics, run: CellRun, options: argparse.Namespace, runs: Collection[CodeType]) -> None:
        # Where the cell awaits: the coroutine that runs it.
        self.coroutine: Any = None
        self._magics = magics
        self._shell = magics.shell
        self._run = run
        self._options = options
        self._runs = runs
        self._recording: Any = None
        self._result = result_of_cell(magics.shell)
        self._nested = True
        self._inside: Any = None
        self._progress: Any = None
        # asyncio's, where the cell awaits in one.
        self._loop: asyncio.AbstractEventLoop | None = None

    def is_running(self) -> bool:
        """Whether the program is still between the cell's beginning and its end."""
        if self.coroutine is not None:
            if self.coroutine.cr_frame is None or self.coroutine.cr_running:
                return bool(self.coroutine.cr_running)
            return self._loop is None or self._loop.is_running()
        frames = sys._current_frames()
        # Not what looks: a frame in a variable of its own would keep all others until a garbage collection.
        frames[threading.get_ident()] = sys._getframe(1)
        return any(
            # (The frames of another cell have the same code.)
            frame.f_code in self._runs and any(value is self for value in frame.f_locals.values())
            for top in frames.values()
            for frame, _ in walk_stack(top)
        )

    def __enter__(self) -> None:
        outer = self._magics.running
        self._nested = outer is not None and outer is not self and outer.is_running()
        if self._nested:
            _warn("a nested %gpumem does not measure: its code runs as part of the outer one")
            return
        run = self._run
        self._magics.running = self
        if self.coroutine is not None:
            with contextlib.suppress(RuntimeError):
                self._loop = asyncio.get_running_loop()
            self._shell.events.register("post_execute", self._end_if_left)
        self._look_inside()
        try:
            self._recording = recording.open_recording(
                self._options.device,
                names=run.names,
                user_ns=self._shell.user_ns,
                own_file=run.filename,
                is_running=self.is_running,
            )
            observer = self._recording.observer(
                self._options.max_iterations,
                not self._options.no_lines,
                until_repeat=self._options.until_repeat,
                source=run.source,
            )
            run.observe(observer)
            self._show_progress()
        except DeviceError as error:
            raise UsageError(str(error)) from None
        except Exception as error:
            if not swallows(error):
                raise
            _warn(f"measuring is not possible here ({_in_one_line(error)}); the cell runs unmeasured")

    def end(self) -> None:
        """Puts everything back, whatever happened, and lets go of the program."""
        try:
            self.put_back()
        finally:
            self._run.forget()
            self._result = self._recording = None

    def put_back(self) -> None:
        """May be called twice."""
        if self._nested:
            return
        with whole:
            try:
                if self._progress is not None:
                    self._progress.stop()
                if self._inside is not None:
                    self._inside.remove()
            finally:
                under_way.abandon()
                self._magics.running = None
                if self._end_if_left in self._shell.events.callbacks["post_execute"]:
                    self._shell.events.unregister("post_execute", self._end_if_left)

    def _end_if_left(self) -> None:
        """Ctrl-C in a terminal leaves a cell where it awaits. If an event loop goes on with it later, then unmeasured."""
        if not self.is_running():
            self.put_back()
            self._nested = True
            self._recording = self._inside = None
            self._run.silence()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """True, which ends the cell without an error, only where a limit on iterations left it."""
        if self._run.stopped is not None:
            error, traceback = self._run.stopped, self._run.stopped.__traceback__
        stopped = error is not None and not self._nested and is_a(error, StopRun)
        exceeded = None
        without_hooks(traceback)
        try:
            if stopped:
                self._run.leave(traceback)
            if self._recording is not None:
                place = None if error is None or stopped else self._run.failed(traceback)
                report = self._recording.close(None if stopped else error, place, self._shell.user_ns)
                self.put_back()
                self._show(report)
                exceeded = self._exceeded()
            if error is not None and not stopped and self._result is not None:
                show_as_plain_once(self._shell, self._result, error, traceback)
        except Exception as own:
            if not swallows(own):
                raise
            _warn(f"the report could not be made ({_in_one_line(own)}); the cell itself ran normally")
        except KeyboardInterrupt as own:
            __tracebackhide__ = True
            _warn("interrupted while the report was made: there is none. The cell itself had ended")
            if error is None or stopped:
                # The cells behind it are not to run.
                raise cut(own) from None
        for note in self._inside.notes() if self._inside is not None else ():
            _warn(note)
        if self._run.hook_failure is not None:
            _warn(f"measuring stopped partway ({self._run.hook_failure}); the cell itself ran on")
        if exceeded is not None:
            if self._options.warn or (error is not None and not stopped):
                _warn(exceeded)
            else:
                from gpumem_magic.notebook.budget import BudgetExceeded

                raise BudgetExceeded(exceeded) from None
        return stopped

    def _show_progress(self) -> None:
        """A bar for who waits for the cell, where a notebook's page is in front of it."""
        if self._options.quiet or getattr(self._shell, "kernel", None) is None:
            return
        from gpumem_magic.widgets.progress import in_notebook

        self._progress = in_notebook(self._shell)
        if self._progress is not None:
            self._progress.start()

    def _look_inside(self) -> None:
        """Rewrites the functions of ``--into`` for the run. Raises UsageError, in one line."""
        if self._options.into is None:
            return
        from gpumem_magic.recording.inside import FunctionRewriter, InsideError, find_function

        names = [name.strip() for name in self._options.into.split(",") if name.strip()]
        try:
            functions = [find_function(name, self._shell.user_ns) for name in names]
            self._inside = FunctionRewriter(functions, recording.begin_range)
            self._inside.install()
        except InsideError as error:
            raise UsageError(str(error)) from None
        except Exception as error:
            if not swallows(error):
                raise
            _warn(f"--into is not possible here ({_in_one_line(error)}); the cell is measured without --into")

    def _exceeded(self) -> str | None:
        """What the cell used or left beyond its budgets, or None."""
        if self._options.budget is None and self._options.max_delta is None:
            return None
        from gpumem_magic.notebook.budget import Budget

        report = recording.last_report()
        return None if report is None else Budget(self._options.budget, self._options.max_delta).exceeded(report)

    def _show(self, report: Any) -> None:
        give_report(self._shell, report, self._options)
        if not self._options.quiet:
            self._offer(report)

    def _offer(self, report: Any) -> None:
        """Where memory ran out in this process, one line says what would tell how much is possible. Nothing is run."""
        if getattr(getattr(report, "error", None), "requested", None) is None or report.ranks is not None:
            return
        from gpumem_magic.notebook.fitting import offer

        if line := offer(self._run.cell, self._shell.user_ns):
            print(line)


def _warn(text: str) -> None:
    # Not warnings.warn: a filter may turn that into an error, which would take the place of the cell's result.
    print(f"gpumem: {text}", file=sys.stderr)


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
