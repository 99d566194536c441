"""Whether what our work met is its own failure, or comes from the user's program and goes on its way."""

from __future__ import annotations

from types import FrameType, TracebackType
from typing import TypeGuard


def is_own_failure(error: BaseException | None) -> TypeGuard[Exception]:
    """Whether an error that our work met is its own: an Exception that no signal handler of the program's raised there."""
    return isinstance(error, Exception) and from_handler(error.__traceback__) is None


def from_handler(traceback: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that begins in a signal handler; None where there is none.

    Python calls a handler wherever the program is, and hands it the frame that it interrupts.
    """
    while traceback is not None:
        interrupted, traceback = traceback.tb_frame, traceback.tb_next
        if traceback is not None and _was_given(traceback.tb_frame, interrupted):
            return traceback
    return None


def _was_given(called: FrameType, frame: FrameType) -> bool:
    code = called.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 0x04)  # *args is a variable, too
    variables = called.f_locals
    given = [variables.get(name) for name in code.co_varnames[:count]]
    return any(one is frame or (type(one) is tuple and any(part is frame for part in one)) for one in given)
