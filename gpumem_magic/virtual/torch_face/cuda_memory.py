"""The memory functions of `torch.cuda` while a virtual GPU is on."""

from __future__ import annotations

import collections
import pickle
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpumem_magic.snapshot.model import Frame, Snapshot, TraceEvent
from gpumem_magic.snapshot.plain import snapshot_to_data

if TYPE_CHECKING:
    from gpumem_magic.allocator.failure import DeviceOutOfMemory
    from gpumem_magic.virtual.engine.device import MachineForTorch, VirtualDevice


class CudaMemory:
    """Answers for the emulated allocators. `gpu_of` turns a device argument into a device."""

    def __init__(self, machine: MachineForTorch, gpu_of: Callable[[Any], VirtualDevice]) -> None:
        self._machine = machine
        self._gpu_of = gpu_of
        self._histories: dict[int, collections.deque[TraceEvent]] = {}
        self._fractions: dict[int, float] = {}
        self._observers: list[Callable[[int, int, int, int], object]] = []
        self._end_of_stacks: Callable[[], None] | None = None

    def functions(self) -> dict[str, Callable[..., Any]]:
        """torch's name -> what answers in its place."""
        names = (
            "memory_allocated", "memory_reserved", "memory_cached", "max_memory_allocated", "max_memory_reserved",
            "max_memory_cached", "reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached",
            "reset_accumulated_memory_stats", "memory_stats", "memory_stats_as_nested_dict", "empty_cache", "mem_get_info",
            "memory_snapshot", "_snapshot", "_dump_snapshot", "_record_memory_history", "set_per_process_memory_fraction",
            "get_per_process_memory_fraction", "caching_allocator_alloc", "caching_allocator_delete", "get_allocator_backend",
            "list_gpu_processes", "device_memory_used",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def host_functions(self) -> dict[str, Callable[..., Any]]:
        """What `torch.cuda.host_memory_stats` and its neighbours ask of `torch._C`: pinned host memory."""
        blocks = self._machine.pinned.blocks
        return {
            "_cuda_hostMemoryStats": blocks.statistics,
            "_cuda_resetPeakHostMemoryStats": blocks.reset_peak,
            "_cuda_resetAccumulatedHostMemoryStats": blocks.reset_accumulated,
            "_host_emptyCache": blocks.empty_cache,
        }

    def accelerator_functions(self) -> dict[str, Callable[..., Any]]:
        """The same for `torch.accelerator`."""
        return {
            "empty_cache": self.empty_cache,
            "empty_host_cache": self._machine.pinned.blocks.empty_cache,
            "memory_stats": self.memory_stats,
            "memory_allocated": self.memory_allocated,
            "memory_reserved": self.memory_reserved,
            "max_memory_allocated": self.max_memory_allocated,
            "max_memory_reserved": self.max_memory_reserved,
            "reset_peak_memory_stats": self.reset_peak_memory_stats,
            "reset_accumulated_memory_stats": self.reset_accumulated_memory_stats,
            "get_memory_info": self.mem_get_info,
        }

    def _gpu(self, device: Any) -> VirtualDevice:
        self._machine.settle()
        return self._gpu_of(device)

    # ---- how much

    def memory_allocated(self, device: Any = None) -> int:
        return self._gpu(device).allocator.allocated

    def memory_reserved(self, device: Any = None) -> int:
        return self._gpu(device).allocator.reserved

    def max_memory_allocated(self, device: Any = None) -> int:
        return self._gpu(device).allocator.peak_allocated

    def max_memory_reserved(self, device: Any = None) -> int:
        return self._gpu(device).allocator.peak_reserved

    memory_cached = memory_reserved
    max_memory_cached = max_memory_reserved

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self._gpu(device).allocator.reset_peak_stats()

    reset_max_memory_allocated = reset_peak_memory_stats
    reset_max_memory_cached = reset_peak_memory_stats

    def reset_accumulated_memory_stats(self, device: Any = None) -> None:
        self._gpu(device).allocator.reset_accumulated_stats()

    def memory_stats(self, device: Any = None) -> collections.OrderedDict[str, int]:
        return collections.OrderedDict(sorted(self._gpu(device).allocator.memory_stats().items()))

    def memory_stats_as_nested_dict(self, device: Any = None) -> dict[str, Any]:
        nested: dict[str, Any] = {}
        for key, value in self._gpu(device).allocator.memory_stats().items():
            *path, last = key.split(".")
            place = nested
            for step in path:
                place = place.setdefault(step, {})
            place[last] = value
        return nested

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """(free, total) bytes, as cudaMemGetInfo."""
        gpu = self._gpu(device)
        gpu.use()
        return gpu.memory.free, gpu.memory.total

    def device_memory_used(self, device: Any = None) -> int:
        return self._gpu(device).used_bytes()

    def list_gpu_processes(self, device: Any = None) -> str:
        gpu = self._gpu(device)
        line = f"GPU:{gpu.index}"
        used = gpu.process_bytes()
        if not used:
            return f"{line}\nno processes are running"
        return f"{line}\nprocess {self._machine.process:>10d} uses {used / 2**20:>12.3f} MB GPU memory"

    # ---- changing it

    def empty_cache(self) -> None:
        with self._machine.engine.lock:
            self._machine.settle()
            for gpu in self._machine.devices:
                gpu.allocator.empty_cache()

    def set_per_process_memory_fraction(self, fraction: float, device: Any = None) -> None:
        if not isinstance(fraction, float):
            raise TypeError("Invalid type for fraction argument, must be `float`")
        if not 0 <= fraction <= 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        gpu = self._gpu(device)
        self._fractions[gpu.index] = fraction
        gpu.allocator.set_memory_fraction(fraction)

    def get_per_process_memory_fraction(self, device: Any = None) -> float:
        gpu = self._gpu(device)
        return self._fractions.get(gpu.index, gpu.allocator.settings.memory_fraction)

    def caching_allocator_alloc(self, size: int, device: Any = None, stream: Any = None) -> int:
        gpu = self._gpu(device)
        with self._machine.engine.lock:
            return self._machine.malloc(gpu.index, size)

    def caching_allocator_delete(self, mem_ptr: int) -> None:
        with self._machine.engine.lock:
            for gpu in self._machine.devices:
                if any(segment.address <= mem_ptr < segment.address + segment.total_size for segment in gpu.segments()):
                    gpu.free(mem_ptr)

    def get_allocator_backend(self) -> str:
        return "native"

    # ---- snapshots

    def memory_snapshot(self, mempool_id: Any = None, include_traces: bool = True) -> list[dict[str, Any]]:
        """Of every pool, or of one (as a graph or a `MemPool` has its own)."""
        segments: list[dict[str, Any]] = snapshot_to_data(self._whole())["segments"]
        if mempool_id is None:
            return segments
        return [segment for segment in segments if tuple(segment["segment_pool_id"]) == tuple(mempool_id)]

    def _snapshot(self, device: Any = None, augment_with_fx_traces: bool = False) -> dict[str, Any]:
        snapshot = snapshot_to_data(self._whole())
        for gpu in self._machine.devices:
            history = self._histories.get(gpu.index)
            if history is not None:
                active = sum(segment.active_size for segment in gpu.segments())
                history.append(TraceEvent("snapshot", 0, active))
        return snapshot

    def _dump_snapshot(self, filename: Any = "dump_snapshot.pickle", augment_with_fx_traces: bool = False) -> None:
        data = self._snapshot()
        with open(filename, "wb") as file:
            pickle.dump(data, file)

    def _whole(self) -> Snapshot:
        with self._machine.engine.lock:
            self._machine.settle()
            return Snapshot(
                segments=tuple(segment for gpu in self._machine.devices for segment in gpu.segments()),
                device_traces=tuple(tuple(self._histories.get(gpu.index, ())) for gpu in self._machine.devices),
                allocator_settings=self._machine.devices[0].allocator.settings_dict(),
            )

    def attach_observer(self, observer: Callable[[int, int, int, int], object]) -> None:
        """Called before an out-of-memory error is raised, with the device and bytes: asked for, at most to have, and free."""
        self._observers.append(observer)

    def tell_observers(self, failure: DeviceOutOfMemory) -> None:
        """What an observer raises comes in the error's place, as in PyTorch."""
        for observer in self._observers:
            observer(failure.device, failure.segment_size, failure.limit or failure.total, failure.free)

    def _record_memory_history(
        self,
        enabled: str | bool | None = "all",
        context: str | None = "all",
        stacks: str = "all",
        max_entries: int = sys.maxsize,
        device: Any = None,
        clear_history: bool = False,
        **kwargs: Any,
    ) -> None:
        """Starts ("all", "state", True) or ends (None, False) the user's own memory history, as torch's function does."""
        if isinstance(enabled, bool):
            enabled = "all" if enabled else None
        if enabled not in (None, "state", "all"):
            raise RuntimeError(f"expected state to be 'state', 'all', or None, got {enabled!r}")
        if context not in (None, "state", "alloc", "all"):
            raise RuntimeError(f"expected context to be 'state', 'alloc', 'all', or None, got {context!r}")
        with self._machine.engine.lock:
            self._machine.settle()
            if self._end_of_stacks is not None:
                self._end_of_stacks()
                self._end_of_stacks = None
            if enabled is not None and context == "all":
                self._end_of_stacks = self._machine.engine.table.tell_of_ends(self._note_stack)
            for gpu in self._machine.devices:
                gpu.allocator.stacks_at_ends.clear()
                history = self._histories.get(gpu.index)
                if history is not None:
                    gpu.allocator.sinks[:] = [sink for sink in gpu.allocator.sinks if sink is not history]
                if enabled is None:
                    self._histories.pop(gpu.index, None)
                    gpu.allocator.stacks = None
                    continue
                entries = 1 if enabled == "state" else min(max_entries, sys.maxsize)
                earlier = [] if clear_history or history is None else history
                self._histories[gpu.index] = collections.deque(earlier, maxlen=entries)
                gpu.allocator.sinks.append(self._histories[gpu.index])
                gpu.allocator.stacks = users_stack if context is not None else None
                gpu.allocator.stack_context = context or "all"

    def _note_stack(self, device: int, address: int) -> None:
        """Where the program lets go of a block, which is freed a little later."""
        self._machine.devices[device].allocator.stacks_at_ends[address] = users_stack()


def users_stack() -> tuple[Frame, ...]:
    """The Python stack, innermost first, without this package's own frames."""
    frames = []
    frame = sys._getframe(1)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith("gpumem_magic."):
            frames.append(Frame(frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno or 0))
        if frame.f_back is None:
            break
        frame = frame.f_back
    return tuple(frames)
