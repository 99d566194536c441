"""The recording of this process that is under way: at most one. The watch reads from it; a change of device has to wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from gpumem_magic.recording.recorder import Recorder


class Run(Protocol):
    """A recording from before it replaces anything until everything is put back."""

    def is_running(self) -> bool:
        """Whether the program that it records still runs."""

    def put_back(self) -> None:
        """Puts back what was replaced, and calls `close`. May be called twice, also where an interrupt ended the first call."""


_run: Run | None = None
_current: Recorder | None = None


def current() -> Recorder | None:
    """The recorder that records now; None before it has begun and once it is being finished."""
    return _current


def is_any() -> bool:
    """Whether a recording is under way. One whose program was left when nothing could be put back ends now."""
    if _run is not None and not _run.is_running():
        abandon()
    return _run is not None


def open(run: Run) -> None:
    global _run
    _run = run


def begin(recorder: Recorder) -> None:
    global _current
    _current = recorder


def end() -> None:
    global _current
    _current = None


def close(run: Run) -> None:
    """Everything of a run is put back."""
    global _run
    if _run is run:
        end()
        _run = None


def abandon() -> None:
    """Puts back what the recording under way replaced, if there is one; no report is made of it."""
    if _run is not None:
        _run.put_back()
