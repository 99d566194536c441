"""The program's own functions that are at work: where each stands, and which of its variables lead to memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from inspect import CO_NEWLOCALS, CO_OPTIMIZED, CO_VARARGS, CO_VARKEYWORDS
from types import CodeType, FrameType
from typing import Any

from gpumem_magic.looks import tensors
from gpumem_magic.looks.code import OWN, whose
from gpumem_magic.looks.objects import locals_of
from gpumem_magic.owners.traversal import Locate, Place, located
from gpumem_magic.recording.identity import tensors_in

# So many functions within one another, and of what a variable holds so many tensors.
_FUNCTIONS, _TENSORS = 20, 50


@dataclass(frozen=True)
class RunningFunction:
    """file, line: where it stands. name: "" for what is outside of functions. variables: those that it made itself, each with the
    places of the memory that it leads to; nothing of what it was given, which its caller may hold, too."""

    file: str
    line: int
    name: str = ""
    variables: Mapping[str, frozenset[Place]] = field(default_factory=dict)


def running_functions(frame: FrameType | None, locate: Locate) -> list[RunningFunction]:
    """From a frame on outwards up to the program's own text outside of functions, the innermost first. Keeps nothing of what the
    frames hold."""
    found: list[RunningFunction] = []
    while frame is not None and len(found) < _FUNCTIONS:
        code = frame.f_code
        if whose(code.co_filename) == OWN:
            if not code.co_flags & CO_NEWLOCALS:
                found.append(RunningFunction(code.co_filename, frame.f_lineno))
                break
            its = _memory_of(frame, locate) if code.co_flags & CO_OPTIMIZED else {}
            found.append(RunningFunction(code.co_filename, frame.f_lineno, code.co_name, its))
        frame = frame.f_back
    return found


def _memory_of(frame: FrameType, locate: Locate) -> dict[str, frozenset[Place]]:
    given = _parameters_of(frame.f_code)
    own = {name: value for name, value in locals_of(frame).items() if name not in given}
    places = {name: frozenset(tensors.unheard(_places, value, locate)) for name, value in own.items()}
    return {name: its for name, its in places.items() if its}


def _places(value: Any, locate: Locate) -> list[Place]:
    found = (located(locate, piece) for _, one in tensors_in(value, "", _TENSORS) for piece in tensors.pieces(one))
    return [place for place in found if place is not None]


def _parameters_of(code: CodeType) -> frozenset[str]:
    """The names of what a function is given, and of what it shares with functions within it."""
    starred = bool(code.co_flags & CO_VARARGS) + bool(code.co_flags & CO_VARKEYWORDS)
    given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + starred]
    return frozenset((*given, *code.co_cellvars, *code.co_freevars))
