"""Functions of `torch._C` that only PyTorch's build for a card has, and that its own Python calls: answered from the emulated
machine where it has an answer, else refused in a line that says what to do.

Those of devices, streams and memory are replaced in `torch.cuda` itself (`torch_cuda`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.backends.cuda
from torch._prims_common import compute_elementwise_output_strides

from gpumem_magic.patching import Patches
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.refusals import CannotRun
from gpumem_magic.virtual.operators.workspaces import Workspaces
from gpumem_magic.virtual.torch_face.streams import CURRENT
from gpumem_magic.virtual.torch_face.tunable import Tunable
from gpumem_magic.virtual.torch_face.wheel import preferring

# (Between processes; the collectives of one process are `nccl_calls`.)
_NCCL = ("_nccl_unique_id", "_nccl_init_rank")
_REFUSED = {
    **{
        name: f"torch.cuda.nccl.{name.removeprefix('_nccl_')}() is not emulated: use torch.distributed, or real GPUs"
        for name in _NCCL
    },
    "_cuda_changeCurrentAllocator": (
        "a virtual GPU has PyTorch's own allocator and no other: leave this line out here, or run it on a real GPU"
    ),
}


class Bindings:
    """What is put into `torch._C` for one machine."""

    def __init__(self, engine: Engine, workspaces: Workspaces, l2_cache_bytes: Callable[[int], int]) -> None:
        self._engine = engine
        self._workspaces = workspaces
        self._tunable = Tunable(lambda: l2_cache_bytes(CURRENT.device))
        self._metadata = ""
        self._plans: dict[int, int] = {}

    def install(self, patches: Patches) -> None:
        functions: dict[str, Callable[..., Any]] = {
            **{name: functools.partial(_refuse, words) for name, words in _REFUSED.items()},
            **self._tunable.functions(),
            "_cuda_clearCublasWorkspaces": self._clear,
            "_cuda_getCurrentBlasHandle": self._blas_handle,
            "_cuda_getCurrentSolverHandle": lambda: _HANDLE + CURRENT.device,
            "_cuda_getCublasWorkspaceSize": functools.partial(self._size, "cublas"),
            "_cuda_getCublasLtWorkspaceSize": functools.partial(self._size, "cublaslt"),
            "_cuda_setCublasWorkspaceSize": functools.partial(self._choose, "cublas"),
            "_cuda_setCublasLtWorkspaceSize": functools.partial(self._choose, "cublaslt"),
            "_cuda_setMemoryMetadata": self._set_metadata,
            "_cuda_getMemoryMetadata": lambda: self._metadata,
            "_cuda_jiterator_compile_and_launch_kernel": self._element_by_element,
        }
        for name, function in functions.items():
            patches.set(torch._C, name, function)
        cache = torch.backends.cuda.cuFFTPlanCache
        patches.set(cache, "max_size", property(self._most_plans, self._set_most_plans))
        patches.set(cache, "size", property(functools.partial(_refuse, _PLANS)))
        patches.set(cache, "clear", lambda its: None)
        preferred = preferring(torch.backends.cuda.preferred_blas_library, ("Cublaslt",), self._prefer)
        patches.set(torch.backends.cuda, "preferred_blas_library", preferred)

    def _clear(self) -> None:
        """The public way to get cuBLAS's workspaces back."""
        with self._engine.uninterrupted, self._engine.lock:
            self._workspaces.clear()

    def _blas_handle(self) -> int:
        with self._engine.lock:
            self._workspaces.handle(CURRENT.device)
        return _HANDLE + CURRENT.device

    def _size(self, library: str) -> int:
        return self._workspaces.size(library, CURRENT.device)

    def _choose(self, library: str, nbytes: int) -> None:
        if nbytes < 0:
            raise RuntimeError(f"the size of a workspace must not be negative, got {nbytes}")
        self._workspaces.choose(library, int(nbytes))

    def _most_plans(self, cache: Any) -> int:
        """How many of cuFFT's plans a device keeps (``CuFFTPlanCache.h``); they hold no memory of PyTorch's allocator."""
        return self._plans.get(cache.device_index, _MOST_PLANS)

    def _set_most_plans(self, cache: Any, count: int) -> None:
        if count < 0:
            raise RuntimeError(f"cuFFT plan cache size must be non-negative, but got {count}")
        self._plans[cache.device_index] = int(count)

    def _set_metadata(self, metadata: str) -> None:
        self._metadata = str(metadata)

    def _element_by_element(
        self,
        code: str,
        name: str,
        by_reference: bool,
        outputs: int,
        tensors: Sequence[torch.Tensor],
        numbers: Mapping[str, Any],
    ) -> Any:
        """A kernel that a program wrote in CUDA, for every element (`jiterator.cu`): results of the common shape and type."""
        if self._engine.computes:
            raise CannotRun(
                f"values=real cannot run {name}, whose code is CUDA's: leave values=real out, or run this line on a real GPU"
            )
        if not tensors or any(not tensor.is_cuda for tensor in tensors):
            raise RuntimeError(f"{name} expected tensors on one CUDA device, and got those of another, or none")
        shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
        dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
        stride = compute_elementwise_output_strides(*(tensor.expand(shape) for tensor in tensors))
        made = tuple(torch.empty_strided(shape, stride, dtype=dtype, device=tensors[0].device) for _ in range(outputs))
        return made[0] if outputs == 1 else made

    def _prefer(self, library: Any) -> None:
        self._workspaces.prefers_lt = library == type(library).Cublaslt


_MOST_PLANS = 4096
_PLANS = "a virtual GPU makes no plans of cuFFT's, so that there is nothing to count: run this line on a real GPU"
# Handles are addresses; nothing lies there.
_HANDLE = 1 << 44


def _refuse(words: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise CannotRun(words)
