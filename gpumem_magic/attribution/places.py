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
    return names + [frame.name for frame in frames if is_python(frame) and not is_library(frame)][:1]


def place_in_program(frames: Sequence[Frame]) -> str:
    """``train.py:12 step, in linear``: the program's innermost line and the operator; "" where the stack says neither."""
    own = next((frame for frame in frames if is_python(frame) and not is_library(frame)), None)
    own = own or next((frame for frame in frames if is_python(frame)), None)
    operator = next((found[1] for frame in frames if (found := _OPERATOR.search(frame.name))), "")
    node = next((found[1] for frame in frames if (found := _NODE.search(frame.name))), "")
    function = next((frame.name for frame in reversed(frames) if _FUNCTIONAL.search(frame.filename)), "")
    operator = operator or function
    if own is None:
        # The thread of backward has no frames of Python's.
        return f"{node}, in backward" if node else ""
    file = os.path.basename(own.filename.replace("\\", "/"))
    line = f"{file}:{own.line}" if own.name == "<module>" else f"{file}:{own.line} {own.name}"
    return (f"{line}, in {operator}" if operator else line)[:_LONGEST]
