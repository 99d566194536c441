"""Our own work inside the user's program: timed, one thread at a time, with failures kept as notes instead of raised."""

from __future__ import annotations

import threading
from time import perf_counter
from types import TracebackType
from typing import Any

from gpumem_magic.failures import swallows
from gpumem_magic.looks.tensors import untraced

# No work of ours takes so long that another thread would wait for it; an interrupt may have lost a lock.
_PATIENCE_SECONDS = 5.0


class Guard:
    """``with guard("looking at gradients"): ...`` swallows what our own work raises: see `swallows`.

    seconds: time spent inside so far. notes: one sentence per kind of failure. May be entered again by the thread inside.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.notes: list[str] = []
        self._lock = threading.RLock()
        self._outermost: _Entered | None = None

    def __call__(self, task: str) -> _Entered:
        return _Entered(self, task)

    def add_note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def enter(self, entered: _Entered) -> Any:
        """The lock that it took."""
        lock = self._lock
        if not lock.acquire(timeout=_PATIENCE_SECONDS):
            lock = self._lock = threading.RLock()
            lock.acquire()
            self._outermost = None
        if self._outermost is None:
            self._outermost = entered
        return lock

    def leave(self, entered: _Entered, error: BaseException | None) -> bool:
        if self._outermost is entered:
            self._outermost = None
            self.seconds += perf_counter() - entered.began
        if error is None or not swallows(error):
            return False
        # The words of the error only: the object holds the user's frames.
        self.add_note(f"gpumem_magic failed at {entered.task}: {type(error).__name__}: {error}")
        return True


class _Entered:
    __slots__ = ("_guard", "_lock", "_untraced", "began", "task")

    def __init__(self, guard: Guard, task: str) -> None:
        self._guard = guard
        self.task = task

    def __enter__(self) -> None:
        self.began = perf_counter()
        self._lock = self._guard.enter(self)
        self._untraced = untraced()
        self._untraced.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        try:
            self._untraced.__exit__(None, None, None)
            return self._guard.leave(self, error)
        finally:
            self._lock.release()
