"""What a device holds beside PyTorch's allocator: this process's context, other processes, or the sum of both.

The driver is asked for the device's total each time, and for the list of processes only when that total has moved by something
that the allocator did not do: one cheap question per checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from gpumem_magic.devices.driver import DriverDevice


@dataclass(frozen=True)
class Shares:
    """Bytes; None is not available. Either context and other_processes are known, or their sum, or nothing."""

    device_used: int | None = None
    context: int | None = None
    other_processes: int | None = None
    context_or_others: int | None = None


class OutsideMemory:
    """One device's. runtime_used: bytes in use as the CUDA runtime tells them, asked where the driver can't be.

    It is asked only where this process has a context: asking would make one.
    """

    def __init__(self, device: DriverDevice | None, runtime_used: Callable[[], int | None]) -> None:
        self._device = device
        self._runtime_used = runtime_used
        self._seen: tuple[int, bool] | None = None
        self._own: int | None = None

    def now(self, reserved: int, has_context: bool) -> Shares:
        """reserved: what PyTorch's allocator holds on the device at this moment, in bytes."""
        used = self._used(has_context)
        if used is None or used < reserved:
            # Less in use than we hold: a figure that means something else (WSL, a stale driver) is no figure.
            return Shares()
        outside = used - reserved
        if self._seen != (outside, has_context):
            self._seen = outside, has_context
            self._own = self._context(reserved, has_context)
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
