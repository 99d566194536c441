"""Ctrl-C waits until an operator has ended, as it does for operators in C++: memory is taken and given back whole."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import threading
from types import FrameType
from typing import Any

# Those of `signal` look for enumerations, which takes longer than what they do.
_get, _set, _raise = _signal.getsignal, _signal.signal, _signal.raise_signal
_USUAL = _signal.default_int_handler
_INTERRUPT = int(_signal.SIGINT)
_OURS = "gpumem_magic.virtual."


class Uninterrupted:
    """``with uninterrupted:`` holds a Ctrl-C back until the end of the outermost block; a second one goes through.

    Only Python's own handler is held back, in the main thread, where it runs.
    """

    def __init__(self) -> None:
        # Blocks around here, while the handler is ours.
        self._depth = 0
        self._came = 0
        self._handler = self._hear

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        if not self._depth:
            if _get(_INTERRUPT) is not _USUAL:
                return
            self._came = 0
            _set(_INTERRUPT, self._handler)
        self._depth += 1

    def __exit__(self, *_: Any) -> None:
        if not self._depth or threading.get_ident() != threading.main_thread().ident:
            return
        self._depth -= 1
        if not self._depth and _get(_INTERRUPT) is self._handler:
            _set(_INTERRUPT, _USUAL)
            if self._came:
                _raise(_INTERRUPT)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._came += 1
        inside = frame
        while inside is not None and not str(inside.f_globals.get("__name__")).startswith(_OURS):
            inside = inside.f_back
        if self._came > 1 or inside is None:
            # (Another signal's handler may have left a block before it could end.)
            self._depth = 0
            _set(_INTERRUPT, _USUAL)
            _USUAL(number, frame)
