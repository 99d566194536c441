"""Real GPUs as the watch reads them: PyTorch's counters every time, the driver's figures once a second.

Cheap calls only: no snapshot, no synchronisation. What the driver does not say is None.
"""

# NVML's functions carry no types.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gpumem_magic.devices.base import Counters, DeviceFacts

DRIVER_SECONDS = 1.0


@dataclass(frozen=True)
class Driver:
    """What NVML said about a device, in bytes. own: this process's share, None where the driver can't tell."""

    used: int
    own: int | None


class RealDevice:
    """One GPU. torch: the module, handed in so that nothing here imports it."""

    def __init__(self, torch: Any, index: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._torch = torch
        self._index = index
        self._clock = clock
        properties = torch.cuda.get_device_properties(index)
        uuid = getattr(properties, "uuid", None)
        self._nvml, self._handle = _open_nvml(None if uuid is None else f"GPU-{uuid}")
        total = None if self._handle is None else int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).total)
        name, memory = str(properties.name), int(properties.total_memory)
        self.facts = DeviceFacts(name, "cuda", index, None if uuid is None else str(uuid), memory, total)
        self._driver: Driver | None = None
        self._driver_reserved = 0
        self._driver_at = float("-inf")

    def counters(self) -> Counters:
        stats = self._torch.cuda.memory_stats_as_nested_dict(self._index)
        allocated, reserved = (_of(stats, name) for name in ("allocated_bytes", "reserved_bytes"))
        self._ask_driver(reserved["current"])
        used = context = others = either = None
        if self._driver is not None:
            # Between two looks at the driver the device grows by what the allocator took.
            outside = max(self._driver.used - self._driver_reserved, 0)
            used = reserved["current"] + outside
            if self._driver.own is None:
                either = outside
            else:
                context = min(max(self._driver.own - self._driver_reserved, 0), outside)
                others = outside - context
        return Counters(
            allocated=allocated["current"],
            reserved=reserved["current"],
            device_used=used,
            context=context,
            other_processes=others,
            context_or_others=either,
            peak_allocated=allocated["peak"],
            peak_reserved=reserved["peak"],
            retries=int(stats.get("num_alloc_retries", 0)),
        )

    def _ask_driver(self, reserved: int) -> None:
        if self._handle is None or self._clock() - self._driver_at < DRIVER_SECONDS:
            return
        self._driver_at = self._clock()
        try:
            used = int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)
            own = [
                process.usedGpuMemory
                for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
                if process.pid == os.getpid() and process.usedGpuMemory is not None
            ]
        except self._nvml.NVMLError:
            return
        self._driver = Driver(used, int(own[0]) if own else None)
        self._driver_reserved = reserved


class RealMachine:
    """The GPUs of this computer."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.devices = [RealDevice(torch, index) for index in range(torch.cuda.device_count())]

    def in_use(self) -> Sequence[RealDevice]:
        """The devices that hold memory of this process, and the current one: a big machine has many that are idle."""
        current = self._torch.cuda.current_device()
        return [
            device
            for device in self.devices
            if device.facts.index == current or self._torch.cuda.memory_reserved(device.facts.index)
        ]


def _of(stats: Any, name: str) -> dict[str, int]:
    """A counter of ``torch.cuda.memory_stats_as_nested_dict``, which is empty before the device's first use."""
    found = stats.get(name, {}).get("all", {})
    return {key: int(found.get(key, 0)) for key in ("current", "peak")}


def _open_nvml(uuid: str | None) -> tuple[Any, Any]:
    """The NVML module and a device's handle; (module or None, None) where the driver can't be asked."""
    if uuid is None:
        return None, None
    try:
        import pynvml
    except ImportError:
        return None, None
    try:
        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError:
        return pynvml, None
