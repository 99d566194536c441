"""Errors as the program's author should see them: without the frames through which the virtual GPU carried an operator.

On a device these steps are C++ and leave no frames. Each place where the program enters this package cuts what lies below it
out of the traceback; its own frame, which Python adds again, is marked for IPython with ``__tracebackhide__``, and forgets its
arguments: an error that is kept keeps no tensors that the program itself does not keep.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import TypeVar

_Error = TypeVar("_Error", bound=BaseException)

# As Python reads them, whatever an error's own `__getattribute__` does.
cause_of, context_of, traceback_of = (
    vars(BaseException)[name].__get__ for name in ("__cause__", "__context__", "__traceback__")
)
_OURS = ("gpumem_magic",)
# Below an operator there is also what works shapes out: the user called none of it.
_BELOW_OPERATORS = (*_OURS, "contextlib", "torch", "sympy")


def cut(error: _Error) -> _Error:
    """The error without this package's frames; PyTorch's and the program's own stay."""
    return error.with_traceback(_without(error.__traceback__, _OURS))


def cut_below_c(error: _Error) -> _Error:
    """The error of a function in C, likewise, and without the frames of PyTorch's below the program's last: C++ leaves none."""
    below = list(entries(error.__traceback__))
    while below and _belongs(_module(below[-1]), _BELOW_OPERATORS):
        below.pop()
    return error.with_traceback(_without(error.__traceback__, _OURS, len(below)))


def cut_below_operator(error: _Error) -> _Error:
    """The error without this package's and PyTorch's frames; only code of the program's (a kernel of its own) stays.

    Errors that were dealt with on the way, and became this one, go too: on a device nobody would have heard of them.
    """
    if _only_inside(error.__cause__):
        error.__cause__ = None
    context = error.__context__
    if _only_inside(context):
        while context is not None and _only_inside(context):
            context = context.__context__
        error.__context__ = context
        error.__suppress_context__ = error.__cause__ is not None
    return error.with_traceback(_without(error.__traceback__, _BELOW_OPERATORS))


def leave_out_ours(error: BaseException) -> None:
    """Takes this package's frames out of an error and of those behind it, except where one began here, unhidden: that is ours."""
    seen: set[int] = set()
    behind: list[BaseException | None] = [error]
    while behind:
        one = behind.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        behind += [cause_of(one), context_of(one)]
        trace = traceback_of(one)
        last = next(reversed(list(entries(trace))), None)
        if last is not None and (_is_hidden(last) or not _belongs(_module(last), _OURS)):
            BaseException.with_traceback(one, _without(trace, _OURS))


def entry_of(following: TracebackType | None, frame: FrameType, instruction: int, line: int | None) -> TracebackType:
    """An entry of a traceback. line: None at an instruction of no line, as the jump at a loop's end, where Ctrl-C may come."""
    return TracebackType(following, frame, instruction, -1 if line is None else line)


def _is_hidden(entry: TracebackType) -> bool:
    return "__tracebackhide__" in entry.tb_frame.f_code.co_varnames


def _module(entry: TracebackType) -> str:
    return str(entry.tb_frame.f_globals.get("__name__", ""))


def _only_inside(error: BaseException | None) -> bool:
    return error is not None and _without(error.__traceback__, _BELOW_OPERATORS) is None


def _without(trace: TracebackType | None, packages: tuple[str, ...], most: int | None = None) -> TracebackType | None:
    shortened: TracebackType | None = None
    left_out = False
    for entry in reversed(list(entries(trace))[:most]):
        module = _module(entry)
        # Frames of contextlib are ours where they carry a context manager of ours.
        left_out = _belongs(module, packages) or (left_out and module == "contextlib")
        if not left_out:
            shortened = entry_of(shortened, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return shortened


def _belongs(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def entries(trace: TracebackType | None) -> Iterator[TracebackType]:
    """Those of a traceback, outermost first."""
    while trace is not None:
        yield trace
        trace = trace.tb_next
