"""bitsandbytes on a virtual device: 8-bit optimizers, paged ones, and layers with 4-bit and 8-bit weights.

The library says the shapes of its operators' results itself (0.46 and newer, `bitsandbytes/_ops.py`). Here is what its CUDA
kernels allocate besides. Source: `bitsandbytes/backends/cuda/ops.py` and `backends/default/ops.py` of 0.50.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.nn.functional as F

from gpumem_magic.patching import Patches
from gpumem_magic.virtual.engine.kernel_rules import built_in
from gpumem_magic.virtual.engine.tensors import VirtualTensor, engine_of

# The fused kernel takes up to so many rows always, and never more than so many.
_FUSED_ALWAYS, _FUSED_AT_MOST = 4, 1536


@built_in("bitsandbytes::optimizer_update_32bit")
@built_in("bitsandbytes::optimizer_update_8bit_blockwise")
def _update(*args: Any, **kwargs: Any) -> None:
    """Changes states in place; those of paged optimizers lie outside of the device's allocator."""


@built_in("bitsandbytes::gemm_4bit")
def _gemm_4bit(
    A: Any, B: Any, shapeB: Any, absmax: Any, blocksize: int, quant_type: str, bias: Any = None,
    absmax_8bit: Any = None, absmax_code: Any = None, absmax_offset: Any = None,
) -> Any:  # fmt: skip
    """Fused for few rows; else the weight is unpacked first, in memory that goes back after the product."""
    inner = A.shape[-1]
    rows = A.numel() // inner
    if _is_fused(A, rows, shapeB[0], inner, blocksize):
        return A.contiguous().new_empty((*A.shape[:-1], shapeB[0]))
    scales = [absmax]
    if absmax_8bit is not None:
        unpacked = absmax_8bit.to(torch.float32)
        scales += [unpacked, unpacked + absmax_offset]
    weight = A.new_empty(tuple(shapeB))
    out = F.linear(A, weight, bias)
    del scales, weight
    return out


def _is_fused(A: Any, rows: int, columns: int, inner: int, blocksize: int) -> bool:
    if rows > _FUSED_AT_MOST or inner % blocksize:
        return False
    if rows <= _FUSED_ALWAYS:
        return True
    # The library's own choice by architecture, where its CUDA half is loaded.
    library = sys.modules.get("bitsandbytes.backends.cuda.ops")
    choose = getattr(library, "_gemm_4bit_use_custom_cuda", None)
    return choose is not None and bool(choose(A.device.index, A.dtype, rows, columns, inner))


@built_in("bitsandbytes::int8_vectorwise_quant")
def _vectorwise(A: Any, threshold: float = 0.0) -> Any:
    columns = None
    statistics = A.new_empty(A.numel() // A.shape[-1], dtype=torch.float32)
    rows = A.new_empty(A.shape, dtype=torch.int8)
    if threshold > 0:
        outliers = A.abs() >= threshold
        del outliers
        if isinstance(A, VirtualTensor):
            engine_of(A).other_sizes["of int8 products no outlier columns"] += 1
        columns = A.new_empty(0, dtype=torch.int64)
    return rows, statistics, columns


@built_in("bitsandbytes::int8_double_quant")
def _double(A: Any, threshold: float = 0.0) -> Any:
    rows, row_statistics, columns = _vectorwise(A, threshold)
    flat = A.abs().view(-1, A.shape[-1])
    mask = flat >= threshold if threshold > 0 else None
    column_statistics = flat.amax(dim=0).float()
    del flat
    if mask is not None:
        A = A.masked_fill(mask.view(A.shape), 0.0)
    by_column = torch.round(A.mul(127.0) / column_statistics.unsqueeze(0)).to(torch.int8)
    return rows, by_column, row_statistics, column_statistics, columns


@built_in("bitsandbytes::int8_mm_dequant")
def _dequant(A: Any, row_stats: Any, col_stats: Any, dtype: Any = None, bias: Any = None) -> Any:
    out = A.new_empty(A.shape, dtype=torch.float16)
    return out.to(dtype or torch.float16)


@built_in("bitsandbytes::int8_scaled_mm")
def _scaled(A: Any, B: Any, row_stats: Any, col_stats: Any, bias: Any = None, dtype: Any = None) -> Any:
    product = A.new_empty((*A.shape[:-1], B.shape[0]), dtype=torch.int32)
    return _dequant(product, row_stats, col_stats, dtype, bias)


@built_in("bitsandbytes::int8_mixed_scaled_mm")
def _mixed(A: Any, CA: Any, CB: Any, SCA: Any, SCB: Any, outlier_cols: Any = None, bias: Any = None) -> Any:
    """Outlier columns, if there are any, are multiplied in the input's own precision."""
    few = 0 if outlier_cols is None else outlier_cols.numel()
    outliers = A[:, :few].contiguous() if few else A.new_empty(0)
    out = _scaled(CA, CB, SCA, SCB, bias, A.dtype)
    if few:
        weight = CB[:, :few].contiguous().to(torch.float32).to(A.dtype).t()
        out = out.addmm(outliers, weight)
    return out, outliers


@contextmanager
def without_its_kernels() -> Iterator[None]:
    """For `bitsandbytes.cextension`, which looks for its kernels when it is imported, and shows a traceback where CUDA's own
    libraries are not installed: nothing here needs them."""

    def is_else(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("bitsandbytes library load error")

    log = logging.getLogger("bitsandbytes.cextension")
    log.addFilter(is_else)
    try:
        yield
    finally:
        log.removeFilter(is_else)


class _NoKernels:
    """Stands for the library's kernels: calling one is an error, as where they could not be loaded."""

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        def missing(*args: Any) -> NoReturn:
            raise RuntimeError(f"{name} of bitsandbytes does not run on a virtual GPU")

        return missing


def prepare(module: ModuleType, patches: Patches) -> None:
    """For `bitsandbytes.functional`: managed memory lies on the host here, as pages that nobody touches."""
    fill = module.fill

    def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> torch.Tensor:
        paged = torch.zeros(shape, dtype=dtype, device="cpu")
        paged.is_paged = True  # type: ignore[attr-defined]
        paged.page_deviceid = 0 if device is None else device.index  # type: ignore[attr-defined]
        return paged

    def prefetch_tensor(A: Any, to_cpu: bool = False) -> None:
        """There is nowhere to move it to."""

    def fill_paged(A: Any, value: float, device: Any = None, prefetch: bool = True) -> None:
        if not getattr(A, "is_paged", False):
            fill(A, value, device, prefetch)
        elif value:
            A.fill_(value)

    patches.set(module, "get_paged", get_paged)
    patches.set(module, "prefetch_tensor", prefetch_tensor)
    patches.set(module, "fill", fill_paged)


def prepare_cuda(module: ModuleType, patches: Patches) -> None:
    """For `bitsandbytes.backends.cuda.ops`, which remembers the card of before, and calls its kernels.

    Where PyTorch is built for a card, these are there, and end the process without a driver."""
    if hasattr(module, "lib"):
        patches.set(module, "lib", _NoKernels())
    remembered = getattr(module, "_gpu_dispatch_props", None)
    if remembered is not None:
        remembered.cache_clear()
