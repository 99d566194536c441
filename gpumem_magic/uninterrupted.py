"""Ctrl-C waits until what has begun is done: an operator, whose memory is taken and given back whole (as in C++), and what
replaces parts of other packages or puts them back."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import os
import threading
import time
from types import FrameType
from typing import Any

# Those of `signal` look for enumerations, which takes longer than what they do.
_get, _set, _raise = _signal.getsignal, _signal.signal, _signal.raise_signal
_USUAL = _signal.default_int_handler
_this_thread = threading.get_ident
_main = threading.main_thread().ident
_INTERRUPT = int(_signal.SIGINT)


class Uninterrupted:
    """``with uninterrupted:`` holds a Ctrl-C back until the end of the outermost block; one that comes `patience` seconds after
    the first goes through.

    Only Python's own handler is held back, in the main thread, where it runs. modules: how the names of those begin whose
    frames are inside of each block. stays: between blocks, too, ours is the handler, which then does what Python's own does: to
    change it is a call of the system's, which takes longer than many an operator. `usual` hides that from the program.
    """

    def __init__(self, modules: str, patience: float = 0.0, *, stays: bool = False) -> None:
        self._modules = modules
        self._patience = patience
        self._stays = stays
        # Blocks around here, while the handler is ours.
        self._depth = 0
        # When the first came, by the system's clock.
        self._came: float | None = None
        self._handler = self._hear

    def __enter__(self) -> None:
        if _this_thread() != _main:
            return
        if not self._depth:
            handler = _get(_INTERRUPT)
            if handler is not self._handler:
                if usual(handler) is not _USUAL or _holds(handler):
                    return
                _set(_INTERRUPT, self._handler)
            self._came = None
        self._depth += 1

    def __exit__(self, *_: Any) -> None:
        if not self._depth or _this_thread() != _main:
            return
        self._depth -= 1
        if not self._depth and (self._came is not None or not self._stays):
            self._end()

    def _end(self) -> None:
        if _get(_INTERRUPT) is self._handler:
            _set(_INTERRUPT, _USUAL)
            if self._came is not None:
                _raise(_INTERRUPT)

    def give_back(self) -> None:
        """Python's own handler is there again, if it was."""
        if not self._depth and _this_thread() == _main:
            self._came = None
            self._end()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if not self._depth:
            _USUAL(number, frame)
        inside = frame
        while inside is not None and not str(inside.f_globals.get("__name__")).startswith(self._modules):
            inside = inside.f_back
        now = time.monotonic()
        if inside is None or (self._came is not None and now - self._came >= self._patience):
            # (Another signal's handler may have left a block before it could end.)
            self._depth = 0
            _set(_INTERRUPT, _USUAL)
            _USUAL(number, frame)
        elif self._came is None:
            self._came = now


def usual(handler: Any) -> Any:
    """The handler that a program sees: Python's own where one of ours is in its place."""
    return _USUAL if isinstance(getattr(handler, "__self__", None), Uninterrupted) else handler


def _holds(handler: Any) -> bool:
    """Whether it is that of a block under way."""
    return handler is not _USUAL and handler.__self__._depth > 0


def _note_main_thread() -> None:
    """In a new process: once, as blocks are entered at each operator."""
    global _main
    _main = threading.main_thread().ident


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_main_thread)

# For what replaces and puts back.
whole = Uninterrupted("gpumem_magic.", patience=3.0)
