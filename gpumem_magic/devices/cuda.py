"""The real GPUs: PyTorch's allocators read through their counters and history, the driver's figures beside them.

Nothing here synchronises, empties a cache, resets a peak, or brings CUDA into use. `torch` is handed in.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from gpumem_magic.devices import torch_memory
from gpumem_magic.devices.base import (
    CompiledResults,
    Counters,
    Device,
    DeviceFacts,
    DeviceLog,
    FilledPart,
    GpuProcess,
    Label,
    Log,
)
from gpumem_magic.devices.driver import Driver, DriverDevice
from gpumem_magic.devices.history import RING, AllocatorHistory, OpenLog
from gpumem_magic.devices.outside import OutsideMemory, Shares
from gpumem_magic.devices.readings import CountersReading, Counts, reading_of
from gpumem_magic.devices.unsupported import is_rocm
from gpumem_magic.devices.visible import find
from gpumem_magic.devices.weaving import Woven, weave
from gpumem_magic.snapshot.model import ACTIVE, Segment
from gpumem_magic.units import human

_NO_HISTORY = {
    "cudaMallocAsync": "The allocator's backend is cudaMallocAsync, which keeps no history: rows show its totals, without "
    "categories.",
    "uncached": "PYTORCH_NO_CUDA_MEMORY_CACHING is set, so PyTorch keeps no figures: only the driver's are shown, and tensors "
    "count as context.",
    "pluggable": "A pluggable allocator is in use, which keeps no history: rows show the totals that it reports, "
    "without categories.",
}
# A figure of the driver's that is so many seconds old is worth a word.
_LATE = 0.1
# Seconds between two questions to the driver by one who only looks on.
DRIVER_SECONDS = 1.0


class CudaLog:
    """A log of one GPU's under way: a `Log`."""

    growing = None

    def __init__(self, device: CudaDevice, opened: OpenLog) -> None:
        self._device = device
        self._opened = opened

    @property
    def first(self) -> int:
        return sum(self._opened.base)

    def position(self) -> int:
        with self._device.lock:
            return self._device.history.position(self._opened)

    def moment(self, exact: bool = True) -> tuple[int, Counters]:
        with self._device.lock:
            position, reading = self._device.history.moment(self._opened)
            return position, self._device.counters_of(reading, exact)

    def forget(self, needed: Set[int]) -> None:
        with self._device.lock:
            self._device.history.forget(self._opened, needed)

    def tell(self, moved: Callable[[bool], None] | None) -> None:
        """PyTorch calls nobody."""

    def stop(self) -> DeviceLog:
        with self._device.lock:
            return self._device.ended(self._opened)


