"""A cell's statements on their way to the recorder, and the exception that leaves it early."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpumem_magic.recording.hook import Devices
    from gpumem_magic.recording.instrument import Statement
    from gpumem_magic.recording.recorder import Recorder


class StopRun(BaseException):
    """Leaves a call whose training loop has run long enough. Not an Exception, so that no retry in a library catches it."""


class CellProgress:
    """Passes a cell's statements on to the recorder, and ends loops that are long enough (the observer of `recording.cell`)."""

    def __init__(self, recorder: Recorder, limit: Any, source: str) -> None:
        self._recorder = recorder
        self._limit = limit
        self._source = source.splitlines()

    @property
    def devices(self) -> Devices | None:
        """None where every iteration has to be told."""
        return self._recorder if self._limit is None else None

    @property
    def may_end(self) -> bool:
        """Whether it may end a loop."""
        return self._limit is not None

    @property
    def wants_beginnings(self) -> bool:
        return self._limit is not None

    def before_statement(self, statement: Statement, iteration: tuple[int, ...], loops: tuple[int, ...]) -> None:
        if self._limit is not None:
            self._limit.statement_began(statement)

    def after_statement(self, statement: Statement, iteration: tuple[int, ...], loops: tuple[int, ...]) -> None:
        self._recorder.checkpoint(
            "statement",
            statement.label,
            statement.text,
            statement.line,
            iteration,
            loops,
            header=statement.header,
        )

    def wants_stop(self, loop: Statement, iteration: tuple[int, ...]) -> bool:
        if self._limit is None:
            return False
        return bool(self._limit.should_end(loop, iteration, self._calls_step(loop)))

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
