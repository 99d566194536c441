"""PyTorch's profiler over a virtual GPU: the operators that the program runs, and the memory of the card.

The profiler is C++ and hears of operators by itself. What it cannot hear is the emulated memory, and what it should not show is
how an operator is done here: by shape rules, with host tensors and dispatch modes. So while it runs, ranges of ours stand around
each operator's handling and at each change of memory, by the profiler's own clock. `profiled_events` takes them out again.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
import torch.autograd.profiler
import torch.profiler
from torch._C._profiler import _RecordFunctionFast

from gpumem_magic.patching import Patches
from gpumem_magic.snapshot.model import TraceEvent
from gpumem_magic.virtual.engine.device import MachineForTorch, VirtualDevice
from gpumem_magic.virtual.engine.modes import DEVICE_QUERY
from gpumem_magic.virtual.operators.factories import Factories
from gpumem_magic.virtual.torch_face.profiled_events import CHANGED, HANDLED, RETURNED, MemoryChange, Results

_ALLOCATED, _FREED = "alloc", "free_requested"


def install(patches: Patches, machine: MachineForTorch, factories: Factories) -> None:
    """Without a driver there are no kernels to time, and the profiler says so once.

    Stacks are not recorded either: thousands of calls of this package lie below each operator.
    """
    kind = torch.autograd.profiler.profile
    original = kind.__init__
    stackless: WeakSet[Any] = WeakSet()
    of_the_device: WeakSet[Any] = WeakSet()

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        asked = kwargs.pop("use_cuda", False) or kwargs.get("use_device") == "cuda"
        if asked:
            stacks = kwargs.get("with_stack")
            # (Asked for the device alone it would have nothing to record.)
            kwargs.update(use_device=None, use_cpu=True, with_stack=False)
        original(self, *args, **kwargs)
        if asked:
            warnings.warn(
                "a virtual GPU runs no kernels: the profiler's times are the host's"
                + ", the memory is the virtual GPU's" * bool(self.profile_memory),
                stacklevel=4,
            )
            of_the_device.add(self)
            if stacks:
                stackless.add(self)

    original_stacks = kind.export_stacks

    def export_stacks(self: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        if self not in stackless:
            return original_stacks(self, path, *args, **kwargs)
        warnings.warn(f"the profiler records no stacks on a virtual GPU: {path} is empty", stacklevel=3)
        # PyTorch refuses a profiler that was not asked for stacks. This one was.
        self.with_stack = True
        try:
            return original_stacks(self, path, *args, **kwargs)
        finally:
            self.with_stack = False

    original_export = torch.profiler.profile.export_memory_timeline

    def export_memory_timeline(self: Any, path: str, device: str | None = None) -> None:
        if device is not None and not device.startswith("cuda"):
            original_export(self, path, device)
            return
        warnings.warn(
            "the profiler's memory timeline cannot show a virtual GPU, and was not written: use %%gpumem, or "
            "torch.cuda.memory._record_memory_history and _dump_snapshot",
            stacklevel=3,
        )

    patches.set(kind, "__init__", init)
    patches.set(kind, "export_stacks", export_stacks)
    patches.set(torch.profiler.profile, "export_memory_timeline", export_memory_timeline)
    patches.attempt(_follow, machine, factories, of_the_device)


def _follow(patches: Patches, machine: MachineForTorch, factories: Factories, of_the_device: WeakSet[Any]) -> None:
    """Each run of a profiler is followed."""
    place: Any = torch.autograd.profiler
    kind: Any = place.profile
    original_start, original_end, original_events = (
        kind._start_trace,
        place._disable_profiler,
        kind._ensure_function_events,
    )
    # (PyTorch has one profiler at a time.)
    under_way: list[_ProfilerRun] = []

    def start_trace(self: Any) -> Any:
        answer = original_start(self)
        while under_way:
            under_way.pop().end()
        under_way.append(_ProfilerRun(machine, factories, bool(self.profile_memory)))
        return answer

    def disable_profiler() -> Any:
        run = under_way.pop() if under_way else None
        if run is not None:
            run.end()
        results = original_end()
        return results if run is None or results is None else Results(results, run.changes)

    def ensure_function_events(self: Any) -> Any:
        # The table names its columns of memory by the device that was asked for.
        if self in of_the_device and self.use_device is None:
            self.use_device = "cuda"
            try:
                return original_events(self)
            finally:
                self.use_device = None
        return original_events(self)

    patches.set(kind, "_start_trace", start_trace)
    patches.set(kind, "_ensure_function_events", ensure_function_events)
    patches.set(place, "_disable_profiler", disable_profiler)


class _ProfilerRun:
    """One run of the profiler: from its start on, until `end`."""

    def __init__(self, machine: MachineForTorch, factories: Factories, with_memory: bool) -> None:
        self._machine = machine
        # By number, None for a storage's end until its memory is given back.
        self.changes: list[MemoryChange | None] = []
        self._ended: dict[tuple[int, int], int] = {}
        self._allocated: dict[int, int] = {}
        self._open = with_memory
        machine.settle()
        self._ends: list[Callable[[], object]] = [
            machine.engine.handle_by(_in_ranges),
            factories.make_by(_as_operators),
        ]
        if with_memory:
            self._ends.append(machine.engine.table.tell_of_ends(self._storage_ended))
            for device in machine.devices:
                self._allocated[device.index] = device.allocator.allocated
                self._ends.append(device.follow(functools.partial(self._changed, device)))

    def end(self) -> None:
        self._machine.settle()
        self._open = False
        for end in reversed(self._ends):
            end()
        self._ends.clear()
        self._ended.clear()

    def _marked(self) -> int:
        """The number of a change that comes now."""
        number = len(self.changes)
        self.changes.append(None)
        with _RecordFunctionFast(f"{CHANGED}{number}"):
            return number

    def _storage_ended(self, device: int, address: int) -> None:
        if self._open:
            self._ended[device, address] = self._marked()

    def _changed(self, device: VirtualDevice, event: TraceEvent, _: str) -> None:
        if event.action not in (_ALLOCATED, _FREED):
            return
        allocator, index = device.allocator, device.index
        number = self._ended.pop((index, event.address), None) if event.action == _FREED else None
        early = number is None and event.action == _FREED and self._machine.engine.table.is_at_work
        if number is None:
            number = self._marked()
        nbytes = allocator.allocated - self._allocated[index]
        self._allocated[index] = allocator.allocated
        self.changes[number] = MemoryChange(
            nbytes, index, event.address, allocator.allocated, allocator.reserved, early
        )


def _in_ranges(handle: Callable[..., Any]) -> Callable[..., Any]:
    def handle_in_range(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is DEVICE_QUERY:
            return handle(func, types, args, kwargs)
        with _RecordFunctionFast(HANDLED):
            out = handle(func, types, args, kwargs)
            if type(out) is torch.Tensor and not any(out is one for one in args):
                with _RecordFunctionFast(f"{RETURNED}{out.untyped_storage().nbytes()}"):
                    pass
            return out

    return handle_in_range


def _as_operators(make: Callable[..., Any]) -> Callable[..., Any]:
    """What makes a tensor of no other, where the function of PyTorch's is not called, is an operator of its name."""

    def make_in_ranges(original: Callable[..., Any], *args: Any) -> Any:
        with _RecordFunctionFast(f"aten::{original.__name__}"), _RecordFunctionFast(HANDLED):
            return make(original, *args)

    return make_in_ranges
