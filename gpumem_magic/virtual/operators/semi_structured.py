"""Matrices of which two in four numbers are kept (`torch.sparse.to_sparse_semi_structured`), by cuSPARSELt and by CUTLASS.

`_cslt_compress` has no shape rule: ``cuSPARSELtOps.cpp`` of PyTorch makes one tensor of the kept numbers, with where they stand
behind them. What cuSPARSELt asks for while it compresses and multiplies is not known and not counted. With real values the host
keeps both in the form of PyTorch's own conversions in Python, which takes as many bytes, and multiplies the whole matrix.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.host_calls import equivalent
from gpumem_magic.virtual.engine.rules import special
from gpumem_magic.virtual.operators.data_dependent import _placed

_FROM = (8, 0)
_8_BITS = (torch.int8, torch.float8_e4m3fn)


def _compressed_columns(columns: int, dtype: torch.dtype) -> int:
    """How many elements stand for a row: half of them, and as many more as the places of two in four take."""
    return columns * (10 if dtype in _8_BITS else 9) // 16


@special(_aten._cslt_compress.default)
def _compress(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    (dense,) = args
    if engine.memory.capability(device) < _FROM:
        raise RuntimeError("cuSPARSELT not supported on your machine.")
    rows, columns = dense.shape
    return _placed(engine, (rows, _compressed_columns(columns, dense.dtype)), dense.dtype, device)


# ---- with real values


def _conversions() -> Any:
    return importlib.import_module("torch.sparse._semi_structured_conversions")


def _as_numbers(tensor: Any) -> Any:
    """The conversions know no 8-bit floats; what they move are bytes."""
    return tensor.view(torch.int8) if tensor.dtype is torch.float8_e4m3fn else tensor


@equivalent(_aten._cslt_compress.default)
def _compressed(dense: Any) -> Any:
    kept, places = _conversions().sparse_semi_structured_from_dense_cutlass(_as_numbers(dense))
    together = torch.cat([kept.flatten(), places.flatten().view(kept.dtype)])
    return together.view(dense.shape[0], -1).view(dense.dtype)


def _whole(compressed: Any, columns: int) -> Any:
    numbers, rows = _as_numbers(compressed).flatten(), compressed.shape[0]
    kept, places = numbers[: rows * columns // 2], numbers[rows * columns // 2 :]
    places = places.view(torch.int32 if numbers.dtype is torch.int8 else torch.int16)
    kept, places = kept.view(rows, -1), places.view(rows, -1)
    return _conversions().sparse_semi_structured_to_dense_cutlass(kept, places).view(compressed.dtype)


def _product(matrix: Any, dense: Any, dtype: torch.dtype | None) -> Any:
    """Sums are in 32 bits, as the card's are; what comes out in 8 is cut off at its ends."""
    if matrix.dtype is not torch.int8:
        return (matrix.float() @ dense.float()).to(dtype or matrix.dtype)
    found = matrix.int() @ dense.int()
    return found.clamp(-128, 127).to(torch.int8) if dtype in (None, torch.int8) else found.to(dtype)


@equivalent(_aten._cslt_sparse_mm.default)
def _multiply(
    compressed: Any, dense: Any, bias: Any = None, alpha: Any = None, out_dtype: Any = None, transpose_result: bool = False,
    *ways: int, **more: int,
) -> Any:  # fmt: skip
    wide = torch.int32 if compressed.dtype is torch.int8 else torch.float32
    found = _product(_whole(compressed, dense.shape[0]), dense, wide)
    if alpha is not None:
        found = found * (alpha if alpha.numel() == 1 else alpha[:, None])
    if bias is not None:
        found = found + bias[:, None]
    dtype = out_dtype or compressed.dtype
    found = found.round().clamp(-128, 127).to(dtype) if dtype is torch.int8 else found.to(dtype)
    return found.t().contiguous() if transpose_result else found


def _by_cutlass(kept: Any, places: Any) -> Any:
    return _conversions().sparse_semi_structured_to_dense_cutlass(kept, places)


@equivalent(_aten._sparse_semi_structured_mm.default)
def _mm(kept: Any, places: Any, dense: Any, out_dtype: Any = None) -> Any:
    return _product(_by_cutlass(kept, places), dense, out_dtype)


@equivalent(_aten._sparse_semi_structured_addmm.default)
def _addmm(bias: Any, kept: Any, places: Any, dense: Any, alpha: Any = 1, beta: Any = 1, out_dtype: Any = None) -> Any:
    product = _product(_by_cutlass(kept, places), dense, torch.int32 if kept.dtype is torch.int8 else torch.float32)
    return (alpha * product + beta * bias[:, None]).to(out_dtype or dense.dtype)
