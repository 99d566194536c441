"""The recording of this process that is under way: at most one. The watch reads along, and a change of device has to wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpumem_magic.recording.recorder import Recorder

_current: Recorder | None = None


def current() -> Recorder | None:
    """The recorder that records now; None before it has begun and once it is being finished."""
    return _current


def begin(recorder: Recorder) -> None:
    global _current
    _current = recorder


def end() -> None:
    global _current
    _current = None
