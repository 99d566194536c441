"""Running one statement's code by IPython's own ``run_code``: what calls a cell is what calls it without us.

So a warning's ``stacklevel``, ``sys._getframe(1)``, ``sys.excepthook`` and IPython's hooks are what they are in a plain cell.
"""

# IPython's runner carries no types.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CodeType, FrameType, TracebackType
from typing import Any

from gpumem_magic import patching
from gpumem_magic.tracebacks import cause_of, context_of, entry_of, traceback_of


class Value:
    """Where the code of a cell's last expression puts its value: by an assignment, since a tracer would see a call."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: Any = None


class StatementRun:
    """One run. To ``run_code`` it is both the shell and the result: an error is kept and goes on, instead of being shown."""

    custom_exceptions: tuple[type[BaseException], ...] = ()

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        # What the code raised; `run_code` says it here.
        self.error_in_exec: BaseException | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shell, name)

    def showtraceback(self, *_: Any, **__: Any) -> None:
        raise

    def run(self, code: CodeType) -> None:
        """Raises what the code raises; IPython's own error where it has to wait, which needs an event loop."""
        from IPython.core.async_helpers import _pseudo_sync_runner

        __tracebackhide__ = True
        try:
            _pseudo_sync_runner(self._running(code))
        except BaseException as error:
            if not self._is_on_its_way(error):
                raise
        self._raise_what_stayed()

    async def run_awaited(self, code: CodeType) -> None:
        """The same where an event loop runs. StopIteration becomes RuntimeError, as it leaves a coroutine."""
        __tracebackhide__ = True
        try:
            await self._running(code)
        except BaseException as error:
            if not self._is_on_its_way(error):
                raise
        self._raise_what_stayed()

    def _running(self, code: CodeType) -> Any:
        from IPython.core.interactiveshell import InteractiveShell

        awaits = bool(code.co_flags & inspect.CO_COROUTINE)
        run_code: Callable[..., Any] = InteractiveShell.run_code
        made = run_code(self, code, self, async_=awaits)
        made.__name__ = "run_cell_async"  # which IPython names where a cell has to wait
        return made

    def _is_on_its_way(self, error: BaseException) -> bool:
        """Whether an error only stands for the code's own, which could not leave ``run_code`` (StopIteration)."""
        own = self.error_in_exec
        return own is not None and error is not own and cause_of(error) is own

    def _raise_what_stayed(self) -> None:
        """Raises what ``run_code`` did not let through: StopIteration, and what leaves a debugger."""
        __tracebackhide__ = True
        own = self.error_in_exec
        if own is None:
            return
        context = context_of(own)
        try:
            raise own
        finally:
            own.__context__ = context


def without_recording(error: BaseException) -> None:
    """Takes out of a traceback, and of those of earlier errors, the frames by which a recording sees backward and its like."""
    one: BaseException | None = error
    for _ in range(100):
        if one is None:
            return
        entry = traceback_of(one)
        while entry is not None:
            following = entry.tb_next
            while following is not None and _is_recording(following):
                following = following.tb_next
            entry.tb_next = following
            entry = following
        one = cause_of(one) or context_of(one)


def _is_recording(entry: TracebackType) -> bool:
    """Whether it is a frame of the recording's, or the one that handed on to it what PyTorch was asked for."""
    name = entry.tb_frame.f_globals.get("__name__", "")
    if name == patching.__name__ and entry.tb_next is not None:
        name = entry.tb_next.tb_frame.f_globals.get("__name__", "")
    return str(name).startswith(f"{__package__}.") and entry.tb_next is not None


def as_without_us(traceback: TracebackType | None, caught: TracebackType) -> TracebackType | None:
    """The traceback of an error that left a cell, as IPython would have it: its own frame, and behind it the cell's.

    traceback: from a frame of ours. caught: as IPython has it now. None where neither the cell nor IPython's runner raised it.
    """
    from IPython.core.async_helpers import _pseudo_sync_runner
    from IPython.core.interactiveshell import InteractiveShell

    frame: FrameType | None = caught.tb_frame
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if code is InteractiveShell.run_code.__code__:
            # It has a second entry, where it has handled the error.
            while traceback.tb_next is not None and traceback.tb_next.tb_frame is traceback.tb_frame:
                traceback = traceback.tb_next
            return entry_of(traceback.tb_next, caught.tb_frame, traceback.tb_lasti, traceback.tb_lineno)
        if code is _pseudo_sync_runner.__code__ and traceback.tb_next is None:
            # The cell has to wait, and cannot: so says the runner, to what called it.
            while frame is not None and frame.f_code is not code:
                frame = frame.f_back
            caller = frame and frame.f_back
            return caller and entry_of(traceback, caller, caller.f_lasti, caller.f_lineno)
        traceback = traceback.tb_next
    return None
