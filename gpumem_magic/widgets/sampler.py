"""The thread that takes samples at a steady rate. Late samples are skipped: nothing waits in a queue."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from gpumem_magic.failures import swallowed

THREAD_NAME = "gpumem-watch"
_FAILURES = 10


@dataclass
class Pace:
    """How the sampling went. dropped: samples left out because the one before took too long, or the interpreter was held."""

    dropped: int = 0
    cpu_seconds: float = 0.0


class Sampler:
    """Calls `take` every `period` seconds, in one daemon thread, from `start` until `stop`.

    after: called in the same thread when the loop ends, whoever ended it. on_failure: told of an exception of `take`, in words;
    after ten in a row the sampler ends by itself.
    """

    def __init__(
        self,
        take: Callable[[], None],
        period: float,
        *,
        after: Callable[[], None] = lambda: None,
        on_failure: Callable[[str], None] = lambda words: None,
    ) -> None:
        self.pace = Pace()
        self.period = period
        self._take = take
        self._after = after
        self._on_failure = on_failure
        self._ending = threading.Event()
        self._running = threading.Event()
        self._running.set()
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """Whether the caller is the sampler's thread."""
        return self._thread is threading.current_thread()

    @property
    def paused(self) -> bool:
        return not self._running.is_set()

    def start(self) -> None:
        self._thread.start()

    def pause(self) -> None:
        self._running.clear()

    def resume(self) -> None:
        self._running.set()

    def stop(self) -> None:
        """Asks the thread to end, and returns at once."""
        self._ending.set()

    def join(self, timeout: float) -> bool:
        """Waits for the thread; False where it is still at work, or where this is that thread."""
        if self.is_current:
            return False
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self.alive

    def _run(self) -> None:
        failures = 0
        due = time.monotonic()
        while not self._ending.is_set() and failures < _FAILURES:
            began = time.thread_time()
            try:
                self._take()
                failures = 0
            except Exception as error:
                failures += 1
                self._on_failure(swallowed(error))
            self.pace.cpu_seconds += time.thread_time() - began
            due = self._next(due)
            self._ending.wait(max(due - time.monotonic(), 0.0))
        self._after()

    def _next(self, due: float) -> float:
        """When the next sample is due. Moments that have passed already are counted as dropped."""
        due += self.period
        late = time.monotonic() - due
        if late > 0:
            missed = int(late / self.period) + 1
            if not self.paused:
                self.pace.dropped += missed
            due += missed * self.period
        return due
