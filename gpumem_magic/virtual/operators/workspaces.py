"""The workspaces of cuBLAS and cuBLASLt, which matrix products take beside their results.

One for each handle and stream, kept for good. Handles belong to host threads while these live, and the autograd engine has one
of its own for each device: hence two workspaces after the first backward pass (a published table of 48 measured rows is met
exactly only so). Sizes are the model's and the PyTorch version's (`generations`); a workspace is taken after the operator's
result, as on a device. Before PyTorch 2.0 the library takes its own from the driver. What else cuBLAS, cuDNN and a pool of
streams take there at their first use is the card's, where it was measured (`models.FirstUses`).
"""

from __future__ import annotations

import os
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from gpumem_magic.private import overloads
from gpumem_magic.virtual.card.catalog import DeviceState
from gpumem_magic.virtual.card.generations import (
    BlasPolicy,
    Version,
    blas_policy,
    cublas_outside,
    cublas_workspace_bytes,
    is_rocm,
    parse_version,
)
from gpumem_magic.virtual.card.models import FirstUses, GpuModel
from gpumem_magic.virtual.engine.modes import STATE, origin

# Products that go to cuBLASLt: always, and with a bias that the library adds.
_LT = {*overloads("_scaled_mm _scaled_mm.out")}
_WITH_BIAS = {*overloads("addmm _addmm_activation addmm.out _addmm_activation.out addmm.dtype addmm.dtype_out")}
_LT_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# (Those of integers go to cuBLASLt without one of its own: `int8_gemm` in ``CUDABlas.cpp``, and an H100 with 2.11.)
_OTHERS = {
    *overloads("mm bmm baddbmm addmv mv dot vdot mm.out bmm.out baddbmm.out addmv.out mv.out _int_mm _int_mm.out"),
    *overloads("addmm_ baddbmm_ addmv_ mm.dtype mm.dtype_out bmm.dtype bmm.dtype_out baddbmm.dtype baddbmm.dtype_out"),
    *overloads("addbmm addbmm_ addbmm.out"),
}
# Products one by one, whose results are added up.
_ONE_BY_ONE = {*overloads("addbmm addbmm_ addbmm.out")}
# Since when cuBLASLt adds a matrix of a single row, too (the build of 2.12; not that of 2.7), and in half precision any (those of
# 2.14 and 2.15; not that of 2.12).
_ROW_BY_LT_FROM = (2, 12)
_MATRIX_BY_LT_FROM = (2, 14)
_HALVES = (torch.float16, torch.bfloat16)
# Since when products of cuBLASLt's ask for no handle of cuBLAS's (the build of 2.12): those of integers take nothing.
_WITHOUT_HANDLE_FROM = (2, 12)
_OF_INTEGERS = {*overloads("_int_mm _int_mm.out")}
# Products of matrices, which go to cuBLASLt where a program prefers it (`gemm` and `bgemm` in ``CUDABlas.cpp``).
_OF_MATRICES = {*_WITH_BIAS, *overloads("mm bmm baddbmm mm.out bmm.out baddbmm.out addmm_ baddbmm_")}
_PRODUCTS_OF_MANY = {*overloads("bmm")}
# Products of many columns with as many rows are a kernel of Triton's since then, without cuBLAS (``torch/_native/ops``).
_OUTER_BY_TRITON_FROM = (2, 13)
# These ask for a handle for no element, too (``Blas.cpp`` in ATen/native/cuda).
_OF_VECTORS = {*overloads("dot vdot")}
_FILLS = {
    *overloads("zeros_like ones_like full_like new_zeros new_ones new_full fill_.Scalar fill_.Tensor zero_ _to_copy")
}
_PLAIN_COPIES = {*overloads("clone")}
_SEED_BYTES = 8
# Of one thread's random numbers in cuDNN (`cudnnDropoutGetStatesSize`).
_STATE_BYTES = 24
_NO_HANDLE = {
    "cublas": "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cudnn": "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
}
# The handle of autograd's thread for a device.
_OF_BACKWARD = -1
# By their `id`: PyTorch's own hash of an operator is Python's, and each one passes here.
_BLAS = {id(func): func for func in _LT | _WITH_BIAS | _OTHERS}


