"""Our own work inside the user's program: timed, one thread at a time, and its failures kept as notes instead of raised."""

from __future__ import annotations

import threading
from time import perf_counter
from types import TracebackType


class Guard:
    """``with guard("looking at gradients"): ...`` swallows Exception (not KeyboardInterrupt: that is the user's).

    seconds: time spent inside so far. notes: one sentence per kind of failure. May be entered again by the thread inside.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.notes: list[str] = []
        self._lock = threading.RLock()
        self._began: list[float] = []
        self._tasks: list[str] = []

    def __call__(self, task: str) -> _Entered:
        return _Entered(self, task)

    def add_note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def enter(self, task: str) -> None:
        self._lock.acquire()
        self._began.append(perf_counter())
        self._tasks.append(task)

    def leave(self, error: BaseException | None) -> bool:
        task = self._tasks.pop()
        elapsed = perf_counter() - self._began.pop()
        if not self._began:
            self.seconds += elapsed
        swallow = isinstance(error, Exception)
        if swallow:
            # The words of the error only: the object holds the user's frames.
            self.add_note(f"gpumem_magic failed at {task}: {type(error).__name__}: {error}")
        self._lock.release()
        return swallow


class _Entered:
    __slots__ = ("_guard", "_task")

    def __init__(self, guard: Guard, task: str) -> None:
        self._guard = guard
        self._task = task

    def __enter__(self) -> None:
        self._guard.enter(self._task)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        return self._guard.leave(error)
