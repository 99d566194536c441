"""The functions of `torch._C` on which `torch.cuda` stands: what calls them gets the answer that `torch.cuda` gives.

PyTorch's tests, old programs and libraries that launch kernels call them directly. Which devices a driver has
(`_cuda_getDeviceCount`) and its history of memory are not among them: by these a real GPU is found beside the virtual one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpumem_magic.patching import Patches
from gpumem_magic.virtual.torch_face import streams

# By the name in `torch._C`, the one in `torch.cuda` that takes the same and answers the same (``torch/csrc/cuda/Module.cpp``).
_SAME = {
    "_cuda_init": "init",
    "_cuda_isInBadFork": "_is_in_bad_fork",
    "_cuda_getDevice": "current_device",
    "_cuda_setDevice": "set_device",
    "_cuda_exchangeDevice": "_exchange_device",
    "_cuda_maybeExchangeDevice": "_maybe_exchange_device",
    "_cuda_canDeviceAccessPeer": "can_device_access_peer",
    "_cuda_synchronize": "synchronize",
    "_cuda_sleep": "_sleep",
    "_cuda_ipc_collect": "ipc_collect",
    "_cuda_get_sync_debug_mode": "get_sync_debug_mode",
    "_cuda_set_sync_debug_mode": "set_sync_debug_mode",
    "_cuda_isCurrentStreamCapturing": "is_current_stream_capturing",
    "_cuda_emptyCache": "empty_cache",
    "_cuda_memoryStats": "memory_stats_as_nested_dict",
    "_cuda_resetPeakMemoryStats": "reset_peak_memory_stats",
    "_cuda_getAllocatorBackend": "get_allocator_backend",
    "_cuda_setMemoryFraction": "set_per_process_memory_fraction",
    "_cuda_getMemoryFraction": "get_per_process_memory_fraction",
    "_cuda_cudaCachingAllocator_raw_delete": "caching_allocator_delete",
}
_CUDA = 1
"""`DeviceType` of CUDA in C++, the last of the three numbers by which a stream goes."""


def install(patches: Patches, stream_of: Callable[[int], int]) -> None:
    """After `torch.cuda` is replaced. stream_of: the number of this thread's current stream on a device."""

    def current(device: int) -> tuple[int, int, int]:
        return stream_of(device), device, _CUDA

    functions: dict[str, Callable[..., Any]] = {
        **{name: getattr(torch.cuda, other) for name, other in _SAME.items() if hasattr(torch.cuda, other)},
        "_cuda_getCurrentRawStream": stream_of,
        "_cuda_getCurrentStream": current,
        "_cuda_getDefaultStream": lambda device: (0, device, _CUDA),
        "_cuda_setStream": _set_stream,
        "_cuda_cudaCachingAllocator_raw_alloc": lambda size, stream: torch.cuda.caching_allocator_alloc(size),
        "_cuda_cudaCachingAllocator_enable": _enable_caching,
        "_cuda_getArchFlags": lambda: " ".join(torch.cuda.get_arch_list()),
    }
    for name, function in functions.items():
        patches.set(torch._C, name, function)


def _enable_caching(value: bool) -> None:
    if not value:
        raise RuntimeError(
            "a virtual GPU always caches memory: leave `caching_allocator_enable(False)` out here, or run it on a real GPU"
        )


def _set_stream(stream_id: int, device_index: int, device_type: int = _CUDA) -> None:
    """As `torch.cuda.set_stream`, of a stream that is known by its numbers."""
    streams.set_stream(streams.Stream(stream_id=stream_id, device_index=device_index))