class _ThreadHandles:
    """The handles that a thread works with, by device: kept by the thread alone, and free for others once it has ended."""

    def __init__(self, free: Mapping[int, list[int]]) -> None:
        self.by_device: dict[int, int] = {}
        self._free = free

    def __del__(self) -> None:
        for device, handle in self.by_device.items():
            self._free[device].append(handle)


class _HandlePool:
    """Which handle a thread has, by number: one that a thread gave back, the last first, before a new one (``PoolWindow`` in
    ``ATen/cuda/detail/DeviceThreadHandles.h``)."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._made: Counter[int] = Counter()
        self._threads = threading.local()

    def of_this_thread(self, device: int) -> int:
        mine: _ThreadHandles | None = getattr(self._threads, "handles", None)
        if mine is None:
            mine = self._threads.handles = _ThreadHandles(self._free)
        found = mine.by_device.get(device)
        if found is None:
            if self._free[device]:
                found = self._free[device].pop()
            else:
                found = self._made[device]
                self._made[device] += 1
            mine.by_device[device] = found
        return found


class Workspaces:
    """Takes workspaces when they are first needed, or for a call. malloc(device, nbytes), free(device, address) and
    take_beside(device, nbytes) are the machine's.
    """

    def __init__(
        self,
        devices: Sequence[DeviceState],
        malloc: Callable[[int, int], int],
        stream_of: Callable[[int], int],
        free: Callable[[int, int], None],
        take_beside: Callable[[int, int], None],
    ) -> None:
        self._malloc = malloc
        self._free = free
        self._take_beside = take_beside
        self._stream_of = stream_of
        # Address and bytes, by library, device, handle and stream.
        self._workspaces: dict[tuple[str, int, int, int], tuple[int, int]] = {}
        self._chosen: dict[str, int] = {}
        self.prefers_lt = False
        """Whether the program wants cuBLASLt (`torch.backends.cuda.preferred_blas_library`)."""
        self._devices = devices
        self._policies: dict[int, BlasPolicy] = {}
        self._orders: dict[int, list[tuple[str, int, bool]]] = {}
        self._versions = [parse_version(version_text(device)) for device in devices]
        self._outside = [_outside(device.model) for device in devices]
        self._handles: set[tuple[str, int, int]] = set()
        self._pool = _HandlePool()
        self._begun: set[tuple[str, int]] = set()

    def after(self, func: Any, args: Sequence[Any], device: int) -> None:
        """To be called when such an operator has its results. Raises out of memory as the device would."""
        if not takes_after(func) or (func in _PRODUCTS_OF_MANY and _is_by_triton(args, self._versions[device])):
            return
        if func not in _OF_VECTORS and _multiplies_nothing(args):
            return
        self._begin(device)
        policy = self._policies.get(device) or self._decide(device)
        if func in _OF_INTEGERS and self._versions[device] >= _WITHOUT_HANDLE_FROM:
            return
        by_lt = policy.lt_bytes and (
            func in _LT
            or (func in _WITH_BIAS and adds_bias(args, self._versions[device]))
            or (self.prefers_lt and func in _OF_MATRICES)
        )
        for _ in range(args[1].shape[0] if func in _ONE_BY_ONE else 1):
            self._take_for_a_call(policy, bool(by_lt), device)

    def _take_for_a_call(self, policy: BlasPolicy, by_lt: bool, device: int) -> None:
        passing: list[int] = []
        try:
            for library, size, persistent in self._orders[device]:
                if (not policy.lt_alone or library == "cublaslt") if by_lt else library == "cublas":
                    passing.append(self._take(library, device, size, persistent))
        finally:
            for address in passing:
                if address:
                    self._free(device, address)

    def handle(self, device: int) -> None:
        """To be called when the program asks for cuBLAS's handle, which comes with its workspace where those are kept."""
        self._begin(device)
        policy = self._policies.get(device) or self._decide(device)
        if policy.cublas_persistent:
            self._take("cublas", device, policy.cublas_bytes, True)

    def size(self, library: str, device: int) -> int:
        """How many bytes a workspace of "cublas" or "cublaslt" has from now on (``CublasHandlePool.cpp``)."""
        policy = self._policies.get(device) or self._decide(device)
        # (What the two share is no larger than cuBLAS's.)
        shared = min(self._chosen.get(library, policy.cublas_bytes), policy.cublas_bytes)
        return policy.cublas_bytes if library == "cublas" else policy.lt_bytes or shared

    def choose(self, library: str, nbytes: int) -> None:
        """The program's own size, before that of the variables (since 2.13)."""
        self._chosen[library] = nbytes
        self._policies.clear()

    def _begin(self, device: int) -> None:
        if self._outside[device].cublas:
            self._library_takes("cublas", self._outside[device].cublas, device)

    def _decide(self, device: int) -> BlasPolicy:
        """At the first product, when PyTorch reads its variables too (``parseChosenWorkspaceSize``): a program may set them."""
        policy = _policy(self._devices[device])
        policy = replace(
            policy,
            cublas_bytes=self._chosen.get("cublas", policy.cublas_bytes),
            lt_bytes=policy.lt_bytes and self._chosen.get("cublaslt", policy.lt_bytes),
        )
        self._policies[device] = policy
        self._orders[device] = _in_order(policy)
        return policy

    def _take(self, library: str, device: int, size: int, persistent: bool) -> int:
        """The address of a workspace for this call alone; 0 where there is none, or one that stays (for a smaller one)."""
        if not size:
            return 0
        key = (library, *self._handle(device))
        outgrown, enough = self._workspaces.get(key, (0, 0))
        if enough >= size:
            return 0
        with origin("workspace"):
            address = self._malloc(device, size)
        if not persistent:
            return address
        self._workspaces[key] = address, size
        if outgrown:
            self._free(device, outgrown)
        return 0

    def _handle(self, device: int) -> tuple[int, int, int]:
        handle = _OF_BACKWARD if STATE.backward else self._pool.of_this_thread(device)
        return device, handle, self._stream_of(device)

    def cudnn(self, device: int) -> None:
        """To be called before cuDNN runs anything."""
        if self._outside[device].cudnn:
            self._library_takes("cudnn", self._outside[device].cudnn, device)

    def dropout_states(self, device: int) -> None:
        """Of every thread that the card runs, kept for good, after a seed (`get_dropout_state` in ``RNN.cpp``)."""
        if ("dropout", device) in self._begun:
            return
        model = self._devices[device].model
        self._free(device, self._malloc(device, _SEED_BYTES))
        with origin("workspace"):
            self._malloc(device, model.multi_processor_count * model.max_threads_per_multiprocessor * _STATE_BYTES)
        self._begun.add(("dropout", device))

    def streams(self, device: int) -> None:
        """To be called when the program wants a stream of its own."""
        if self._outside[device].streams and ("streams", device) not in self._begun:
            self._take_beside(device, self._outside[device].streams)
            self._begun.add(("streams", device))

    def _library_takes(self, library: str, each: int, device: int) -> None:
        """From the driver, for a handle that is new: one for each thread."""
        handle = (library, *self._handle(device)[:2])
        if handle in self._handles:
            return
        code = self._outside[device].code * (("code", device) not in self._begun)
        try:
            self._take_beside(device, each + code)
        except RuntimeError:
            raise RuntimeError(_NO_HANDLE[library]) from None
        self._handles.add(handle)
        self._begun.add(("code", device))

    def clear(self) -> None:
        """Gives all of them back, as `torch._C._cuda_clearCublasWorkspaces()` does."""
        persistent, self._workspaces = self._workspaces, {}
        for (_, device, _, _), (address, _) in persistent.items():
            self._free(device, address)


