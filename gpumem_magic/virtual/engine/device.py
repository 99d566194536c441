"""One emulated GPU: the caching allocator over a memory of the card's size, and the logs that recordings keep of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Protocol

from gpumem_magic.allocator.caching import CachingAllocator
from gpumem_magic.allocator.memory import (
    BASE_ADDRESS,
    CHUNK,
    ChunkedAddresses,
    DeviceMemory,
    FirstFitAddresses,
)
from gpumem_magic.allocator.settings import EnvironmentSettings
from gpumem_magic.devices.base import Birth, Counters, DeviceFacts, DeviceLog, GpuProcess, Label, Log, Padded
from gpumem_magic.snapshot.model import Segment, TraceEvent
from gpumem_magic.virtual.card import catalog
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.modes import STATE
from gpumem_magic.virtual.engine.pinned import Pinned

# Devices' addresses must not overlap; a terabyte each is more than any has.
_ADDRESS_STEP = 1 << 40


# One part in so many of what is allocated is worth noting where it came from.
_WORTH = 1000
# What a copy is of is told before so many further events.
_NEWEST = 16
# How often a glance is taken again where memory has moved meanwhile.
_TRIES = 3


class VirtualLog:
    """One recording's view of a device: the events since it began. A `Log`."""

    first = 0

    def __init__(self, device: VirtualDevice) -> None:
        self._device = device
        self.events: list[TraceEvent] = []
        self.bell: _Bell | None = None
        self.origins: dict[int, str] = {}
        self.births: dict[int, Birth] = {}
        self.copied: dict[int, int] = {}
        self.padded: dict[int, Padded] = {}
        self.growing = DeviceLog(
            device.facts,
            device.segments(),
            self.events,
            self.origins,
            dict(device.labels),
            births=self.births,
            copied=self.copied,
            padded=self.padded,
        )

    def position(self) -> int:
        return len(self.events)

    def newest_at(self, address: int) -> int | None:
        """The event of the newest allocation at an address, of the last ones."""
        last = len(self.events) - 1
        for event in range(last, max(-1, last - _NEWEST), -1):
            if self.events[event].address == address and self.events[event].action == "alloc":
                return event
        return None

    def moment(self, exact: bool = True) -> tuple[int, Counters]:
        return len(self.events), self._device.counters()

    def forget(self, needed: Set[int]) -> None:
        """Every event is kept: a virtual device is not run for hours."""

    def tell(self, moved: Callable[[bool], None] | None) -> None:
        sinks = self._device.allocator.sinks
        if self.bell is not None:
            sinks[:] = [sink for sink in sinks if sink is not self.bell]
        self.bell = None if moved is None else _Bell(moved)
        if self.bell is not None:
            sinks.append(self.bell)

    def stop(self) -> DeviceLog:
        return self._device.ended(self)


class _Bell:
    """A sink of events that keeps none."""

    def __init__(self, moved: Callable[[bool], None]) -> None:
        self._moved = moved

    def append(self, event: TraceEvent, /) -> None:
        self._moved(event.action.startswith("free"))


class _Follower:
    """A sink that tells somebody of each event, and how the memory came to be wanted."""

    def __init__(self, told: Callable[[TraceEvent, str], None]) -> None:
        self._told = told

    def append(self, event: TraceEvent, /) -> None:
        self._told(event, STATE.origin)


