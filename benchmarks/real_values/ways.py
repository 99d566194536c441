"""Whether a program whose values are stand-ins goes the way that it goes with real ones, or its report says that it may not.

Its way is how often each of its lines runs, and what it asks the device's allocator for and gives back.
"""

from __future__ import annotations

import contextlib
import gc
import io
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

import gpumem_magic
from gpumem_magic.virtual import gpu

_HERE = str(Path(__file__).parent)
# So many lines more than three times as many are a program that does not end.
_MORE = 300
_SAYS = "that the virtual GPU does not know"


_KINDS = _SAME, _AS_MUCH, _SAID, _BESIDE, _SILENT = (
    "go the same way",
    "run other lines that ask for the same memory",
    "go another way and say it",
    "ask for the same memory and say that they may not",
    "go another way silently",
)


class Way(NamedTuple):
    lines: Counter[tuple[str, int]]
    events: tuple[tuple[str, int], ...]
    says: str


class _Endless(BaseException):
    """A program has run many more lines than it does with real values."""


def way_of(program: Callable[[str], None], card: str, values: str, most: int = sys.maxsize) -> Way:
    """The way of a program on a virtual card, and its report's answer where that says that the way may be another. It ends after
    so many lines."""
    lines: Counter[tuple[str, int]] = Counter()

    def follow(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_HERE):
            return None
        if event == "line":
            lines[frame.f_code.co_name, frame.f_lineno] += 1
            if lines.total() > most:
                raise _Endless
        return follow

    torch.manual_seed(0)
    machine = gpu.turn_on(f"{card},values={values}")
    log = machine.devices[0].start_log()
    with contextlib.ExitStack() as quiet:
        quiet.enter_context(contextlib.redirect_stdout(io.StringIO()))
        quiet.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        quiet.enter_context(contextlib.suppress(Exception, _Endless))
        measured = quiet.enter_context(gpumem_magic.measure())
        # (When the collector runs goes by what else was made, and what it frees comes then.)
        gc.collect()
        gc.disable()
        quiet.callback(gc.enable)
        quiet.callback(sys.settrace, sys.gettrace())
        sys.settrace(follow)
        program("cuda")
    events = tuple((one.action, one.size) for one in log.events)
    log.stop()
    answer = measured.report.answer
    return Way(lines, events, answer if _SAYS in answer else "")


def compare(programs: dict[str, Callable[[str], None]], card: str) -> int:
    """Prints which differ in what they ask for without a word, and counts the rest; returns how many those are."""
    found: dict[str, Counter[str]] = {values: Counter() for values in ("stand-in", "auto")}
    for name, program in programs.items():
        real = way_of(program, card, "real")
        for values, kinds in found.items():
            mine = way_of(program, card, values, 3 * real.lines.total() + _MORE)
            kind = _kind(real, mine)
            if kind == _SILENT:
                # (The first run leaves things in PyTorch's own caches, such as what it has scripted.)
                real = way_of(program, card, "real")
                kind = _kind(real, mine)
            kinds[kind] += 1
            if kind == _SILENT:
                print(f"-- {name}, values={values}: {_difference(real, mine)}", flush=True)
    gpu.turn_off()
    for values, kinds in found.items():
        print(f"values={values}: of {kinds.total()} programs {', '.join(f'{kinds[kind]} {kind}' for kind in _KINDS)}")
    return sum(kinds[_SILENT] for kinds in found.values())


def _kind(real: Way, mine: Way) -> str:
    if real.events != mine.events:
        return _SAID if mine.says else _SILENT
    if mine.says:
        return _BESIDE
    return _SAME if real.lines == mine.lines else _AS_MUCH


def _difference(real: Way, mine: Way) -> str:
    lines = sorted(
        f"{place}:{line} {real.lines[place, line]} -> {mine.lines[place, line]}"
        for place, line in real.lines | mine.lines
        if real.lines[place, line] != mine.lines[place, line]
    )
    return f"{len(real.events)} -> {len(mine.events)} events; lines {', '.join(lines[:6]) or 'alike'}"
