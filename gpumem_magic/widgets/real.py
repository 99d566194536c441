"""Real GPUs as the watch reads them: PyTorch's counters every time, the driver's figures once a second.

Cheap calls only: no snapshot, no synchronisation, no log of its own. What the driver does not say is None.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from gpumem_magic.devices.base import Counters, DeviceFacts
from gpumem_magic.devices.cuda import CudaDevice, CudaMachine
from gpumem_magic.devices.driver import Driver
from gpumem_magic.devices.readings import Reading, reading_of

DRIVER_SECONDS = 1.0


class RealDevice:
    """One GPU that is in use. torch: the module, handed in so that nothing here imports it."""

    def __init__(self, torch: Any, device: CudaDevice, clock: Callable[[], float] = time.monotonic) -> None:
        self._torch = torch
        self._device = device
        self._clock = clock
        self._driver: Counters | None = None
        self._driver_at = float("-inf")

    @property
    def facts(self) -> DeviceFacts:
        return self._device.facts

    def counters(self) -> Counters:
        return self.read()[0]

    def read(self) -> tuple[Counters, int]:
        """The counters, and how many allocator events they have counted since the process began."""
        reading = self._reading()
        self._ask_driver()
        used = context = others = either = None
        if self._driver is not None and self._driver.device_used is not None:
            # Between two looks at the driver the device grows by what the allocator took.
            used = self._driver.device_used - self._driver.reserved + reading.reserved
            context, others = self._driver.context, self._driver.other_processes
            either = self._driver.context_or_others
        counters = Counters(
            allocated=reading.allocated,
            reserved=reading.reserved,
            device_used=used,
            context=context,
            other_processes=others,
            context_or_others=either,
            peak_allocated=reading.peak_allocated,
            peak_reserved=reading.peak_reserved,
            retries=reading.retries,
        )
        return counters, sum(reading.counts)

    @property
    def holds_memory(self) -> bool:
        return self._reading().reserved > 0

    def _reading(self) -> Reading:
        try:
            return reading_of(self._torch.cuda.memory_stats_as_nested_dict(self._device.index))
        except (RuntimeError, NotImplementedError):
            # An allocator of somebody else's that keeps no figures: only the driver's are shown.
            return Reading()

    def _ask_driver(self) -> None:
        now = self._clock()
        if now - self._driver_at >= DRIVER_SECONDS:
            self._driver_at = now
            self._driver = self._device.counters()


class RealMachine:
    """The GPUs of this computer. Made when CUDA is in use already. driver: NVML; None opens it."""

    def __init__(self, torch: Any, driver: Driver | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._torch = torch
        self.devices = [RealDevice(torch, device, clock) for device in CudaMachine(torch, driver).devices]

    def in_use(self) -> Sequence[RealDevice]:
        """The devices that hold memory of this process, and the current one: a big machine has many that are idle."""
        current = self._torch.cuda.current_device()
        return [device for device in self.devices if device.facts.index == current or device.holds_memory]
