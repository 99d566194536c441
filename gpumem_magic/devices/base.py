"""What every device, real or virtual, can be asked: its facts, its counters now, and the log of what its allocator does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from gpumem_magic.snapshot.model import Segment, TraceEvent
from gpumem_magic.snapshot.rules import DEFAULT_SETTINGS, AllocatorSettings


@dataclass(frozen=True)
class DeviceFacts:
    """What does not change. kind: "cuda" or "virtual". `total_bytes` is torch's figure, `smi_total_bytes` nvidia-smi's."""

    name: str
    kind: str
    index: int
    uuid: str | None
    total_bytes: int
    smi_total_bytes: int | None


@dataclass(frozen=True)
class Counters:
    """What allocator and driver report at a moment, in bytes; null (None) is unavailable, never 0.

    device_used = reserved + context + other_processes, or reserved + context_or_others where the driver can't tell this
    process from the others (context and other_processes are None then).
    """

    allocated: int
    reserved: int
    device_used: int | None
    context: int | None
    other_processes: int | None
    context_or_others: int | None
    peak_allocated: int = 0
    peak_reserved: int = 0
    retries: int = 0


@dataclass(frozen=True)
class Label:
    """What an allocation is and how that is known (the ledger's categories and kinds of evidence)."""

    category: str
    evidence: str
    name: str | None = None


@dataclass(frozen=True)
class DeviceLog:
    """What a device's allocator did between two moments.

    start: the segments when the log began. events: since then; "position p" is the moment after the first p events.
    origins: index of an alloc event -> how the block came to be: "workspace" (a library's scratch memory), "estimate"
    (likewise, of a size that only the library knows: a virtual device's estimate), "host_copy" (a copy from the host),
    "factory" (torch.zeros, randn, empty and so on), "compute" (an operator's output or scratch), "summed" (a stand-in for
    what is only known as a total: the events were dropped, or the allocator has none).
    carried: address -> label known from an earlier recording, of blocks that were live at the start.
    settings: the allocator's, without which block sizes can't be recounted.
    places: what `Device.position` had answered -> the position in `events`, where events had to be left out and the two are
    not the same; None where they are.
    """

    facts: DeviceFacts
    start: tuple[Segment, ...]
    events: Sequence[TraceEvent]
    origins: Mapping[int, str] = field(default_factory=dict)
    carried: Mapping[int, Label] = field(default_factory=dict)
    settings: AllocatorSettings = DEFAULT_SETTINGS
    places: Mapping[int, int] | None = None


class Device(Protocol):
    """One GPU, or one emulated GPU."""

    @property
    def facts(self) -> DeviceFacts: ...

    def counters(self) -> Counters:
        """Figures of now. Cheap (microseconds on a virtual device)."""

    def segments(self) -> tuple[Segment, ...]:
        """The allocator's segments and blocks now."""

    def start_log(self) -> object:
        """Begins to keep events; returns a handle for the next three. Several logs may run at once."""

    def position(self, log: object) -> int:
        """The number of events in the log so far. Never falls, and is the same twice only where nothing moved."""

    def stop_log(self, log: object) -> DeviceLog:
        """Ends the log. Allowed once."""

    def remember(self, labels: Mapping[int, Label]) -> None:
        """Keeps the labels of blocks that are live now (by address) for later recordings: the next log's `carried`."""


@runtime_checkable
class LongRunning(Protocol):
    """A device whose logs can be thinned while they run."""

    def forget(self, log: object, needed: Set[int]) -> None:
        """Positions that were answered so far and are not needed will not be asked about: what only they need may go."""


class Machine(Protocol):
    """All devices of one kind that the process sees: the GPUs of this computer, or the virtual ones that are on."""

    @property
    def devices(self) -> Sequence[Device]: ...

    def locate(self, tensor: Any) -> tuple[int, int] | None:
        """(device index, address of the allocation that holds the tensor's storage), or None for a tensor elsewhere."""

    @property
    def stand_ins(self) -> Counter[tuple[str, int]]:
        """(file name, line) of the user's code -> how often a device value was read there that does not exist.

        Only grows; a recorder takes the difference. Empty on a real machine, which has the values.
        """