def _multiplies_nothing(args: Sequence[Any]) -> bool:
    """Whether a factor of a product of matrices has no element: it returns, or fills its result, before it asks for a handle."""
    return any(isinstance(one, torch.Tensor) and one.numel() == 0 for one in args)


def _is_by_triton(args: Sequence[Any], version: Version) -> bool:
    """Whether each product is of one column and one row (`_bmm_outer_product_cond`)."""
    if version < _OUTER_BY_TRITON_FROM or args[0].shape[-1] != 1 or args[0].is_complex():
        return False
    return bool(args[0].numel() and args[1].numel()) and os.environ.get("TORCH_DISABLE_NATIVE_JIT", "0") != "1"


def _outside(model: GpuModel) -> FirstUses:
    """(The contexts of devices that name no version were measured with whatever was there.)"""
    each, once = (0, 0) if model.torch_version is None else cublas_outside(model.torch_version)
    return FirstUses(cublas=each, code=once) if each else model.first_uses


def works_by_element(func: Any) -> bool:
    """Whether it is a kernel that works element by element, a fill or a conversion.

    On an H100 products, random numbers, `cat` and attention by cuDNN ran without what such a kernel brings (`benchmarks/truth`).
    """
    return (torch.Tag.pointwise in func.tags and func not in _PLAIN_COPIES) or func in _FILLS


