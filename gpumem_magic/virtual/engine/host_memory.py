"""How much memory the host has left, for tensors whose values lie there."""

from __future__ import annotations

import time
from pathlib import Path

from gpumem_magic.units import MIB, human

# Smaller requests are added up, and looked at together: reading takes longer than most operators.
_LOOKED_AT = 64 * MIB
# How soon again, in seconds: a program can't write much in that time.
_LOOKED_AGAIN = 0.01
# There is no hurry while so small a part of what is left was asked for.
_PART = 16
# What is left to others.
_SPARED = 256 * MIB

_MEMINFO = Path("/proc/meminfo")
_LIMIT, _CURRENT = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


class HostMemoryFull(MemoryError):
    """A device that computes was asked for more than the host has."""


def available() -> int | None:
    """Bytes that a program can still have on the host without swapping; None where the system does not say."""
    found = [number for number in (_of_the_machine(), _of_the_container()) if number is not None]
    return max(0, min(found)) if found else None


def _of_the_machine() -> int | None:
    try:
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _of_the_container() -> int | None:
    try:
        return int(_LIMIT.read_text()) - int(_CURRENT.read_text())
    except (OSError, ValueError):
        return None


class HostMemory:
    """Asked before a device that computes takes memory. asked: what was asked for since it looked; it looks again at `enough`."""

    def __init__(self) -> None:
        self.asked = 0
        self.enough = _LOOKED_AT
        self._looked = 0.0

    def ask(self, nbytes: int) -> None:
        """Raises HostMemoryFull where so many bytes more do not fit into the host's memory."""
        self.asked += nbytes
        if self.asked >= self.enough:
            self.look(nbytes)

    def look(self, nbytes: int) -> None:
        """The same, where enough was asked for: reading what is left takes longer than most operators."""
        now = time.monotonic()
        if nbytes < _LOOKED_AT and now - self._looked < _LOOKED_AGAIN:
            return
        self.asked, self._looked = 0, now
        left = available()
        self.enough = max(_LOOKED_AT, (left or 0) // _PART)
        if left is not None and nbytes + _SPARED > left:
            raise HostMemoryFull(
                f"with values=real, tensors lie in the host's memory too: {human(nbytes)} more were asked for, and {human(left)} "
                "are available. Take smaller sizes, or the virtual GPU without values=real, which needs no such memory"
            )
