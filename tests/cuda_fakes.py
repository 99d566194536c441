"""A `torch.cuda` for tests: emulated allocators behind PyTorch's own functions, and an NVML that a test can break.

The allocators' counters, traces and snapshots are those that PyTorch's would have, so what is checked with them is everything
but PyTorch and the driver themselves.
"""

from __future__ import annotations

import collections
import os
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from gpumem_magic.allocator.caching import CachingAllocator
from gpumem_magic.allocator.failure import DeviceOutOfMemory
from gpumem_magic.allocator.memory import BASE_ADDRESS, DeviceMemory, FirstFitAddresses
from gpumem_magic.allocator.replay import replay
from gpumem_magic.allocator.settings import settings_from_dict
from gpumem_magic.snapshot.model import Snapshot, TraceEvent
from gpumem_magic.snapshot.plain import snapshot_to_data
from gpumem_magic.snapshot.rules import DEFAULT_SETTINGS, AllocatorSettings
from gpumem_magic.snapshot.start import start_of
from gpumem_magic.units import GIB, MIB

CONTEXT = 420 * MIB
IDLE = 3 * MIB


class FakeGpu:
    """One GPU: an allocator, the ring of its history, and what else is on the device."""

    def __init__(self, index: int, total: int, settings: AllocatorSettings, uuid: str) -> None:
        memory = DeviceMemory(total, outside=IDLE, addresses=FirstFitAddresses(BASE_ADDRESS + (index << 40)))
        self.index = index
        self.uuid = uuid
        self.name = "NVIDIA Fake"
        self.total = total
        self.settings = settings
        self.allocator = CachingAllocator(index, memory, settings, auto_complete=False)
        self.trace: collections.deque[TraceEvent] = collections.deque(maxlen=1)
        self.has_context = False
        self.others = 0
        self.context = CONTEXT

    def alloc(self, size: int, stream: int = 0) -> int:
        self.has_context = True
        return self.allocator.malloc(size, stream)

    def free(self, address: int) -> None:
        self.allocator.free(address)

    @property
    def own(self) -> int:
        return self.allocator.reserved + (self.context if self.has_context else 0)

    @property
    def used(self) -> int:
        return IDLE + self.own + self.others


