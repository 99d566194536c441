"""CUDA graphs and memory pools of the program's own: their memory comes from private pools of the emulated allocator.

Without values a graph's work runs once, eagerly, while it is captured; replaying it allocates nothing, as on a device. Where a
device computes, what is captured is computed when it is replayed, each time.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.accelerator
import torch.cuda.graphs
import torch.cuda.memory

from gpumem_magic.allocator.blocks import PoolId
from gpumem_magic.patching import Patches
from gpumem_magic.virtual.engine.computing import ComputingEngine
from gpumem_magic.virtual.engine.waiting import CAPTURING
from gpumem_magic.virtual.torch_face.streams import CURRENT, device_index

if TYPE_CHECKING:
    from gpumem_magic.virtual.engine.device import MachineForTorch

_ids = itertools.count(1)
# Since when all graphs share a generator's numbers, and the last PyTorch of which it is known that a capture begins with them
# (the wheels of 2.1, 2.6 and 2.11 over a runtime without a card; an H100 with 2.11). 2.13's asks for them later, if at all.
_SHARED_FROM = (2, 4)
_KNOWN_TO = (2, 11)


def install(patches: Patches, machine: MachineForTorch, stream_of: Callable[[int], int]) -> None:
    """Stand-ins for `torch.cuda.CUDAGraph`, `torch.cuda.MemPool`, and what `torch.cuda.use_mem_pool` is made of."""

    class CUDAGraph(Graph):
        """`torch.cuda.CUDAGraph` on the devices of this machine."""

        _machine = machine
        _stream_of = staticmethod(stream_of)
        _numbers_of: ClassVar[weakref.WeakValueDictionary[int, _RandomNumbers]] = weakref.WeakValueDictionary()

    class MemPool(VirtualMemPool):
        """`torch.cuda.MemPool` on the devices of this machine."""

        _machine = machine

    def begin(device: int, pool_id: PoolId) -> None:
        own = threading.get_ident()
        with machine.engine.lock:
            machine.devices[device].allocator.begin_pool(pool_id, lambda stream: threading.get_ident() == own)

    def end(device: int, pool_id: PoolId) -> None:
        with machine.engine.lock:
            machine.devices[device].allocator.end_pool(pool_id)

    def release(device: int, pool_id: PoolId) -> None:
        with machine.engine.lock:
            machine.devices[device].allocator.release_pool(pool_id)

    for owner in (torch.cuda, torch.cuda.graphs):
        patches.set(owner, "CUDAGraph", CUDAGraph)
        patches.set(owner, "graph_pool_handle", graph_pool_handle)
        patches.set(owner, "is_current_stream_capturing", lambda: CAPTURING.graphs > 0)
    if hasattr(torch.accelerator, "Graph"):
        accelerators = _accelerators_graph(CUDAGraph)
        for home in (torch.accelerator, torch.accelerator.graphs):
            patches.set(home, "Graph", accelerators)
    # The stream that PyTorch makes for captures, and keeps, would be one of ours.
    patches.set(torch.cuda.graphs.graph, "default_capture_stream", None, always=True)
    for owner in (torch.cuda, torch.cuda.memory):
        if hasattr(owner, "MemPool"):
            patches.set(owner, "MemPool", MemPool)
    for place in (torch.cuda.memory, torch._C):
        patches.set(place, "_cuda_beginAllocateCurrentThreadToPool", begin)
        patches.set(place, "_cuda_endAllocateToPool", end)
        patches.set(place, "_cuda_releasePool", release)


def _accelerators_graph(kind: type[Graph]) -> type[Graph]:
    """`torch.accelerator.Graph` (2.13 has it, 2.11 not): the same, a context of its own that keeps what a capture is given."""
    plain = torch.accelerator.Graph

    class AcceleratorGraph(kind):  # type: ignore[misc, valid-type]
        """`torch.accelerator.Graph` on the devices of this machine."""

        __enter__, __exit__ = plain.__enter__, plain.__exit__

        def __init__(
            self, keep_graph: bool = False, *, pool: PoolId | None = None, capture_error_mode: str = "default"
        ) -> None:
            super().__init__(keep_graph)
            self.graph_pool = pool
            self.capture_error_mode = capture_error_mode

        def capture_begin(self) -> None:
            super().capture_begin(self.graph_pool)

    return AcceleratorGraph


def graph_pool_handle() -> PoolId:
    """A name for a pool that several graphs may share."""
    return (0, next(_ids))


class _RandomNumbers:
    """A generator's seed and offset, which captured kernels read: a card has them as long as a graph is there
    (`register_graph` in ``CUDAGeneratorImpl.cpp``)."""

    def __init__(self, device: int) -> None:
        self.held = [torch.empty(1, dtype=torch.long, device=torch.device("cuda", device)) for _ in range(2)]


class Graph:
    """A captured graph: the memory of its private pool, and on a device that computes what is computed in each replay."""

    _machine: MachineForTorch
    _stream_of: Callable[[int], int]
    _numbers_of: ClassVar[weakref.WeakValueDictionary[int, _RandomNumbers]]
    """By device, while a graph of it is there."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._numbers: _RandomNumbers | None = None
        self._pool: PoolId | None = None
        self._device = 0
        self._captures = False
        self._tape: list[Any] = []

    def register_generator_state(self, generator: torch.Generator) -> None:
        """Nothing to do: no replay draws. (The two numbers for which a card then takes 512 bytes each are counted for the first
        generator only.)"""

    def capture_begin(self, pool: PoolId | None = None, *args: Any, **kwargs: Any) -> None:
        if self._captures or self._pool is not None:
            raise RuntimeError("This CUDAGraph instance already owns a captured graph.")
        stream = self._stream_of(CURRENT.device)
        if stream == 0:
            # (`CUDAGraph::capture_begin` in CUDAGraph.cpp)
            raise RuntimeError(
                "CUDA graphs must be captured on a non-default stream. (However, after capture, it's ok to replay them on the "
                "default stream.)"
            )
        self._device = CURRENT.device
        self._pool = (next(_ids), 0) if pool is None else tuple(pool)  # type: ignore[assignment]
        self._take_numbers()
        with self._machine.engine.lock:
            self._machine.devices[self._device].use()
            assert self._pool is not None
            # As in CUDA, what other streams ask for meanwhile does not belong to the graph.
            self._machine.devices[self._device].allocator.begin_pool(self._pool, lambda other: other == stream)
        self._captures = True
        if isinstance(self._machine.engine, ComputingEngine):
            self._tape = self._machine.engine.tape = []
        CAPTURING.graphs += 1

    def _take_numbers(self) -> None:
        version = self._machine.engine.memory.torch_version(self._device)
        if version > _KNOWN_TO:
            return
        shared = self._numbers_of.get(self._device) if version >= _SHARED_FROM else None
        self._numbers = shared or _RandomNumbers(self._device)
        self._numbers_of[self._device] = self._numbers

    def capture_end(self) -> None:
        if not self._captures or self._pool is None:
            raise RuntimeError("capture_end() called before capture_begin()")
        self._captures = False
        if isinstance(self._machine.engine, ComputingEngine):
            self._machine.engine.tape = None
        CAPTURING.graphs -= 1
        with self._machine.engine.lock:
            self._machine.devices[self._device].allocator.end_pool(self._pool)
        if CAPTURING.is_spoiled:
            CAPTURING.is_spoiled = False
            self.reset()
            raise torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")

    def replay(self) -> None:
        if self._pool is None or self._captures:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        if isinstance(self._machine.engine, ComputingEngine):
            self._machine.engine.replay(self._tape)

    def pool(self) -> PoolId:
        if self._pool is None:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._pool

    def reset(self) -> None:
        pool, self._pool = self._pool, None
        self._tape = []
        if pool is not None and not self._machine.engine.closed_because:
            with self._machine.engine.lock:
                self._machine.devices[self._device].allocator.release_pool(pool)

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        """There is nothing to make ready, or to look at."""

    instantiate = enable_debug_mode = debug_dump = _nothing

    def __del__(self) -> None:
        if self._captures:
            CAPTURING.is_spoiled = False
            self.capture_end()
        self.reset()


class VirtualMemPool:
    """A pool for `torch.cuda.use_mem_pool`. Allocators of the program's own are not called: there is no driver."""

    _machine: MachineForTorch

    def __init__(self, allocator: Any = None, use_on_oom: bool = False, no_split: bool = False, **kwargs: Any) -> None:
        self.id: PoolId = (0, next(_ids))
        self.allocator = allocator
        self._device = device_index(None)
        with self._machine.engine.lock:
            self._heap.create_pool(self.id, use_on_oom=use_on_oom, no_split=no_split, own_memory=allocator is not None)

    @property
    def _heap(self) -> Any:
        return self._machine.devices[self._device].allocator

    @property
    def device(self) -> int:
        return self._device

    def use_count(self) -> int:
        return 1

    def snapshot(self, include_traces: bool = True) -> list[dict[str, Any]]:
        mine: list[dict[str, Any]] = torch.cuda.memory_snapshot(self.id, include_traces)
        return mine

    def __del__(self) -> None:
        if not self._machine.engine.closed_because:
            with self._machine.engine.lock:
                self._heap.release_pool(self.id)
