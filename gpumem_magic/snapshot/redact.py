"""A copy of a snapshot that can be shown to others: what was allocated when, without the code it came from.

Kept: sizes, addresses, order, the frames of PyTorch itself (public code, by which categories are found). Replaced: every other
file and function, by a number that stays the same throughout. Dropped: annotations, metadata, and all text in the settings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpumem_magic.snapshot.model import Frame, Segment, Snapshot, TraceEvent

# "/home/me/env/lib/python3.11/site-packages/torch/optim/adam.py" is kept from "torch" on.
_OF_PYTORCH = re.compile(r"(?:^|[/\\])(?:site|dist)-packages[/\\](torch[/\\](?:[\w.-]+[/\\])*[\w.-]+\.py)$")
# C++ frames: only names that PyTorch, CUDA's libraries or Python's interpreter have made public.
_PUBLIC_NAME = re.compile(
    r"^(?:void |bool |int |static )*"
    r"(?:at|c10|c10d|caffe2|torch|std|cublas\w*|cudnn\w*|cuda\w*|_?Py\w*|THP\w+|_start|__libc_start\w*)\b"
)
_WITHOUT_SOURCE = "??"
_SETTINGS_OF_WORDS = re.compile(r"[\w:,.\[\]>\-]*")


def redacted(snapshot: Snapshot) -> Snapshot:
    """The copy. Times are counted from the first event; names are numbered in the order in which they appear."""
    names = _Names()
    times = [event.time_us for trace in snapshot.device_traces for event in trace if event.time_us]
    start = min(times, default=0)
    return Snapshot(
        tuple(_segment(segment, names) for segment in snapshot.segments),
        tuple(tuple(_event(event, names, start) for event in trace) for trace in snapshot.device_traces),
        _settings(snapshot.allocator_settings),
    )


class _Names:
    """Files and functions to numbers, and stacks that were converted before."""

    def __init__(self) -> None:
        self._files: dict[str, str] = {}
        self._functions: dict[str, str] = {}
        self._stacks: dict[tuple[Frame, ...], tuple[Frame, ...]] = {(): ()}

    def of(self, frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
        known = self._stacks.get(frames)
        if known is None:
            known = self._stacks[frames] = tuple(self._frame(frame) for frame in frames)
        return known

    def _frame(self, frame: Frame) -> Frame:
        of_pytorch = _OF_PYTORCH.search(frame.filename)
        if of_pytorch:
            return Frame(of_pytorch[1].replace("\\", "/"), frame.name, frame.line)
        if not frame.filename.endswith(".py"):
            public = _PUBLIC_NAME.match(frame.name) is not None and "/" not in frame.name
            if public and "lambda" not in frame.name:
                return Frame(_WITHOUT_SOURCE, frame.name, 0)
        ending = ".py" if frame.filename.endswith(".py") else ""
        file = self._files.setdefault(frame.filename, f"file{len(self._files) + 1}{ending}")
        if frame.filename == _WITHOUT_SOURCE:
            file = _WITHOUT_SOURCE
        function = self._functions.setdefault(frame.name, f"function{len(self._functions) + 1}")
        return Frame(file, function, frame.line)


def _segment(segment: Segment, names: _Names) -> Segment:
    blocks = tuple(replace(block, frames=names.of(block.frames)) for block in segment.blocks)
    return replace(segment, blocks=blocks, frames=names.of(segment.frames))


def _event(event: TraceEvent, names: _Names, start: int) -> TraceEvent:
    return event._replace(frames=names.of(event.frames), time_us=max(event.time_us - start, 0), metadata="")


def _settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers and switches; of text only options as PYTORCH_CUDA_ALLOC_CONF has them."""
    harmless: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, (bool, int, float)) or value is None:
            harmless[key] = value
        elif isinstance(value, dict):
            harmless[key] = {name: number for name, number in value.items() if isinstance(number, int)}
        elif key == "PYTORCH_CUDA_ALLOC_CONF" and isinstance(value, str) and _SETTINGS_OF_WORDS.fullmatch(value):
            harmless[key] = value
    return harmless
