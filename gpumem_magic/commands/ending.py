"""SIGTERM, as job schedulers and ``timeout`` end a command with it: the program ends as after Ctrl-C, and its report is made."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType, TracebackType
from typing import Any

from gpumem_magic.commands.written import say

TERMINATED = 128 + signal.SIGTERM
"""The exit status of what SIGTERM ended, as shells have it."""
# How long a report may still take after SIGTERM, in seconds: schedulers kill after 30 (Slurm's KillWait, Kubernetes) or more.
_TO_FINISH = 20.0
# What Python swallowed is sent again after so many seconds, when it may have left what swallows.
_AGAIN = 0.02


class Terminated(KeyboardInterrupt):
    """What ends a script after SIGTERM; a report says it by this name."""

    __module__ = "builtins"


class Ending:
    """What SIGTERM does. came: whether it came while the program ran.

    It raises KeyboardInterrupt where the program is. Where a destructor or a callback swallows that (Ctrl-C's, too), it is
    sent again a moment later. once: the second ends this process as it would without us: it may be in a loop that catches all.
    After `program_ended` the first lets the report be finished for a while, the second ends this process.
    """

    def __init__(self, *, once: bool) -> None:
        self.came = False
        self._once = once
        self._process = os.getpid()
        self._is_sent_again = False
        self._tells = False
        self._told_to_finish = False
        self._is_over = False
        self._has_begun = False
        self._after: Any = signal.SIG_DFL
        self._handler, self._hook = self._interrupt, self._unraisable
        self._ignored = sys.unraisablehook

    def begin(self) -> None:
        """A handler that is there already stays."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._has_begun = True
            _hear(self._handler)
            sys.unraisablehook = self._hook

    def program_ended(self) -> None:
        """From here on the report is made. A program's own handler has nothing more to end."""
        self._tells = True
        now = signal.getsignal(signal.SIGTERM)
        if self._has_begun and now is not None and now is not signal.SIG_IGN and now is not self._handler:
            self._after = now
            signal.signal(signal.SIGTERM, self._handler)

    def end(self) -> None:
        self._is_over = True
        if not self._has_begun:
            return
        _hear(None)
        if self._after is not signal.SIG_DFL and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._after)
        if sys.unraisablehook is self._hook:
            sys.unraisablehook = self._ignored

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        again, self._is_sent_again = self._is_sent_again, False
        if (
            os.getpid() != self._process
            or self._told_to_finish
            or (self._once and self.came and not again and not self._tells)
        ):
            # A copy of this process (a pool's worker, say) ends as it always does.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if self._tells:
            self._told_to_finish = True
            threading.Thread(target=self._finish, daemon=True).start()
            return
        self.came = True
        if not callable(signal.getsignal(signal.SIGINT)):
            raise KeyboardInterrupt  # a shell has its jobs in the background ignore Ctrl-C
        signal.raise_signal(signal.SIGINT)

    def _finish(self) -> None:
        time.sleep(_TO_FINISH)
        if not self._is_over:
            say("terminated before the report was complete")
            os._exit(TERMINATED)

    def _unraisable(self, what: sys.UnraisableHookArgs) -> None:
        ours = os.getpid() == self._process and threading.current_thread() is threading.main_thread()
        if ours and not self._tells and _comes_from(what.exc_traceback, Ending._interrupt):
            self._is_sent_again = True
            threading.Thread(target=self._send, args=(signal.SIGTERM,), daemon=True).start()
        elif ours and not self._tells and what.exc_type is KeyboardInterrupt:
            threading.Thread(target=self._send, args=(signal.SIGINT,), daemon=True).start()
        else:
            self._ignored(what)

    def _send(self, number: signal.Signals) -> None:
        time.sleep(_AGAIN)
        if self._is_over or self._tells:
            return
        if hasattr(signal, "pthread_kill"):  # which ends a call of the system's, too
            signal.pthread_kill(threading.main_thread().ident or 0, number)
        else:
            signal.raise_signal(number)


def _comes_from(traceback: TracebackType | None, function: Callable[..., Any]) -> bool:
    while traceback is not None and traceback.tb_frame.f_code is not function.__code__:
        traceback = traceback.tb_next
    return traceback is not None


@contextmanager
def ending_as_after_ctrl_c(*, once: bool = False) -> Iterator[Ending]:
    """SIGTERM, too, is a Ctrl-C: what was started ends with this command. See `Ending`."""
    ending = Ending(once=once)
    ending.begin()
    try:
        yield ending
    finally:
        ending.end()


_hears: Callable[[int, FrameType | None], None] | None = None


def _hear(handler: Callable[[int, FrameType | None], None] | None) -> None:
    """The handler of SIGTERM, if the program has none of its own. None: there is none any more."""
    global _hears
    before: Any = signal.SIG_DFL if _hears is None else _hears
    if signal.getsignal(signal.SIGTERM) is before:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if handler is None else handler)
    _hears = handler


def _around_a_fork(*, begins: bool) -> None:
    """None of ours meanwhile: of what comes to the copy before it goes on, Python forgets what has a handler in Python."""
    if _hears is None or threading.current_thread() is not threading.main_thread():
        return
    before, after = (_hears, signal.SIG_DFL) if begins else (signal.SIG_DFL, _hears)
    if signal.getsignal(signal.SIGTERM) is before:
        signal.signal(signal.SIGTERM, after)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=partial(_around_a_fork, begins=True), after_in_parent=partial(_around_a_fork, begins=False)
    )