def has_nothing_to_do(args: Sequence[Any]) -> bool:
    """Whether an operator is asked for no element, or for a copy from the host: no such kernel runs."""
    first = args[0] if args else None
    return isinstance(first, torch.Tensor) and (first.numel() == 0 or first.device.type == "cpu")


def takes_after(func: Any) -> bool:
    """Whether an operator is one of the libraries' products."""
    return id(func) in _BLAS


def _in_order(policy: BlasPolicy) -> list[tuple[str, int, bool]]:
    """(library, bytes, whether it is kept) in the order in which a product of cuBLASLt's takes them.

    A workspace that is kept is kept for a handle, with which cuBLAS's own comes (``CublasHandlePool.cpp``; a recording with 2.9).
    One for the call is there before the handle is asked for (``CUDABlas.cpp``).
    """
    lt = ("cublaslt", policy.lt_bytes, policy.lt_persistent)
    cublas = ("cublas", policy.cublas_bytes, policy.cublas_persistent)
    return [cublas, lt] if policy.lt_persistent else [lt, cublas]


def adds_bias(args: Sequence[Any], version: Version) -> bool:
    """Whether a product with a bias is one call of cuBLASLt (``Blas.cpp``): none with a single row or column in the second
    factor, in 2.10 nor in the first. (A bias that is scaled by ``beta=`` goes to cuBLAS; that is not looked at here.)

    (An H100 with 2.11 took it for a single row, and the CUDA build of 2.13 asks for the second factor's sizes only.)
    """
    bias, first, second = args[:3]
    is_row = bias.dim() == 1 or (version >= _ROW_BY_LT_FROM and bias.dim() == 2 and bias.shape[0] == 1)
    fits = is_row and bias.shape[-1] == second.shape[1] and first.dtype in _LT_TYPES
    if version >= _MATRIX_BY_LT_FROM and first.dtype in _HALVES:
        fits = fits or bias.shape == (first.shape[0], second.shape[1])
    factors = (first, second) if version[:2] == (2, 10) else (second,)
    return bool(fits) and bias.is_contiguous() and all(size > 1 for factor in factors for size in factor.shape)


def version_text(device: DeviceState) -> str:
    """The version of PyTorch whose ways of using memory are the device's: its own, else the installed one."""
    return str(device.model.torch_version or torch.__version__)


def _policy(device: DeviceState) -> BlasPolicy:
    model = device.model
    text = version_text(device)
    version = parse_version(text)
    kept = model.cublas_workspace_bytes
    if not model.calibrated:
        # The catalogue has that of the newest versions.
        kept = min(kept, cublas_workspace_bytes(version, model.capability, is_rocm(text)))
    return blas_policy(version, kept, os.environ)