class FakeTorch:
    """Stands for the module `torch` on a computer with GPUs. initialized: whether CUDA is in use already."""

    def __init__(
        self,
        count: int = 1,
        *,
        initialized: bool = True,
        total: int = 16 * GIB,
        settings: AllocatorSettings = DEFAULT_SETTINGS,
        backend: str = "native",
    ) -> None:
        self.gpus = [
            FakeGpu(index, total, settings, f"{index:08x}-1111-2222-3333-444444444444") for index in range(count)
        ]
        self.calls: list[str] = []
        self.initialized = initialized
        self.backend = backend
        self.history: str | None = None
        self.entries = 0
        self.context: str | None = None
        self.skipped: frozenset[str] = frozenset()
        self.broken = False
        self._C = SimpleNamespace(
            _cuda_record_memory_history=self._begin_history,
            _cuda_resetAccumulatedMemoryStats=lambda index: self.gpus[index].allocator.reset_accumulated_stats(),
            _cuda_isHistoryEnabled=self._is_enabled,
            _cuda_hasPrimaryContext=lambda index: self.gpus[index].has_context,
        )
        self.version = SimpleNamespace(hip=None)
        self.cuda = SimpleNamespace(
            is_initialized=lambda: self.initialized,
            is_available=lambda: True,
            device_count=lambda: len(self.gpus),
            current_device=self._current_device,
            get_device_properties=self._properties,
            get_per_process_memory_fraction=lambda index: self.gpus[index].allocator.settings_in_force.memory_fraction,
            get_allocator_backend=lambda: self.backend,
            memory_stats_as_nested_dict=self._stats,
            memory_reserved=lambda index: self.gpus[index].allocator.reserved,
            memory_snapshot=lambda include_traces=True: self._snapshot()["segments"],
            mem_get_info=self._mem_get_info,
            is_current_stream_capturing=lambda: False,
            reset_accumulated_memory_stats=lambda index=0: self._C._cuda_resetAccumulatedMemoryStats(index),
            memory=SimpleNamespace(_snapshot=self._snapshot, _record_memory_history=self._record_memory_history),
            _queued_calls=[],
        )

    # What a program does.

    def use(self) -> None:
        """CUDA comes into use, as with the first tensor."""
        if not self.initialized:
            self.initialized = True
            for call, _ in self.cuda._queued_calls:
                call()
            self.cuda._queued_calls.clear()

    def alloc(self, size: int, gpu: int = 0, stream: int = 0) -> int:
        self.use()
        return self.gpus[gpu].alloc(size, stream)

    def free(self, address: int, gpu: int = 0) -> None:
        self.gpus[gpu].free(address)

    def try_alloc(self, size: int, gpu: int = 0) -> int | None:
        try:
            return self.alloc(size, gpu)
        except DeviceOutOfMemory:
            return None

    # What PyTorch answers.

    def _need(self, what: str) -> None:
        self.calls.append(what)
        assert self.initialized, f"{what} would have brought CUDA into use"

    def _is_enabled(self) -> bool:
        self._need("isHistoryEnabled")
        return self.history is not None

    def _current_device(self) -> int:
        self._need("current_device")
        return 0

    def _properties(self, index: int) -> Any:
        self._need("get_device_properties")
        gpu = self.gpus[index]
        return SimpleNamespace(name=gpu.name, total_memory=gpu.total, uuid=gpu.uuid)

    def _mem_get_info(self, index: int) -> tuple[int, int]:
        self._need("mem_get_info")
        gpu = self.gpus[index]
        assert gpu.has_context, "mem_get_info would have made a context"
        if self.broken:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return gpu.total - gpu.used, gpu.total

    def _stats(self, index: int) -> dict[str, Any]:
        if not self.initialized or self.backend == "uncached":
            return {}
        allocator = self.gpus[index].allocator
        nested: dict[str, Any] = {}
        if self.backend == "cudaMallocAsync":
            for name, current, peak in (
                ("allocated_bytes", allocator.allocated, allocator.peak_allocated),
                ("reserved_bytes", allocator.reserved, allocator.peak_reserved),
            ):
                nested[name] = {"all": {"current": current, "peak": peak, "allocated": 0, "freed": 0}}
            return nested
        for key, value in allocator.memory_stats().items():
            *path, last = key.split(".")
            place = nested
            for step in path:
                place = place.setdefault(step, {})
            place[last] = value
        return nested

    def _snapshot(self) -> dict[str, Any]:
        self._need("snapshot")
        if self.backend != "native" or self.broken:
            raise RuntimeError("snapshots are not there")
        found = snapshot_to_data(
            Snapshot(
                tuple(segment for gpu in self.gpus for segment in gpu.allocator.segments()),
                tuple(tuple(event for event in gpu.trace if event.action not in self.skipped) for gpu in self.gpus),
                self.gpus[0].allocator.settings_dict(),
            )
        )
        if self.history is not None:
            for gpu in self.gpus:
                gpu.trace.append(TraceEvent("snapshot", 0, 0))
        return found

    def _record_memory_history(
        self,
        enabled: str | None = "all",
        context: str | None = "all",
        stacks: str = "all",
        max_entries: int = sys.maxsize,
        clear_history: bool = False,
    ) -> None:
        self._C._cuda_record_memory_history(enabled, context, stacks, max_entries, clear_history)

    def _begin_history(
        self, enabled: str | None, context: str | None, stacks: str, max_entries: int, clear_history: bool
    ) -> None:
        self._need(f"history {enabled}")
        self.history, self.context = enabled, context
        self.entries = 1 if enabled == "state" else max_entries
        for gpu in self.gpus:
            gpu.allocator.sinks[:] = [sink for sink in gpu.allocator.sinks if sink is not gpu.trace]
            kept = () if enabled is None or clear_history else gpu.trace
            gpu.trace = collections.deque(kept, maxlen=min(self.entries, 10_000_000))
            if enabled is not None:
                gpu.allocator.sinks.append(gpu.trace)

    def state(self) -> dict[str, Any]:
        """All that a recording could leave behind."""
        return {
            "bindings": dict(vars(self._C)),
            "history": None if self.history is None else (self.history, self.entries, self.context),
            "queue": list(self.cuda._queued_calls),
            "sinks": [[sink is gpu.trace for sink in gpu.allocator.sinks] for gpu in self.gpus],
            "environment": {key: value for key, value in os.environ.items() if "CUDA" in key},
        }


class NVMLError(Exception):
    """As pynvml's."""


