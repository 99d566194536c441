"""Whether an exception is a failure of our own, or comes from the user's program and must go on."""

from __future__ import annotations

import atexit
import os
import sys
import traceback as tracebacks
from collections import Counter
from types import FrameType, TracebackType
from typing import TypeGuard

SWALLOWED: Counter[str] = Counter()
"""What went no further, by what it was and where: how often. ``GPUMEM_DEBUG=1`` shows each the first time, and all at the end."""


def swallowed(error: BaseException) -> str:
    """Counts an error that goes no further; its class and words."""
    words = f"{type(error).__name__}: {error}"
    place, trace = "", error.__traceback__
    while trace is not None:
        place, trace = f" at {os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}", trace.tb_next
    kind = f"{type(error).__name__}{place}"
    SWALLOWED[kind] += 1
    if _debugs() and SWALLOWED[kind] == 1:
        _say("".join(["swallowed:\n", *tracebacks.format_exception(error)]))
    return words


def swallows(error: BaseException | None) -> TypeGuard[Exception]:
    """Whether an error that our work met is its own, and so goes no further: then it is counted."""
    if not is_own_failure(error):
        return False
    swallowed(error)
    return True


def _debugs() -> bool:
    return os.environ.get("GPUMEM_DEBUG") == "1"


def _say(words: str) -> None:
    print(f"gpumem debug: {words.rstrip()}", file=sys.stderr)


@atexit.register
def _tell_all() -> None:
    if _debugs() and SWALLOWED:
        counted = "; ".join(f"{kind}: {count}" for kind, count in SWALLOWED.most_common())
        _say(f"{sum(SWALLOWED.values())} errors were swallowed: {counted}")


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
