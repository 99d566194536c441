"""A machine for tests: real allocators over made-up memory, no tensors of its own, and recordings made by hand."""

from __future__ import annotations

from typing import Any

from gpumem_magic.allocator.caching import CachingAllocator
from gpumem_magic.allocator.memory import DeviceMemory
from gpumem_magic.devices.base import CompiledResults, Counters, DeviceFacts, DeviceLog, FilledPart, Label
from gpumem_magic.devices.reads import Reads
from gpumem_magic.recording.model import Checkpoint, Moment, Recording, Sighting, Span
from gpumem_magic.units import GIB, MIB

CONTEXT = 400 * MIB
IDLE = 2 * MIB


class FakeDevice:
    """A caching allocator with a log; `alloc` and `free` are what a program would do to it."""

    def __init__(self, index: int = 0, kind: str = "virtual", total: int = 16 * GIB) -> None:
        self.facts = DeviceFacts("Fake", kind, index, None, total, total + 200 * MIB)
        self.allocator = CachingAllocator(index, DeviceMemory(total, outside=IDLE))
        self.in_use = False
        self.labels: dict[int, Label] = {}
        self.logs: list[Any] = []

    def alloc(self, size: int, origin: str | None = None, stream: int = 0) -> int:
        self.in_use = True
        address = self.allocator.malloc(size, stream)
        for log in self.logs:
            if origin is not None:
                log.origins[len(log.events) - 1] = origin
        return address

    def free(self, address: int) -> None:
        self.labels.pop(address, None)
        self.allocator.free(address)

    def counters(self) -> Counters:
        reserved = self.allocator.reserved
        context = CONTEXT if self.in_use else 0
        return Counters(
            self.allocator.allocated,
            reserved,
            reserved + context + IDLE,
            context,
            IDLE,
            None,
            retries=self.allocator.num_alloc_retries,
        )

    def segments(self) -> Any:
        return self.allocator.segments()

    def start_log(self) -> Any:
        log = _Log(self)
        self.logs.append(log)
        self.allocator.sinks.append(log.events)
        return log

    def remember(self, labels: dict[int, Label]) -> None:
        self.labels.update(labels)


class _Log:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.first = 0
        self.events: list[Any] = []
        self.origins: dict[int, str] = {}
        self.whole = DeviceLog(device.facts, device.segments(), self.events, self.origins, dict(device.labels))
        self.growing = self.whole if device.facts.kind == "virtual" else None

    def position(self) -> int:
        return len(self.events)

    def moment(self, exact: bool = True) -> tuple[int, Counters]:
        return len(self.events), self.device.counters()

    def forget(self, needed: Any) -> None:
        pass

    def stop(self) -> DeviceLog:
        device = self.device
        device.logs = [other for other in device.logs if other is not self]
        device.allocator.sinks[:] = [sink for sink in device.allocator.sinks if sink is not self.events]
        return self.whole


class FakeMachine:
    """Knows where a tensor "is" because the test said so: `places` maps id(tensor) to (device, address)."""

    def __init__(self, *devices: FakeDevice) -> None:
        self.devices = devices or (FakeDevice(),)
        self.places: dict[int, tuple[int, int]] = {}
        self.reads = Reads()

    def settle(self) -> None:
        pass

    def notes(self) -> list[str]:
        return []

    def locate(self, tensor: Any) -> tuple[int, int] | None:
        return self.places.get(id(tensor))

    def plain_place(self, tensor: Any) -> tuple[int, int] | None:
        return None

    def compiled_results(self) -> CompiledResults:
        return CompiledResults()

    def filled_parts(self) -> dict[tuple[int, int], tuple[FilledPart, ...]]:
        return {}

    def rewritten(self) -> dict[tuple[int, int], int]:
        return {}

    def put(self, tensor: Any, device: int = 0, origin: str | None = None) -> int:
        """Gives a tensor of the host an allocation of its size."""
        address = self.devices[device].alloc(tensor.numel() * tensor.element_size(), origin)
        self.places[id(tensor)] = device, address
        return address


class Tape:
    """Makes a recording of one device by hand: what happens on `device` between its methods lands in the log."""

    def __init__(self, device: FakeDevice | None = None) -> None:
        self.device = device or FakeDevice()
        self.log = self.device.start_log()
        self.ticks = 0
        self.points: list[Checkpoint] = []
        self.spans: list[Span] = []
        self.looks: list[Sighting] = []

    @property
    def position(self) -> int:
        return len(self.log.events)

    def moment(self) -> Moment:
        self.ticks += 1
        index = self.device.facts.index
        return Moment({index: self.position}, {index: self.device.counters()}, self.ticks)

    def row(
        self,
        statement: str = "",
        line: int = 0,
        iteration: tuple[int, ...] = (),
        loops: tuple[int, ...] = (),
        kind: str = "statement",
        at: Moment | None = None,
    ) -> None:
        moment = at or self.moment()
        self.points.append(Checkpoint(kind, statement or kind, statement, line, moment, iteration, loops))

    def span(self, kind: str, label: str = "it") -> _Spanning:
        return _Spanning(self, kind, label)

    def see(self, address: int, role: str, name: str | None = None) -> None:
        self.looks.append(Sighting(self.device.facts.index, self.position, address, role, name))

    def finish(self, **more: Any) -> Recording:
        index = self.device.facts.index
        log = self.log.stop()
        spans = tuple(sorted(self.spans, key=lambda span: (span.start.tick, -span.end.tick)))
        return Recording("2.13.0", index, {index: log}, tuple(self.points), spans, tuple(self.looks), **more)


class _Spanning:
    def __init__(self, tape: Tape, kind: str, label: str) -> None:
        self.tape, self.kind, self.label = tape, kind, label

    def __enter__(self) -> None:
        self.start = self.tape.moment()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self.tape.spans.append(Span(self.kind, self.label, self.start, self.tape.moment(), kind is not None))
