"""Sparse tensors in compressed form (CSR, CSC, and in blocks) on a virtual device: three tensors each, and what operators make.

As with those in coordinate form (`sparse`), every operator with such an argument comes here, and one without a rule says so.
After `SparseCsrTensor.cpp`, `SparseCsrTensorMath.cpp` and `SparseBlasImpl.cpp` of PyTorch. Changes of form are in `compressing`.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine import values
from gpumem_magic.virtual.engine.calls import sparse_of
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.half_precision import HALF, accumulator
from gpumem_magic.virtual.engine.mismatch import refuse_mixed_devices
from gpumem_magic.virtual.engine.modes import pushed
from gpumem_magic.virtual.engine.refusals import cannot_run
from gpumem_magic.virtual.engine.rules import COMPRESSED, special
from gpumem_magic.virtual.operators import cusparse
from gpumem_magic.virtual.operators.compressed_parts import IN_BLOCKS, is_compressed, made, parts
from gpumem_magic.virtual.operators.compressing import flipped
from gpumem_magic.virtual.operators.data_dependent import _placed
from gpumem_magic.virtual.operators.shapes import empty_like
from gpumem_magic.virtual.operators.sparse import ASKED_OF_EACH, OF_EACH_ELEMENT
from gpumem_magic.virtual.operators.sparse_products import by_rows, products_of

_32_BITS, _INDEX = 4, 8

_compressed = partial(special, table=COMPRESSED)


# ---- what passes: questions, the parts themselves, and the same parts by the other name


@_compressed(
    *overloads("""
    crow_indices col_indices ccol_indices row_indices values _nnz sparse_dim dense_dim detach alias is_same_size sym_size
    sym_numel sym_stride sym_storage_offset zero_ t transpose.int
""")
)
def _passes(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    return engine.run(func, args, kwargs, device)


# ---- the same places, other values


def _like(engine: Engine, source: Any, elements: Any, device: int) -> Any:
    """With other values in the same places, which PyTorch copies: of a call's arguments C++ works out the last first."""
    old = parts(engine, source)
    plain = empty_like(engine, old.plain, device)
    return sparse_of((empty_like(engine, old.compressed, device), plain, elements), source.shape, source.layout)


