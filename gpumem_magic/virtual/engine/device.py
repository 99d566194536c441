"""One emulated GPU: the caching allocator over a memory of the card's size, and the logs that recordings keep of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gpumem_magic.allocator.caching import CachingAllocator
from gpumem_magic.allocator.memory import BASE_ADDRESS, DeviceMemory, FirstFitAddresses
from gpumem_magic.allocator.settings import EnvironmentSettings
from gpumem_magic.devices.base import Counters, DeviceFacts, DeviceLog, Label
from gpumem_magic.snapshot.model import Segment, TraceEvent
from gpumem_magic.virtual.card import catalog
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.modes import STATE

# Devices' addresses must not overlap; a terabyte each is more than any has.
_ADDRESS_STEP = 1 << 40


class _Log:
    """One recording's view of a device: the events since it began."""

    def __init__(self, start: tuple[Segment, ...], carried: dict[int, Label]) -> None:
        self.start = start
        self.carried = carried
        self.events: list[TraceEvent] = []
        self.origins: dict[int, str] = {}


class VirtualDevice:
    """One emulated GPU: the caching allocator over a memory of the model's size."""

    def __init__(self, index: int, model: catalog.GpuModel, settings: EnvironmentSettings) -> None:
        self.index = index
        self.model = model
        self.uuid = catalog.device_uuid(model.name, index)
        self.in_use = False
        addresses = FirstFitAddresses(BASE_ADDRESS + index * _ADDRESS_STEP)
        self.memory = DeviceMemory(model.total_bytes, model.idle_bytes, addresses)
        self.allocator = CachingAllocator(index, self.memory, settings.settings)
        self.allocator.settings_text = settings.text
        self._logs: list[_Log] = []
        self._labels: dict[int, Label] = {}

    # ---- what the allocator and the driver say

    @property
    def facts(self) -> DeviceFacts:
        model = self.model
        return DeviceFacts(model.name, "virtual", self.index, self.uuid, model.total_bytes, model.smi_total_bytes)

    def context_bytes(self) -> int:
        return self.model.context_bytes if self.in_use else 0

    def process_bytes(self) -> int:
        return self.context_bytes() + self.allocator.reserved

    def used_bytes(self) -> int:
        return self.model.idle_bytes + self.process_bytes()

    def use(self) -> None:
        """The CUDA context is there from the first use of the device."""
        if not self.in_use:
            self.in_use = True
            self.memory.outside = self.model.idle_bytes + self.model.context_bytes

    def counters(self) -> Counters:
        allocator = self.allocator
        return Counters(
            allocated=allocator.allocated,
            reserved=allocator.reserved,
            device_used=self.used_bytes(),
            context=self.context_bytes(),
            other_processes=self.model.idle_bytes,
            context_or_others=None,
            peak_allocated=allocator.peak_allocated,
            peak_reserved=allocator.peak_reserved,
            retries=allocator.num_alloc_retries,
        )

    def segments(self) -> tuple[Segment, ...]:
        return self.allocator.segments()

    # ---- memory

    def malloc(self, nbytes: int, stream: int) -> int:
        self.use()
        address = self.allocator.malloc(nbytes, stream)
        if STATE.origin != "compute":
            for log in self._logs:
                log.origins[len(log.events) - 1] = STATE.origin
            if STATE.origin == "workspace":
                # A recording that begins later is told of it as well.
                self._labels[address] = Label("workspace", "stack")
        return address

    def free(self, address: int) -> None:
        self._labels.pop(address, None)
        self.allocator.free(address)

    # ---- logs

    def start_log(self) -> _Log:
        log = _Log(self.allocator.segments(), dict(self._labels))
        self._logs.append(log)
        self.allocator.sinks.append(log.events)
        return log

    def position(self, log: Any) -> int:
        return len(log.events)

    def stop_log(self, log: Any) -> DeviceLog:
        self._logs = [other for other in self._logs if other is not log]
        self.allocator.sinks[:] = [sink for sink in self.allocator.sinks if sink is not log.events]
        return DeviceLog(self.facts, log.start, log.events, log.origins, log.carried, self.allocator.settings_in_force)

    @property
    def recorded(self) -> bool:
        return bool(self._logs)

    def remember(self, labels: Mapping[int, Label]) -> None:
        self._labels.update(labels)

    def is_workspace(self, address: int) -> bool:
        """Whether a live block is what a library keeps; False for one that it took and gives back."""
        label = self._labels.get(address)
        return label is not None and label.category == "workspace"


class Machine(Protocol):
    """What PyTorch's face asks of all devices together."""

    engine: Engine
    process: int

    @property
    def devices(self) -> Sequence[VirtualDevice]: ...

    def settle(self) -> None:
        """Does the frees that wait, so that counters and logs are those of now."""

    def malloc(self, device: int, nbytes: int) -> int: ...

    def free(self, device: int, address: int) -> None: ...
