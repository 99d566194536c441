"""Where in the program memory was asked for, by the stack of the event."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from gpumem_magic.attribution.sites import is_library, is_python
from gpumem_magic.snapshot.model import Frame

# The operator that PyTorch's dispatcher was asked for, and the operator of a backward.
_OPERATOR = re.compile(r"at::_ops::(\w+)::")
_NODE = re.compile(r"(\w+Backward\d*)::apply")
_FUNCTIONAL = re.compile(r"torch[/\\]nn[/\\]functional\.py$")
_LONGEST = 120


def operators_in(frames: Sequence[Frame]) -> list[str]:
    """The names of the operator, of PyTorch's function for it, and of the program's own innermost function."""
    names = [found[1] for frame in frames if (found := _OPERATOR.search(frame.name))]
    names += [frame.name for frame in frames if _FUNCTIONAL.search(frame.filename)]
    own = _own(frames)
    return names if own is None else [*names, own.name]


def place_in_program(frames: Sequence[Frame]) -> str:
    """``train.py:12 step, in linear``: the program's innermost line and the operator; "" where the stack says neither."""
    return ", ".join(filter(None, _parts(frames)))[:_LONGEST]


def line_in_program(frames: Sequence[Frame]) -> str:
    """The same without the operator: ``train.py:12 step``."""
    return _parts(frames)[0]


def _parts(frames: Sequence[Frame]) -> tuple[str, str]:
    own = _own(frames) or next((frame for frame in frames if is_python(frame)), None)
    if own is None:
        # The thread of backward has no frames of Python's.
        node = next((found[1] for frame in frames if (found := _NODE.search(frame.name))), "")
        return node, "in backward" if node else ""
    operator = next((found[1] for frame in frames if (found := _OPERATOR.search(frame.name))), "")
    function = next((frame.name for frame in reversed(frames) if _FUNCTIONAL.search(frame.filename)), "")
    operator = operator or function
    return line_in_words(own), f"in {operator}" if operator else ""


def _own(frames: Sequence[Frame]) -> Frame | None:
    return next((frame for frame in frames if is_python(frame) and not is_library(frame)), None)


def line_in_words(frame: Frame, last: int = 0) -> str:
    """``train.py:15 fit``, ``train.py:15-31 fit``; last: the last line of several."""
    file = os.path.basename(frame.filename.replace("\\", "/"))
    lines = f"{frame.line}-{last}" if last > frame.line else f"{frame.line}"
    return f"{file}:{lines}" if frame.name == "<module>" else f"{file}:{lines} {frame.name}"
