"""How far a measured cell is, while it runs for long: a slim bar at the page's edge, which is no output and leaves no trace.

Nothing is displayed: a widget's model alone puts the bar into the page and takes it away. It looks at what is recorded anyway and
at the device's counters, once a second, from a thread of its own; whatever fails in it is only missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from gpumem_magic.devices import machines
from gpumem_magic.devices.base import Counters
from gpumem_magic.failures import swallowed
from gpumem_magic.recording import under_way
from gpumem_magic.recording.model import Checkpoint
from gpumem_magic.units import amount
from gpumem_magic.widgets.sampler import Sampler
from gpumem_magic.widgets.watch import somebody_looks

AFTER = 2.0
PERIOD = 1.0
# How long the end of a cell waits for the bar to go.
_PATIENCE = 1.0


class Bar(Protocol):
    """What is seen of it. shares: of the device, allocated now and at most; 0 to 1."""

    def show(self, words: str, shares: tuple[float, float]) -> None: ...

    def leave(self) -> None: ...


class Progress:
    """From `start` to `stop`. bar: makes what is seen, when the cell has run for `after` seconds, in the thread that shows it."""

    def __init__(self, bar: Callable[[], Bar], after: float = AFTER, period: float = PERIOD) -> None:
        self._make = bar
        self._bar: Bar | None = None
        self._began = time.monotonic()
        self._after = after
        self._sampler = Sampler(self._look, period, after=self._leave)
        self._highest = 0

    def start(self) -> None:
        self._sampler.start()

    def stop(self) -> None:
        """Takes the bar away. May be called twice."""
        self._sampler.stop()
        self._sampler.join(_PATIENCE)

    def _look(self) -> None:
        seconds = time.monotonic() - self._began
        recorder = under_way.current()
        if seconds < self._after or recorder is None:
            return
        points = recorder.checkpoints
        device, log = next(iter(recorder.logs.items()), (None, None))
        counters = None
        machine = machines.in_use()
        for one in machine.in_use() if machine is not None else ():
            if one.facts.index == device:
                counters, _ = one.glance(log)
                whole = one.facts.capacity
        if counters is None:
            return
        self._highest = max(self._highest, counters.allocated)
        if self._bar is None:
            self._bar = self._make()
        now, most = (min(1.0, size / whole) if whole else 0.0 for size in (counters.allocated, self._highest))
        self._bar.show(words_of(seconds, points[-1] if points else None, counters, self._highest), (now, most))

    def _leave(self) -> None:
        if self._bar is not None:
            # The connection may be gone with the page.
            try:
                self._bar.leave()
            except Exception as error:
                swallowed(error)


def words_of(seconds: float, last: Checkpoint | None, counters: Counters, highest: int) -> str:
    """``14 s: after line 12 in iteration 37; 2,345 MiB allocated, 3,456 MiB at most so far``."""
    where = ""
    if last is not None and last.line > 0:
        where = f" after line {last.line}"
        if last.iteration:
            where += f" in iteration {'.'.join(str(number) for number in last.iteration)}"
    return (
        f"{seconds:,.0f} s:{where}{';' if where else ''} {amount(counters.allocated)} allocated, "
        f"{amount(highest)} at most when looked at"
    )


def in_notebook(shell: Any) -> Progress | None:
    """The bar of a cell in this shell; None where no page is in front of it."""
    if getattr(shell, "kernel", None) is None or not somebody_looks(shell):
        return None
    return Progress(_widget)


def _widget() -> Bar:
    from gpumem_magic.widgets.progress_widget import ProgressWidget

    return ProgressWidget()
