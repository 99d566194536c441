"""Ending a trial's process and everything that it started, and having cleared away what those shared.

What it starts stays below it also where that begins a session of its own, or lets its parent end (`keep_below`).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

# Processes that unlink the semaphores and shared memory of others once these are gone, and end then. So long they may take.
_CLEARING, _CLEARING_SECONDS = (b"resource_tracker", b"torch_shm_manager"), 20.0
_LOOK_SECONDS = 0.005
# Of Linux' prctl.
_SET_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36


class _Process(NamedTuple):
    number: int
    state: str
    parent: int
    group: int
    session: int


def keep_below() -> None:
    """This process, a trial's, ends with its parent, and is the parent of what its own processes leave behind. On Linux."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    with suppress(OSError, AttributeError):
        system = ctypes.CDLL(None)
        system.prctl(_SET_DEATH_SIGNAL, int(signal.SIGKILL))
        system.prctl(_SET_CHILD_SUBREAPER, 1)


def end_all(child: int) -> int:
    """Ends the process and everything that it started; how it ended."""
    while True:
        try:
            _end_what_is_below(child)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child, signal.SIGKILL)
            _send(child, signal.SIGKILL)
            with suppress(ChildProcessError):
                return os.waitpid(child, 0)[1]
            return 0
        except KeyboardInterrupt:
            # Once more: nothing stays behind. The first one is on its way already.
            continue


def end_what_it_started() -> None:
    """In a trial, before it ends: afterwards nobody knows whose they were."""
    for one in _below(os.getpid()):
        if not _clears(one):
            _send(one, signal.SIGKILL)


def _end_what_is_below(child: int) -> None:
    # It starts nothing more meanwhile.
    _send(child, signal.SIGSTOP)
    found = _below(child)
    clearing = {one for one in found if _clears(one)}
    for one in found - clearing:
        _send(one, signal.SIGKILL)
    if clearing:
        # They wait for it, too.
        _send(child, signal.SIGKILL)
    until = time.monotonic() + _CLEARING_SECONDS
    while clearing and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)
        clearing &= {one.number for one in _processes() if one.state != "Z"}
    for one in clearing:
        _send(one, signal.SIGKILL)


def _below(child: int) -> set[int]:
    """The numbers of all that it started, and of what these started."""
    everything = _processes()
    found = {one.number for one in everything if child in (one.parent, one.group, one.session)}
    count = 0
    while count < len(found):
        count = len(found)
        found |= {one.number for one in everything if one.parent in found}
    return found - {child}


def _processes() -> list[_Process]:
    """All that run now; none where the system does not say."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            state, *numbers = _stat(int(place.name))
            found.append(_Process(int(place.name), state, *map(int, numbers)))
    return found


def _stat(number: int) -> list[str]:
    """Its state, parent, group and session. Raises OSError where it is gone."""
    return Path(f"/proc/{number}/stat").read_text(errors="replace").rpartition(")")[2].split()[:4]


def _clears(number: int) -> bool:
    """Whether it is one of those. While the system loads a program, its process has no command line yet, and who started it goes
    on: 20 ms for Python, and several times that on a busy machine."""
    until = time.monotonic() + _CLEARING_SECONDS
    with suppress(OSError):
        while not (command := Path(f"/proc/{number}/cmdline").read_bytes()):
            # (A zombie has none, either.)
            if _stat(number)[0] in "ZX" or time.monotonic() > until:
                break
            time.sleep(_LOOK_SECONDS)
        return any(word in command for word in _CLEARING)
    return False


def _send(number: int, signal_number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(number, signal_number)
