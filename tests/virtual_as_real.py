"""A virtual GPU that answers as a real one: PyTorch's own programs run, and the real device's road measures them without a GPU.

`torch.cuda` is the virtual GPU's face. What a CUDA build has below it, and nobody else calls, is put beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gpumem_magic.devices import cuda
from gpumem_magic.devices.driver import Driver
from gpumem_magic.patching import Patches
from gpumem_magic.virtual import gpu


class Machine(cuda.CudaMachine):
    """The real device's, above emulated allocators; a virtual one frees late and says so."""

    def __init__(self, virtual: gpu.VirtualMachine, ring: int = cuda.RING) -> None:
        self.virtual = virtual
        super().__init__(torch, Driver(None, "there is none"), ring)

    def settle(self) -> None:
        self.virtual.settle()

    def locate(self, tensor: Any) -> tuple[int, int] | None:
        return self.virtual.locate(tensor)

    def plain_place(self, tensor: Any) -> tuple[int, int] | None:
        return None


@contextmanager
def real(name: str) -> Iterator[gpu.VirtualMachine]:
    """Turns the virtual device on, and off again behind the block."""
    virtual = gpu.turn_on(name)
    patches = Patches()
    memory = virtual.face.memory
    enabled: list[Any] = [None]

    def begin(
        state: Any, context: Any = "all", stacks: Any = "all", entries: int = 1 << 60, clear: bool = False
    ) -> None:
        enabled[0] = state
        memory._record_memory_history(state, context, stacks, entries, clear_history=clear)

    def record(enabled: Any = "all", context: Any = "all", stacks: Any = "all", max_entries: int = 1 << 60) -> None:
        torch._C._cuda_record_memory_history(enabled, context, stacks, max_entries, False)

    below = {
        "_cuda_record_memory_history": begin,
        "_cuda_resetAccumulatedMemoryStats": memory.reset_accumulated_memory_stats,
        "_cuda_isHistoryEnabled": lambda: enabled[0] is not None,
        "_cuda_hasPrimaryContext": lambda index: virtual.devices[index].in_use,
    }
    try:
        for key, value in below.items():
            patches.set(torch._C, key, value)
        patches.set(torch.cuda.memory, "_record_memory_history", record)
        torch.cuda.init()
        yield virtual
    finally:
        patches.undo()
        gpu.turn_off()
