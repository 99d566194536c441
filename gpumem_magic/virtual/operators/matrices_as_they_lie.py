"""Products of matrices, and of a matrix and a vector, that cuBLAS cannot read as they lie: these are copied first.

After ``Blas.cpp`` of ATen/native/cuda: of each matrix the elements of one dimension have to lie side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine.alike import Kernels
from gpumem_magic.virtual.engine.calls import bytes_of, copies_of, write_by_others
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.modes import pushed
from gpumem_magic.virtual.engine.rules import BESIDE, special
from gpumem_magic.virtual.operators.sorting import is_dense

_PRODUCTS: dict[Any, tuple[int, int]] = {
    _aten.mm.default: (0, 1),
    _aten.bmm.default: (0, 1),
    _aten.addmm.default: (1, 2),
    _aten.baddbmm.default: (1, 2),
}
# Products of a matrix, at this place, and a vector after it.
_WITH_VECTORS: dict[Any, int] = {
    **dict.fromkeys(overloads("mv"), 0),
    **dict.fromkeys(overloads("addmv addmv_ addmv.out"), 1),
}


@special(*_PRODUCTS, table=BESIDE)
def _product(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int] | Kernels:
    """Plain copies, and of complex numbers those that are conjugated, where a product takes them as they lie: cuBLAS conjugates
    what it transposes. The second first (`cublasCommonArgs` and `prepare_batch_matrix_for_cublas` in ``Blas.cpp``). It is not
    asked for a result without elements."""
    if not out.numel():
        return Kernels((), ())
    in_rows = out.stride(-1) == 1 and (out.dim() == 2 or out.stride(-2) != 1)
    matrices = (
        [args[place] for place in reversed(_PRODUCTS[func])] if in_rows else [args[place] for place in _PRODUCTS[func]]
    )
    copied = [
        bytes_of(one)
        for one in matrices
        if not _lies_right(one) or (one.is_conj() and not _is_transposed(one, in_rows))
    ]
    # (Nothing is copied of any that look so. What is, is there while the library takes its workspace.)
    return copied or Kernels((), ())


@special(*_WITH_VECTORS, table=BESIDE)
def _product_with_a_vector(
    engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int
) -> list[int] | Kernels:
    """A vector that is one number again and again is written out, then a matrix that cuBLAS cannot read as it lies
    (`addmv_out_cuda` in ``Blas.cpp``, from 2.1 to 2.13)."""
    matrix, vector = args[_WITH_VECTORS[func] :][:2]
    if matrix.layout is not torch.strided or not matrix.numel():
        return Kernels((), ())
    copied = copies_of(*(() if vector.stride(0) else (vector,)))
    if not fits_blas(matrix.shape, matrix.stride()):
        copied += copies_of(matrix)
    return copied or Kernels((), ())


# Since when a product with a vector is written to a tensor that has room for it without a vector to add it to, whose numbers do
# not count (`mv_out` in ``Blas.cpp``; the builds of 2.6 and 2.7 make one, an H100 with 2.11 did not).
_NOTHING_ADDED_FROM = (2, 8)


@special(_aten.mv.out)
def _into_a_vector(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    out, rows = kwargs["out"], args[0].shape[:1].numel()
    fits = out.dim() == 1 and out.numel() == rows and rows > 1
    added = bytes_of(out) if fits and engine.memory.torch_version(device) < _NOTHING_ADDED_FROM else 0
    with pushed(engine.mode), engine.scratch(device, added):
        return write_by_others(func, args, kwargs)


def fits_blas(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether cuBLAS can read the matrices of a tensor as they lie: their rows, or their columns, without gaps inside."""
    rows, columns = shape[-2], shape[-1]
    down, along = stride[-2], stride[-1]
    return (along == 1 and down >= max(1, columns)) or (down == 1 and along >= max(1, rows))


def _lies_right(matrices: Any) -> bool:
    """A single matrix that is dense does whatever the strides of its sides of one are (`prepare_matrix_for_cublas`)."""
    if matrices.layout is not torch.strided or (matrices.dim() == 2 and is_dense(matrices)):
        return True
    return fits_blas(matrices.shape, matrices.stride())


def _is_transposed(matrices: Any, in_rows: bool) -> bool:
    """As cuBLAS is told of them, for a result that lies so."""
    if matrices.dim() == 2 and is_dense(matrices):
        return bool(in_rows != matrices.is_contiguous())
    side = -1 if in_rows else -2
    return not (matrices.stride(side) == 1 and matrices.stride(-3 - side) >= max(1, matrices.shape[side]))
