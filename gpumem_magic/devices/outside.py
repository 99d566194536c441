"""What a device holds beside PyTorch's allocator: this process's context, other processes, or the sum of both.

The driver is asked for the device's total at each row; inside of one where the allocator has taken or given back memory since,
or else at most every two milliseconds; and for the list of processes only when that total has moved by something that the
allocator did not do: at most one cheap question per checkpoint. With an H100 to itself (driver 580.159) the first takes 9 to 20
microseconds and the second 60. A driver that has been slow twice in a row is left alone for a while, and its last figures are
given until then.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import NamedTuple

from gpumem_magic.devices.driver import DriverDevice

# Seconds: who answers within this is asked each time.
_PROMPT = 0.0005
# Seconds within which what is outside of the allocator is taken to be as it was, as long as the allocator's share is.
_FRESH = 0.002
# Of the time, one part in so many may be spent on waiting for the driver.
_SHARE = 20


class Shares(NamedTuple):
    """Bytes; None is not available. Either context and other_processes are known, or their sum, or nothing."""

    device_used: int | None = None
    context: int | None = None
    other_processes: int | None = None
    context_or_others: int | None = None


class OutsideMemory:
    """One device's. runtime_used: bytes in use as the CUDA runtime tells them, asked where the driver can't be.

    It is asked only where this process has a context: asking would make one. clock: seconds, which never go back.
    """

    def __init__(
        self,
        device: DriverDevice | None,
        runtime_used: Callable[[], int | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._device = device
        self._runtime_used = runtime_used
        self._clock = clock
        self._seen: tuple[int, bool] | None = None
        self._own: int | None = None
        self._asked_at = self._again_at = float("-inf")
        self._took = self._late = 0.0
        # The last answer, and what it was asked with.
        self._told: tuple[int, bool, Shares] | None = None

    def now(self, reserved: int, has_context: bool, exact: bool = True) -> Shares:
        """reserved: what PyTorch's allocator holds on the device at this moment, in bytes. exact: whether an answer of two
        milliseconds ago is too old."""
        began = self._clock()
        told = self._told
        if not exact and told is not None and told[:2] == (reserved, has_context) and began - self._asked_at < _FRESH:
            return told[2]
        if began < self._again_at and self._seen is not None and self._seen[1] == has_context:
            # What is outside of the allocator is taken to be as it was.
            self._late = max(self._late, began - self._asked_at)
            return self._shared(self._seen[0] + reserved, self._seen[0])
        shares = self._asked(reserved, has_context)
        self._told = reserved, has_context, shares
        self._asked_at = self._clock()
        took = self._asked_at - began
        # (The first question may only have woken it.)
        if min(took, self._took) > _PROMPT:
            self._again_at = self._asked_at + (_SHARE - 1) * took
        self._took = took
        return shares

    def told_late(self) -> float:
        """The oldest figure that was given since this was last asked, in seconds; 0 where all were of their moment."""
        late, self._late = self._late, 0.0
        return late

    def _asked(self, reserved: int, has_context: bool) -> Shares:
        used = self._used(has_context)
        if used is None or used < reserved:
            # Less in use than we hold: a figure that means something else (WSL, a stale driver) is no figure.
            self._seen = None
            return Shares()
        outside = used - reserved
        if self._seen != (outside, has_context):
            self._seen = outside, has_context
            self._own = self._context(reserved, has_context)
        return self._shared(used, outside)

    def _shared(self, used: int, outside: int) -> Shares:
        context = self._own
        if context is None or context > outside:
            return Shares(used, context_or_others=outside)
        return Shares(used, context, outside - context)

    def _used(self, has_context: bool) -> int | None:
        memory = None if self._device is None else self._device.memory()
        if memory is not None:
            return memory.used
        return self._runtime_used() if has_context else None

    def _context(self, reserved: int, has_context: bool) -> int | None:
        """This process's memory outside the allocator. Inside a container its number is another's, or nobody's."""
        usage = None if self._device is None else self._device.usage()
        own = None if usage is None else usage.get(os.getpid())
        if own is not None and own >= reserved and own > 0:
            return own - reserved
        return None if has_context else 0
