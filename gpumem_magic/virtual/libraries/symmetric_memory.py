"""Symmetric memory, and the products that overlap with sending: what `torch.compile` makes of asynchronous tensor parallelism.

The fused operators run as PyTorch's own functions for a card (`_symmetric_memory/__init__.py`), so that each of their buffers is
asked for where they ask for it. Symmetric memory itself comes from the driver, beside PyTorch's allocator
(`CUDASymmetricMemory.cu`, 2.9 to 2.13): it counts in what `nvidia-smi` shows. Other ranks' buffers are other cards', and nothing
is waited for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, cast

import torch

from gpumem_magic.patching import Patches
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.host_calls import equivalent
from gpumem_magic.virtual.engine.kernel_rules import built_in
from gpumem_magic.virtual.engine.tensors import VirtualTensor, engine_of

# Operators that are Python's: the function for a card, and the one without overlap, which a device that computes runs.
_FUSED = {
    "fused_all_gather_matmul": ("_fused_all_gather_matmul", "_fused_all_gather_matmul_fallback"),
    "fused_all_gather_scaled_matmul": ("_fused_all_gather_scaled_matmul", "_fused_all_gather_scaled_matmul_fallback"),
    "fused_matmul_reduce_scatter": ("_fused_matmul_reduce_scatter", "_fused_matmul_reduce_scatter_fallback"),
    "fused_scaled_matmul_reduce_scatter": (
        "_fused_scaled_matmul_reduce_scatter",
        "_fused_scaled_matmul_reduce_scatter_fallback",
    ),
}
# The driver gives it in pieces of 2 MiB, behind which lie the signals.
_GRANULE = 2 << 20
_SIGNAL_BYTES = 2048
# Cards that copy to all others at once, where a switch of NVLink's joins them; it is taken to.
_MULTICAST = (9, 0)


class _Handle:
    """Stands for one group's view of a piece of symmetric memory."""

    signal_pad_size = _SIGNAL_BYTES
    multicast_ptr = 0

    def __init__(self, tensor: torch.Tensor, group_name: str) -> None:
        groups: Any = torch.distributed.distributed_c10d
        group = groups._resolve_process_group(group_name)
        self.rank, self.world_size = group.rank(), group.size()
        self.device = tensor.device
        self._bytes = tensor.view(-1).view(torch.uint8)
        self.buffer_size = self._bytes.numel()

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
        """Of any rank: this one's memory, since another's is on no card of this process."""
        size, start = dtype.itemsize, storage_offset * dtype.itemsize
        count = torch.Size(sizes).numel()
        if start + count * size > self.buffer_size:
            raise RuntimeError(
                f"SymmetricMemory::get_buffer: the requested size ({start + count * size} bytes) exceeds "
                f"the allocated size ({self.buffer_size} bytes)"
            )
        return self._bytes[start : start + count * size].view(dtype).view(sizes)

    get_remote_tensor = get_buffer

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Nobody is waited for."""

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None: ...

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None: ...


def _stand_in(original: Any) -> Any:
    """The class that PyTorch's functions ask for such memory."""
    made: set[int] = set()

    class Symmetric(original):  # type: ignore[misc]
        @staticmethod
        def empty_strided_p2p(
            size: Sequence[int],
            stride: Sequence[int],
            dtype: torch.dtype,
            device: torch.device,
            group_name: str | None = None,
            alloc_id: int | None = None,
        ) -> torch.Tensor:
            nothing: Any = torch.empty(0, dtype=dtype, device=device)
            engine = cast(Engine, engine_of(nothing))
            index = nothing.device.index
            count = torch.Size(size).numel()
            taken = -(-(count * dtype.itemsize + _SIGNAL_BYTES) // _GRANULE) * _GRANULE
            engine.memory.take_beside(index, taken)
            storage = engine.borrowed(count * dtype.itemsize, index, None)
            key = storage._cdata
            made.add(key)

            def give_back() -> None:
                made.discard(key)
                engine.memory.take_beside(index, -taken)

            weakref.finalize(storage, give_back).atexit = False
            made_here: torch.Tensor = nothing.set_(storage, 0, size, stride)
            return made_here

        @staticmethod
        def rendezvous(tensor: torch.Tensor, group_name: str | None = None) -> _Handle | None:
            if tensor.untyped_storage()._cdata not in made:
                return None
            world: Any = torch.distributed.group.WORLD
            return _Handle(tensor, group_name or world.group_name)

        @staticmethod
        def is_symm_mem_tensor(tensor: torch.Tensor) -> bool:
            return tensor.untyped_storage()._cdata in made

        @staticmethod
        def get_mempool_allocator(device: torch.device) -> Any:
            """Of a pool in which newer versions ask for it; what is asked of the driver is the same."""
            return original

        @staticmethod
        def has_multicast_support(device_type: Any, device_idx: int) -> bool:
            return torch.cuda.get_device_capability(device_idx) >= _MULTICAST

    return Symmetric


def prepare(module: ModuleType, patches: Patches) -> None:
    """For `torch.distributed._symmetric_memory`."""
    for name, (_, plainly) in _FUSED.items():
        # (The others' sums come in wrappers there, which are no memory of the host's: they stay zeros, and the report says so.)
        if "all_gather" in name:
            equivalent(getattr(torch.ops.symm_mem, name).default)(getattr(module, plainly))
    symmetric = _stand_in(module._SymmetricMemory)
    patches.set(module, "_SymmetricMemory", symmetric)
    # What it keeps of a card belongs to that one.
    for name in ("_group_name_to_workspace_tensor", "_backend_streams"):
        patches.set(module, name, {})
    workspace = module.get_symm_mem_workspace

    def get_symm_mem_workspace(group_name: str, min_size: int) -> Any:
        workspace(group_name, min_size)
        return symmetric.rendezvous(module._group_name_to_workspace_tensor[group_name], group_name)

    patches.set(module, "get_symm_mem_workspace", get_symm_mem_workspace)


def _as_on_a_card(on_a_card: str, plainly: str) -> Callable[..., Any]:
    def rule(tensor: VirtualTensor, *args: Any, **kwargs: Any) -> Any:
        module: Any = torch.distributed._symmetric_memory
        return getattr(module, plainly if engine_of(tensor).computes else on_a_card)(tensor, *args, **kwargs)

    return rule


for _name, _functions in _FUSED.items():
    built_in(f"symm_mem::{_name}")(_as_on_a_card(*_functions))


@built_in("symm_mem::multimem_all_gather_out")
def _gathered(tensor: torch.Tensor, group_name: str, out: torch.Tensor) -> torch.Tensor:
    return out
