"""Recording every cell cheaply: the counters before and after it, and nothing else.

Two of IPython's events, ``pre_run_cell`` and ``post_run_cell``. A failure in
here ends the recording with one line, and never touches the cell.
"""

# IPython's errors carry no types.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from IPython.core.error import UsageError

from gpumem_magic.devices import machines
from gpumem_magic.failures import swallows
from gpumem_magic.notebook.history import CellHistory, CellRecord, State, sheet
from gpumem_magic.uninterrupted import whole
from gpumem_magic.views.sheet import Sheet


@dataclass(frozen=True)
class _Begun:
    """The counters at a moment. peak: the allocators' own, of their whole life."""

    state: State
    peak: int


class Auto:
    """Of one shell. At most one is on; `turn_on` and `turn_off` are the ways in and out."""

    def __init__(self, shell: Any, history: CellHistory) -> None:
        self._shell = shell
        self._history = history
        self._begun: list[_Begun | None] = []

    def start(self) -> None:
        self._shell.events.register("pre_run_cell", self._before)
        self._shell.events.register("post_run_cell", self._after)
        # The cell that turns us on has begun: what is there already is none of its doing.
        self._trying(self._begin_here)

    def stop(self) -> None:
        """May be called twice."""
        for name, callback in (("pre_run_cell", self._before), ("post_run_cell", self._after)):
            if callback in self._shell.events.callbacks[name]:
                self._shell.events.unregister(name, callback)
        self._begun.clear()

    def _begin_here(self) -> None:
        now = self._look()
        self._begun.append(now if now is not None and now.state.allocated else None)

    def _before(self, info: Any) -> None:
        self._trying(lambda: self._begun.append(self._look()))

    def _after(self, result: Any) -> None:
        # Before there was a device: nothing was on it.
        begun = self._begun.pop() if self._begun else None
        self._trying(lambda: self._keep(begun, self._look(), result))

    def _trying(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            if not swallows(error):
                raise
            self.stop()
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"gpumem: cells are no longer recorded ({text})", file=sys.stderr)

    def _keep(self, begun: _Begun | None, now: _Begun | None, result: Any) -> None:
        if now is None or (begun is None and not now.state.allocated):
            return
        info = result.info
        text = str(info.raw_cell or "").strip()
        error = result.error_in_exec or result.error_before_exec
        sentence = self._history.add(
            CellRecord(
                number=int(result.execution_count or 0),
                key=str(getattr(info, "cell_id", None) or text),
                title=text.partition("\n")[0],
                before=begun.state if begun is not None else State(0, 0, None),
                after=now.state,
                peak=now.peak if begun is None or now.peak > begun.peak else None,
                error=None if error is None else type(error).__name__,
            )
        )
        if sentence is not None:
            print(f"gpumem: {sentence}", file=sys.stderr)

    def _look(self) -> _Begun | None:
        """What the counters say now; None while no device is in use."""
        machine = machines.in_use()
        if machine is None:
            return None
        machine.settle()
        counters = [device.counters() for device in machine.devices]
        used = [one.device_used for one in counters]
        return _Begun(
            State(
                sum(one.allocated for one in counters),
                sum(one.reserved for one in counters),
                None if any(one is None for one in used) else sum(one for one in used if one is not None),
            ),
            sum(one.peak_allocated for one in counters),
        )


_auto: Auto | None = None
_history = CellHistory()


def turn_on(shell: Any) -> str:
    """Begins to record; a sentence about it."""
    global _auto
    if _auto is not None:
        return "Every cell is recorded already: `%gpumem_history` shows them."
    with whole:
        _auto = Auto(shell, _history)
        _auto.start()
    return "Every cell is recorded from now on: `%gpumem_history` shows them, `%gpumem_auto off` stops recording."


def turn_off() -> str:
    """Ends it; what was recorded stays. A sentence about it."""
    global _auto
    if _auto is None:
        return "Cells were not recorded."
    with whole:
        _auto.stop()
        _auto = None
    return "Cells are no longer recorded; `%gpumem_history` shows those that were."


def is_on() -> bool:
    return _auto is not None


def history() -> CellHistory:
    """What was recorded in this process."""
    return _history


def history_sheet() -> Sheet:
    """What every recorded cell did. Raises UsageError where there is none, and none to come."""
    if not _history.records and _auto is None:
        raise UsageError("it shows the cells since `%gpumem_auto on`, and that has not been run")
    return sheet(_history.records, _history.left_out)


def forget() -> None:
    """Ends the recording and drops what was recorded (the extension is unloaded)."""
    global _history
    turn_off()
    _history = CellHistory()
