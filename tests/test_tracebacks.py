"""Errors that come where Python has no line for what runs, as Ctrl-C may at the jump at a loop's end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

import pytest
from causes_cells import notebook

from gpumem_magic import tracebacks

BEGIN = """import sys
def at_no_line(frame, event, arg):
    frame.f_trace_opcodes = True
    if event == "opcode" and frame.f_lineno is None and frame.f_code.co_name == "loops":
        sys.settrace(None)
        raise KeyboardInterrupt
    return at_no_line
def loops():
    found = []
    for k in range(9):
        if k > 2:
            if k not in found:
                found.append(k)
"""


def interrupted() -> KeyboardInterrupt:
    names: dict[str, Any] = {}
    exec(BEGIN, names)
    before: Callable[[FrameType, str, Any], Any] | None = sys.gettrace()
    sys.settrace(names["at_no_line"])
    try:
        names["loops"]()
    except KeyboardInterrupt as error:
        return error
    finally:
        sys.settrace(before)
    pytest.skip("this Python has a line for every instruction here")


def entries(trace: TracebackType | None) -> list[tuple[str, int | None]]:
    found = []
    while trace is not None:
        found.append((trace.tb_frame.f_code.co_name, trace.tb_lineno))
        trace = trace.tb_next
    return found


@pytest.mark.parametrize("shorten", [tracebacks.leave_out_ours, tracebacks.cut, tracebacks.cut_below_operator])
def test_what_is_not_ours_stays_as_it_is(shorten: Callable[[BaseException], Any]) -> None:
    error = interrupted()
    before = entries(error.__traceback__)
    assert ("loops", None) in before
    shorten(error)
    assert entries(error.__traceback__) == before


def test_a_cell_is_left_by_its_own_error() -> None:
    interrupted()
    with notebook("T4", setup="import torch") as book:
        said = book.cell(BEGIN + "sys.settrace(at_no_line); loops()")
        assert "KeyboardInterrupt" in said
        assert "cannot be interpreted as an integer" not in said
        measured = book.cell("%%gpumem -q -o report\n" + BEGIN + "sys.settrace(at_no_line); loops()")
        assert "cannot be interpreted as an integer" not in measured
        assert book.shell.user_ns["report"].checkpoints[-2].kind == "error"