@_compressed(
    *overloads(
        f"{OF_EACH_ELEMENT} {ASKED_OF_EACH} neg angle pow.Tensor_Scalar mul.Scalar div.Scalar empty_like ones_like clone"
        " _conj_physical"
    )
)
def _same_places(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    kwargs = {name: value for name, value in kwargs.items() if name != "layout"}
    return _like(engine, args[0], func(parts(engine, args[0]).values, *args[1:], **kwargs), device)


@_compressed(_aten.zeros_like.default)
def _zeros(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """Without an element."""
    source, old = args[0], parts(engine, args[0])
    dtype, block = kwargs.get("dtype") or source.dtype, old.block(source.layout)
    return made(engine, source.shape, dtype, source.layout, 0, device, block, old.batches)


@_compressed(_aten._to_copy.default)
def _to_copy(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    old, target = parts(engine, args[0]), kwargs.get("device")
    # (They come first, as an H100 was asked.)
    elements = old.values.to(target, kwargs.get("dtype"), copy=True)
    places = [old.compressed.to(target, copy=True), old.plain.to(target, copy=True)]
    return sparse_of((*places, elements), args[0].shape, args[0].layout)


@_compressed(_aten.mul.Tensor, _aten.div.Tensor)
def _multiply(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    refuse_mixed_devices(func, args, kwargs)
    left, right = args[:2]
    if not is_compressed(left):
        left, right = right, left
    old = parts(engine, left)
    if is_compressed(right):
        return _product_of_places(engine, func, left, right, device)
    if isinstance(right, torch.Tensor) and right.dim():
        return _like(engine, left, empty_like(engine, old.values, device), device)
    return _like(engine, left, func(old.values, right), device)


def _product_of_places(engine: Engine, func: Any, left: Any, right: Any, device: int) -> Any:
    """By coordinates, into a result without rows that grows (`mul_out_sparse_csr`)."""
    index, lines = parts(engine, left).compressed.element_size(), parts(engine, left).compressed.numel()
    if not left.layout is right.layout is torch.sparse_csr:
        old = parts(engine, left)
        count = engine.selected("product of sparse tensors", min(old.elements, parts(engine, right).elements))
        return made(engine, left.shape, left.dtype, left.layout, count, device, old.block(left.layout), old.batches)
    grown = _placed(engine, (1,), torch.int64, device)
    with pushed(engine.mode):
        factors = [_aten._to_sparse.default(one) for one in (left, right)]
        product = factors[0] * factors[1]
    elements = product._nnz()
    with engine.scratch(device, index * lines):
        compressed = _placed(engine, (lines,), torch.int64, device)
        del grown
        engine.table.drain()
        plain = _placed(engine, (elements,), torch.int64, device)
        chosen = _placed(engine, (elements,), left.dtype, device)
    del product
    engine.table.drain()
    del factors
    engine.table.drain()
    return sparse_of((compressed, plain, chosen), left.shape, torch.sparse_csr)


@_compressed(_aten.add.Tensor, _aten.sub.Tensor)
def _add(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    refuse_mixed_devices(func, args, kwargs)
    left, right = args[:2]
    if not (is_compressed(left) and is_compressed(right)):
        return empty_like(engine, right if is_compressed(left) else left, device)
    most = parts(engine, left).elements + parts(engine, right).elements
    count = engine.selected("sum of sparse tensors", min(most, math.prod(left.shape[-2:])))
    return made(engine, left.shape, left.dtype, left.layout, count, device)


@_compressed(_aten.sparse_mask.default)
def _mask(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    refuse_mixed_devices(func, args, kwargs)
    mask = args[1]
    old = parts(engine, mask)
    return _like(engine, mask, _placed(engine, tuple(old.values.shape), args[0].dtype, device), device)


@_compressed(_aten.sparse_sampled_addmm.default)
def _sampled(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """The result grows from one without rows; cuSPARSE takes a byte (``SparseBlas.cpp`` in ATen/native/sparse/cuda; an H100 with
    2.11)."""
    refuse_mixed_devices(func, args, kwargs)
    old = parts(engine, args[0])
    with engine.scratch(device, old.compressed.element_size()):
        compressed = empty_like(engine, old.compressed, device)
    made_of = compressed, empty_like(engine, old.plain, device), empty_like(engine, old.values, device)
    with cusparse.held(engine, device, 1):
        return sparse_of(made_of, args[0].shape, args[0].layout)


# ---- dense results


@_compressed(_aten._to_dense.default, _aten.to_dense.default)
def _to_dense(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    dtype = args[1] if len(args) > 1 else kwargs.get("dtype")
    return _placed(engine, tuple(args[0].shape), dtype or args[0].dtype, device)


@_compressed(_aten.sum.default)
def _sum(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    return func(parts(engine, args[0]).values, *args[1:], **kwargs)


@_compressed(*overloads("mm mv bmm addmm addmv _sparse_mm _sparse_addmm baddbmm"))
def _product(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    refuse_mixed_devices(func, args, kwargs)
    left, right = args[1:3] if len(args) > 2 else args[:2]
    if left.shape[-1] != right.shape[-2 if right.dim() > 1 else 0]:
        raise RuntimeError(
            f"mat1 and mat2 shapes cannot be multiplied ({'x'.join(map(str, left.shape))} and {'x'.join(map(str, right.shape))})"
        )
    shape = (*left.shape[:-1], *right.shape[-1:]) if right.dim() > 1 else tuple(left.shape[:-1])
    if is_compressed(left) and is_compressed(right):
        return _product_of_two(engine, left, right, shape, device)
    matrix = left if is_compressed(left) else right
    old = parts(engine, matrix)
    if matrix.layout is torch.sparse_csc and matrix is left:
        # (`_sparse_csr_mm` begins with it, where nothing is added.)
        out = _placed(engine, shape, matrix.dtype, device) if len(args) > 2 else None
        matrix = left = flipped(engine, matrix, device)
        old = parts(engine, matrix)
    else:
        out = None
    if matrix.layout is torch.sparse_bsr and matrix is left and right.dim() == 2:
        return _product_of_blocks(engine, matrix, shape, device, adds=len(args) > 2)
    if matrix.layout in IN_BLOCKS:
        # cuSPARSE has the indices in 32 bits.
        held = [_32_BITS * old.compressed.numel(), _32_BITS * old.plain.numel()]
    elif matrix.layout is torch.sparse_csr and matrix is left:
        # (`_sparse_csr_mm` of ``SparseCsrTensorMath.cpp`` adds a product to zeros.)
        zeros = _placed(engine, shape, matrix.dtype, device) if len(args) < 3 and right.dim() == 2 else None
        out = _placed(engine, shape, matrix.dtype, device) if out is None else out
        columns = right.shape[1] if right.dim() > 1 else 1
        with cusparse.held(engine, device, cusparse.by_rows(shape[0], old.elements, columns, matrix.dtype)):
            del zeros
        return out
    elif matrix.layout is torch.sparse_csc and matrix is right:
        held = []
    else:
        # The matrix by rows, as cuSPARSE has it on the left.
        lines = matrix.shape[-2] if matrix is left else matrix.shape[-1]
        held = [8 * (lines + 1), 8 * old.elements, old.values.numel() * old.values.element_size()]
    out = _placed(engine, shape, matrix.dtype, device)
    with engine.scratch(device, *held):
        return out


def _product_of_two(engine: Engine, left: Any, right: Any, shape: Any, device: int) -> Any:
    """By rows; what is by columns becomes that first, the right one before the left (`_sparse_csr_mm`)."""
    if {left.layout, right.layout} <= {torch.sparse_csr, torch.sparse_csc}:
        products = products_of(_in_each(engine, left, True), _in_each(engine, right, False))
        if right.layout is torch.sparse_csc:
            right = flipped(engine, right, device)
        if left.layout is torch.sparse_csc:
            left = flipped(engine, left, device)
        return by_rows(engine, shape, parts(engine, left), parts(engine, right), products, left.dtype, device)
    count = engine.selected("product of sparse matrices", math.prod(shape[-2:]))
    return made(engine, shape, left.dtype, left.layout, count, device)


def _in_each(engine: Engine, matrix: Any, columns: bool) -> Any:
    """How many elements each column (row) has, on the host; None where that is not known."""
    old, lines = parts(engine, matrix), matrix.shape[1 if columns else 0]
    if columns == (matrix.layout is torch.sparse_csc):
        begins = values.exact(old.compressed)
        return None if begins is None else begins.diff()
    places = values.exact(old.plain)
    return None if places is None else torch.bincount(places, minlength=lines)


# Those whose blocks are multiplied with their rows in one batch (`_compressed_row_strided_addmm_out` in ``SparseBlasImpl.cpp``).
_AT_ONCE = (torch.float32, *HALF)


def _product_of_blocks(engine: Engine, matrix: Any, shape: tuple[int, ...], device: int, adds: bool) -> Any:
    """With a dense matrix: `block_sparse_mm` in ``SparseBlasImpl.cpp`` (ATen/native/sparse/cuda), as an H100 was asked with 2.11.

    Each block has its rows of the other matrix gathered, and its product added where it belongs; half precision is added up in
    float32, of which there are copies then. Wider types are cuSPARSE's: a result by columns, and indices of 32 bits.
    """
    dtype, old, columns = matrix.dtype, parts(engine, matrix), shape[1]
    zeros = None if adds else _placed(engine, shape, dtype, device)
    out = _placed(engine, shape, dtype, device)
    if dtype not in _AT_ONCE:
        with engine.scratch(device, out.nbytes, _32_BITS * old.compressed.numel(), _32_BITS * old.plain.numel()):
            del zeros
            return out
    high, wide = old.values.shape[-2:]
    gathered, multiplied = old.elements * wide * columns, old.elements * high * columns
    item, sums = dtype.itemsize, accumulator(dtype).itemsize
    listed = old.elements * high * _INDEX
    if item == sums:
        with engine.scratch(device, gathered * item, multiplied * item, listed):
            del zeros
            return out
    factors = old.values.numel() * sums
    with engine.scratch(device, gathered * item):
        with engine.scratch(device, factors, gathered * sums):
            products = _placed(engine, (multiplied,), accumulator(dtype), device)
        with engine.scratch(device, listed, out.numel() * sums):
            pass
        del products
        engine.table.drain()
    del zeros
    return out


@_compressed(_aten.triangular_solve.default)
def _solved(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """By cuSPARSE; the matrix is not copied (`triangular_solve_out_sparse_csr`)."""
    refuse_mixed_devices(func, args, kwargs)
    right, matrix = args[:2]
    if not is_compressed(matrix) or is_compressed(right):
        raise cannot_run(func, "for a sparse right side")
    out = _placed(engine, tuple(right.shape), right.dtype, device)
    with cusparse.held(engine, device, cusparse.by_solving(matrix.shape[0], out.nbytes)):
        return out, _placed(engine, (0,), right.dtype, device)