class VirtualDevice:
    """One emulated GPU: the caching allocator over a memory of the model's size."""

    def __init__(self, index: int, model: catalog.GpuModel, settings: EnvironmentSettings) -> None:
        self.index = index
        self.model = model
        self.uuid = catalog.device_uuid(model.name, index)
        self.in_use = False
        self._beside = 0
        self._loaded = False
        base = BASE_ADDRESS + index * _ADDRESS_STEP
        # (From the top down with a distance, so that none of one device's ends where another's begins.)
        top = base + _ADDRESS_STEP - CHUNK
        addresses = ChunkedAddresses(top) if model.addresses_fall else FirstFitAddresses(base)
        self.memory = DeviceMemory(model.total_bytes, model.idle_bytes, addresses)
        self.allocator = CachingAllocator(index, self.memory, settings.settings)
        self.allocator.settings_text = settings.text
        self._logs: list[VirtualLog] = []
        # Whether there are some: each operator asks.
        self.is_recorded = False
        self.labels: dict[int, Label] = {}

    # ---- what the allocator and the driver say

    @property
    def facts(self) -> DeviceFacts:
        model = self.model
        return DeviceFacts(model.name, "virtual", self.index, self.uuid, model.total_bytes, model.smi_total_bytes)

    def context_bytes(self) -> int:
        """With what libraries have from the driver themselves."""
        later = 0 if self._loaded else self.model.first_uses.elementwise
        return (self.model.context_bytes - later if self.in_use else 0) + self._beside

    def process_bytes(self) -> int:
        return self.context_bytes() + self.allocator.reserved

    def used_bytes(self) -> int:
        return self.model.idle_bytes + self.process_bytes()

    def use(self) -> None:
        """The CUDA context is there from the first use of the device."""
        if not self.in_use:
            self.in_use = True
            self.memory.outside = self.model.idle_bytes + self.context_bytes()

    @property
    def begins_with_less(self) -> bool:
        """Whether a part of the context is still to come."""
        return not self._loaded and self.model.first_uses.elementwise > 0

    def load(self) -> None:
        """That part comes, with the first kernel that works element by element."""
        self.use()
        if self.model.first_uses.elementwise > self.memory.free:
            raise RuntimeError("CUDA error: out of memory")
        self._loaded = True
        self.memory.outside = self.model.idle_bytes + self.context_bytes()

    def take_beside(self, nbytes: int) -> None:
        """A library takes memory from the driver; less than nothing is given back."""
        self.use()
        if nbytes > self.memory.free:
            raise RuntimeError("CUDA driver error: out of memory")
        self._beside += nbytes
        self.memory.outside = self.model.idle_bytes + self.context_bytes()

    def become(self, model: catalog.GpuModel) -> None:
        """Another card, with the memory as it lies."""
        self.model = model
        self.uuid = catalog.device_uuid(model.name, self.index)
        self.memory.total = model.total_bytes
        self.memory.address_space = model.total_bytes + model.total_bytes // 8
        self.memory.outside = model.idle_bytes + self.context_bytes()

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

    def glance(self, log: Log | None = None) -> tuple[Counters, int]:
        if log is None:
            return self.counters(), 0
        position = log.position()
        for _ in range(_TRIES):
            before, counters = position, self.counters()
            position = log.position()
            if position == before:
                break
        return counters, before

    def processes(self) -> tuple[GpuProcess, ...] | None:
        return None

    def segments(self) -> tuple[Segment, ...]:
        return self.allocator.segments()

    # ---- memory

    def malloc(self, nbytes: int, stream: int) -> int:
        if not self.in_use:
            self.use()
        address = self.allocator.malloc(nbytes, stream)
        if STATE.origin != "compute":
            for log in self._logs:
                log.origins[len(log.events) - 1] = STATE.origin
            if STATE.origin == "workspace":
                # A recording that begins later is told of it as well.
                self.labels[address] = Label("workspace", "stack")
        return address

    def free(self, address: int) -> None:
        self.labels.pop(address, None)
        self.allocator.free(address)

    def is_large(self, nbytes: int) -> bool:
        """Whether a log runs, to which so much is worth a word."""
        return bool(self._logs) and nbytes * _WORTH >= self.allocator.allocated

    def born(self, birth: Birth) -> None:
        """How the last allocation, or the last request that failed, came to be."""
        for log in self._logs:
            log.births[len(log.events) - 1] = birth

    def copied(self, address: int, source: int) -> None:
        """One of the newest allocations is a copy of what lies at another address."""
        for log in self._logs:
            event = log.newest_at(address)
            if event is not None:
                log.copied[event] = source

    def padded(self, address: int, known: Padded) -> None:
        """One of the newest allocations has rows with padding."""
        for log in self._logs:
            event = log.newest_at(address)
            if event is not None:
                log.padded[event] = known

    # ---- logs

    def start_log(self) -> VirtualLog:
        log = VirtualLog(self)
        self._logs.append(log)
        self.is_recorded = True
        self.allocator.sinks.append(log.events)
        return log

    def follow(self, told: Callable[[TraceEvent, str], None]) -> Callable[[], None]:
        """Tells of every event, and its origin, until the answer is called."""
        sinks, follower = self.allocator.sinks, _Follower(told)
        sinks.append(follower)

        def end() -> None:
            sinks[:] = [sink for sink in sinks if sink is not follower]

        return end

    def ended(self, log: VirtualLog) -> DeviceLog:
        """What a log has become, which ends with this."""
        self._logs = [other for other in self._logs if other is not log]
        self.is_recorded = bool(self._logs)
        self.allocator.sinks[:] = [
            sink for sink in self.allocator.sinks if sink is not log.events and sink is not log.bell
        ]
        return replace(log.growing, settings=self.allocator.settings_in_force)

    def end_logs(self) -> None:
        """Ends all logs."""
        while self._logs:
            self.ended(self._logs[-1])

    def remember(self, labels: Mapping[int, Label]) -> None:
        self.labels.update(labels)


class MachineForTorch(Protocol):
    """What PyTorch's face asks of all devices together."""

    engine: Engine
    pinned: Pinned
    process: int

    @property
    def devices(self) -> Sequence[VirtualDevice]: ...

    def settle(self) -> None:
        """Does the frees that wait, so that counters and logs are those of now."""

    def malloc(self, device: int, nbytes: int) -> int: ...

    def free(self, device: int, address: int) -> None: ...

    def begin_streams(self, device: int) -> None:
        """The program makes a stream on the device."""