class FakeNvml:
    """Stands for the module `pynvml`. broken: the questions (without ``nvml``) that are refused, with the words."""

    NVMLError = NVMLError
    nvmlMemory_v2 = 0x2000028

    def __init__(self, torch: FakeTorch, order: list[int] | None = None) -> None:
        self.torch = torch
        # Position in nvidia-smi -> number in PyTorch.
        self.order = order if order is not None else list(range(len(torch.gpus)))
        self.broken: dict[str, str] = {}
        self.pid: int | None = os.getpid()
        self.driver_share = 250 * MIB
        self.knows_v2 = True
        self.absurd = False
        self.asked: collections.Counter[str] = collections.Counter()
        self.mig: dict[str, int] = {}

    def _ask(self, question: str) -> None:
        self.asked[question] += 1
        for broken, words in self.broken.items():
            if broken in ("*", question):
                raise NVMLError(words)

    def nvmlInit(self) -> None:
        self._ask("Init")

    def nvmlDeviceGetCount(self) -> int:
        self._ask("DeviceGetCount")
        return len(self.order)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self._ask("DeviceGetHandleByIndex")
        return self.order[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        self._ask("DeviceGetHandleByUUID")
        if uuid in self.mig:
            return uuid
        for gpu in self.torch.gpus:
            if uuid == f"GPU-{gpu.uuid}":
                return gpu.index
        raise NVMLError("Not Found")

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        self._ask("DeviceGetUUID")
        return handle if isinstance(handle, str) else f"GPU-{self.torch.gpus[handle].uuid}"

    def nvmlDeviceGetName(self, handle: Any) -> str:
        self._ask("DeviceGetName")
        return self.torch.gpus[self._number(handle)].name

    def _number(self, handle: Any) -> int:
        return self.mig[handle] if isinstance(handle, str) else handle

    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: int | None = None) -> Any:
        self._ask("DeviceGetMemoryInfo")
        if version is not None and not self.knows_v2:
            raise NVMLError("Function Not Found")
        gpu = self.torch.gpus[self._number(handle)]
        if self.absurd:
            return SimpleNamespace(total=gpu.total, used=2**64 - 1, free=0)
        total = gpu.total + self.driver_share
        if self.mig and not isinstance(handle, str):
            # The whole GPU around its instances.
            total *= 7
        used = gpu.used + (self.driver_share if version is None else 0)
        # The older question's answer has no such field.
        apart = {} if version is None else {"reserved": self.driver_share}
        return SimpleNamespace(total=total, used=used, free=total - gpu.used - self.driver_share, **apart)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]:
        self._ask("DeviceGetComputeRunningProcesses")
        gpu = self.torch.gpus[self._number(handle)]
        found = []
        if gpu.has_context and self.pid is not None:
            found.append(SimpleNamespace(pid=self.pid, usedGpuMemory=2**64 - 1 if self.absurd else gpu.own))
        if gpu.others:
            found.append(SimpleNamespace(pid=1, usedGpuMemory=gpu.others))
        return found

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: Any) -> list[Any]:
        self._ask("DeviceGetGraphicsRunningProcesses")
        return []

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any) -> int:
        self._ask("DeviceGetMaxMigDeviceCount")
        return len(self.mig)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int) -> str:
        self._ask("DeviceGetMigDeviceHandleByIndex")
        return list(self.mig)[index]


class RecordedGpu(FakeGpu):
    """A GPU on which a recorded trace happens again: `play_to` goes on to the moment after so many of its events."""

    def __init__(self, torch: FakeTorch, snapshot: Snapshot, device: int) -> None:
        settings = settings_from_dict(snapshot.allocator_settings)
        super().__init__(0, 160 * GIB, settings, torch.gpus[0].uuid)
        self.final = sorted((one for one in snapshot.segments if one.device == device), key=lambda one: one.address)
        self.events = snapshot.device_traces[device]
        self.start = tuple(
            replace(segment, device=0) for segment in start_of(self.final, self.events, settings).segments
        )
        self.has_context = True
        self.played = 0
        self._torch = torch
        self.allocator = self._at(0)
        torch.gpus = [self]

    def play_to(self, count: int) -> None:
        if self._torch.history is not None:
            self.trace.extend(self.events[self.played : count])
        self.played = count
        self.allocator = self._at(count)

    def _at(self, count: int) -> CachingAllocator:
        result = replay(self.start, self.events[:count], self.settings, final=self.final)
        assert not result.misplaced
        return result.allocator