class CudaDevice:
    """One GPU. Made by `CudaMachine`."""

    def __init__(
        self,
        torch: Any,
        index: int,
        history: AllocatorHistory,
        driver: Driver,
        lock: threading.RLock,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._torch = torch
        self.index = index
        self.history = history
        self._driver = driver
        self.lock = lock
        self._clock = clock
        self._facts: DeviceFacts | None = None
        self._before_use: DeviceFacts | None = None
        self._nvml: DriverDevice | None = None
        self._outside: OutsideMemory | None = None
        # What a glance knows of the driver's figures, with the allocator's of then.
        self._outside_at_a_glance: OutsideMemory | None = None
        self._glanced: tuple[Shares, int] = Shares(), 0
        self._glanced_at = float("-inf")
        self._labels: dict[int, tuple[int, Label]] = {}
        self._labelled_at: Counts = ()
        self._last: dict[int, int] = {}
        self.notes: list[str] = []
        self.has_ended = False

    @property
    def facts(self) -> DeviceFacts:
        """PyTorch's, once CUDA is in use; until then what the driver says (total_bytes is what it leaves to processes, or 0)."""
        if self._facts is not None:
            return self._facts
        if torch_memory.in_use(self._torch):
            return self._known_facts()
        if self._before_use is None:
            self._nvml = find(self._driver, self.index, None, None)
            memory = None if self._nvml is None else self._nvml.memory()
            name = None if self._nvml is None else self._nvml.name
            usable, total = (0, None) if memory is None else (memory.total - memory.reserved, memory.total)
            uuid = None if self._nvml is None else self._nvml.uuid
            self._before_use = DeviceFacts(name or "CUDA GPU", "cuda", self.index, uuid, usable, total)
        return self._before_use

    def _known_facts(self) -> DeviceFacts:
        properties = self._torch.cuda.get_device_properties(self.index)
        uuid = getattr(properties, "uuid", None)
        total = int(properties.total_memory)
        self._nvml = find(self._driver, self.index, None if uuid is None else str(uuid), total)
        memory = None if self._nvml is None else self._nvml.memory()
        named = None if self._nvml is None else self._nvml.uuid
        if named is None and uuid is not None:
            named = f"GPU-{uuid}"
        self._outside = OutsideMemory(self._nvml, self._runtime_used, self._clock)
        self._facts = DeviceFacts(
            str(properties.name), "cuda", self.index, named, total, None if memory is None else memory.total
        )
        return self._facts

    # ---- now

    def counters(self) -> Counters:
        with self.lock:
            return self.counters_of(self.history.read(self.index))

    def counters_of(self, reading: CountersReading, exact: bool = True) -> Counters:
        """The counters of a reading that was taken just now. Under the lock. exact: see `Log.moment`."""
        if self._facts is None:
            # Reading the facts finds the driver's device.
            self.facts  # noqa: B018
        if self._outside is None:
            self._outside = OutsideMemory(self._nvml, self._runtime_used, self._clock)
        return _counters(reading, self._shares(self._outside, reading.reserved, exact))

    def _shares(self, outside: OutsideMemory, reserved: int, exact: bool = True) -> Shares:
        has_context = reserved > 0 or torch_memory.has_context(self._torch, self.index)
        return outside.now(reserved, has_context, exact)

    def glance(self, log: Log | None = None) -> tuple[Counters, int]:
        """PyTorch's counters, without the lock; the driver's figures are a second old at most."""
        reading = self._read_along()
        now = self._clock()
        if now - self._glanced_at >= DRIVER_SECONDS:
            self._glanced_at = now
            self.facts  # noqa: B018
            if self._outside_at_a_glance is None:
                self._outside_at_a_glance = OutsideMemory(self._nvml, self._runtime_used, self._clock)
            self._glanced = self._shares(self._outside_at_a_glance, reading.reserved), reading.reserved
        shares, reserved = self._glanced
        if shares.device_used is not None:
            # Between two looks at the driver the device grows by what the allocator took.
            shares = shares._replace(device_used=shares.device_used - reserved + reading.reserved)
        return _counters(reading, shares), sum(reading.counts)

    def _read_along(self) -> CountersReading:
        try:
            return reading_of(self._torch.cuda.memory_stats_as_nested_dict(self.index))
        except (RuntimeError, NotImplementedError):
            # An allocator of somebody else's that keeps no figures: only the driver's are shown.
            return CountersReading()

    @property
    def holds_memory(self) -> bool:
        return self._read_along().reserved > 0

    def _runtime_used(self) -> int | None:
        """Bytes in use as cudaMemGetInfo tells them; not while a CUDA graph is captured, where it is not asked for certain."""
        try:
            if self._torch.cuda.is_current_stream_capturing():
                return None
            free, total = self._torch.cuda.mem_get_info(self.index)
        except (RuntimeError, AssertionError):
            return None
        return int(total) - int(free)

    def processes(self) -> tuple[GpuProcess, ...] | None:
        """Who has memory on the device; None where the driver does not say."""
        self.facts  # noqa: B018
        return None if self._nvml is None else self._nvml.processes()

    def segments(self) -> tuple[Segment, ...]:
        return self.history.segments(self.index)

    # ---- logs

    def start_log(self) -> CudaLog:
        with self.lock:
            return CudaLog(self, self.history.open(self.index))

    def ended(self, log: OpenLog) -> DeviceLog:
        """What a log of the history has become, which ends with this."""
        settings = self.history.close(log)
        woven = weave(self.index, log.start, log.marks, log.chunks, settings)
        self._tell(woven, log)
        self._last = _requested(log.chunks[-1].segments) if log.chunks else {}
        return DeviceLog(
            self._facts_at_end(),
            woven.start,
            woven.events,
            woven.origins,
            self._carried(log),
            settings,
            woven.places,
        )

    def end_logs(self) -> None:
        """Ends all logs that are open, without reading them."""
        with self.lock:
            self.history.drop(self.index)

    def _facts_at_end(self) -> DeviceFacts:
        facts = self.facts
        if facts.total_bytes:
            return facts
        try:
            # No driver to ask, and CUDA was never used: only PyTorch can tell how big the device is.
            return self._known_facts()
        except (RuntimeError, AssertionError):
            return facts

    def _tell(self, woven: Woven, log: OpenLog) -> None:
        self.notes.clear()
        self.has_ended = True
        where = f"cuda:{self.index}"
        # Where PyTorch would not record, the history's own note says so.
        recorded = self.history.backend == "native" and not self.history.is_refused
        if recorded and woven.disagreed:
            self.notes.append(
                f"The memory history of {where} does not fit its counters (it may leave kinds of events out, or end in "
                "expandable segments): the rows without it show totals, without categories."
            )
        elif recorded and woven.dropped:
            self.notes.append(
                f"{woven.dropped:,} of {log.marks[-1].raw:,} allocator events on {where} were dropped, because the "
                "history is bounded: rows there show totals; what existed neither before nor after is `unknown`."
            )
        if woven.hidden:
            self.notes.append(
                f"Without a history, {woven.hidden:,} rows or parts on {where} may have peaked higher than shown, up "
                f"to {human(log.marks[-1].peak_allocated)}, the highest since the counters were reset."
            )
        private = sum(
            segment.total_size
            for segment in (log.chunks[-1].segments if log.chunks else ())
            if any(segment.segment_pool_id)
        )
        if private:
            self.notes.append(f"{human(private)} on {where} are in private pools (CUDA graphs or a MemPool).")
        if self._outside is not None and (late := self._outside.told_late()) >= _LATE:
            self.notes.append(
                f"The driver answers slowly about {where}. It was asked less often, so that the program has its time: what rows "
                f"show of its figures is up to {1000 * late:.0f} ms old."
            )

    # ---- labels

    @property
    def labels(self) -> Mapping[int, Label]:
        return {}

    def remember(self, labels: Mapping[int, Label]) -> None:
        with self.lock:
            for address, label in labels.items():
                if address in self._last:
                    self._labels[address] = self._last[address], label
            self._labelled_at = self.history.read(self.index).counts

    def _carried(self, log: OpenLog) -> dict[int, Label]:
        """Labels of blocks that are still there. Where anything happened in between, an address proves little."""
        there = _requested(log.start)
        self._labels = {
            address: (requested, label)
            for address, (requested, label) in self._labels.items()
            if there.get(address) == requested
        }
        untouched = log.base == self._labelled_at
        return {
            address: label if untouched else replace(label, evidence="inferred")
            for address, (_, label) in self._labels.items()
        }


class CudaMachine:
    """The GPUs that `torch.cuda` sees. ring: how many events of history are kept per device."""

    # All values are there.
    reads = None

    def __init__(
        self,
        torch: Any,
        driver: Driver | None = None,
        ring: int = RING,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # (Looks at tensors import PyTorch, which is there by now.)
        from gpumem_magic.looks import tensors

        self._torch = torch
        self._tensors = tensors
        self._driver = driver if driver is not None else Driver(None) if is_rocm(torch) else Driver.open()
        count = int(torch.cuda.device_count())
        self._history = AllocatorHistory(torch, count, ring)
        lock = threading.RLock()
        self._devices = [CudaDevice(torch, index, self._history, self._driver, lock, clock) for index in range(count)]

    @property
    def devices(self) -> Sequence[CudaDevice]:
        return self._devices

    def in_use(self) -> Sequence[CudaDevice]:
        current = self.current_device()
        return [device for device in self._devices if device.index == current or device.holds_memory]

    def settle(self) -> None:
        """Nothing waits."""

    def look(self, device: Device) -> tuple[tuple[Segment, ...], Mapping[int, Label]]:
        return device.segments(), device.labels

    def current_device(self) -> int:
        """The number of the current device; 0 while CUDA is not in use, as asking would change that."""
        return int(self._torch.cuda.current_device()) if torch_memory.in_use(self._torch) else 0

    def compiled_results(self) -> CompiledResults:
        return CompiledResults()

    def filled_parts(self) -> Mapping[tuple[int, int], tuple[FilledPart, ...]]:
        return {}

    def rewritten(self) -> Mapping[tuple[int, int], int]:
        return {}

    def plain_place(self, tensor: Any) -> tuple[int, int] | None:
        place: tuple[int, int] | None = self._tensors.plain_place(tensor)
        return place

    def locate(self, tensor: Any) -> tuple[int, int] | None:
        """By the storage's pointer, which waits for nothing. None for tensors without memory of their own (fake, wrapped)."""
        tensors = self._tensors
        with tensors.no_functions(), tensors.no_dispatch():
            if (place := self.plain_place(tensor)) is not None:
                return place
            try:
                if not tensors.has_python_key(tensor) and not tensors.is_cuda(tensor):
                    return None
                parts = tensors.sparse_parts(tensor) if tensors.is_sparse(tensor) else (tensor,)
                storage = tensors.storage(parts[-1]) if parts else None
                if storage is None or storage.device.type != "cuda":
                    return None
                address = int(storage.data_ptr())
            except (RuntimeError, NotImplementedError):
                return None
        return (int(storage.device.index), address) if address else None

    def notes(self) -> list[str]:
        """What a reader must know of the recording that ended last. Told once."""
        if not any(device.has_ended for device in self._devices):
            return []
        notes = [*self._history.notes, *(note for device in self._devices for note in device.notes)]
        for device in self._devices:
            device.notes.clear()
            device.has_ended = False
        backend = self._history.backend
        if backend in _NO_HISTORY:
            notes.append(_NO_HISTORY[backend])
        if not self._driver.available and not is_rocm(self._torch):
            notes.append(
                f"The driver could not be asked ({self._driver.reason}): the device's use is the CUDA runtime's figure."
            )
        return notes


def _counters(reading: CountersReading, shares: Shares) -> Counters:
    _, allocated, reserved, peak_allocated, peak_reserved, retries = reading
    return Counters(
        allocated,
        reserved,
        shares.device_used,
        shares.context,
        shares.other_processes,
        shares.context_or_others,
        peak_allocated,
        peak_reserved,
        retries,
    )


def _requested(segments: Sequence[Segment]) -> dict[int, int]:
    return {
        block.address: block.requested_size for segment in segments for block in segment.blocks if block.state == ACTIVE
    }
