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
from gpumem_magic.virtual.engine.calls import sparse_of
from gpumem_magic.virtual.engine.engine import COMPRESSED, Engine, special
from gpumem_magic.virtual.engine.mismatch import refuse_mixed_devices
from gpumem_magic.virtual.operators import cusparse
from gpumem_magic.virtual.operators.compressed_parts import IN_BLOCKS, is_compressed, made, parts
from gpumem_magic.virtual.operators.compressing import flipped
from gpumem_magic.virtual.operators.data_dependent import _placed
from gpumem_magic.virtual.operators.shapes import empty_like
from gpumem_magic.virtual.operators.sparse import hold_for_cusparse

_32_BITS = 4

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
    *overloads("""
    neg abs sqrt sin sinh tan tanh asin atan expm1 log1p sgn sign relu isnan isinf floor ceil round trunc erf rad2deg deg2rad
    pow.Tensor_Scalar mul.Scalar div.Scalar empty_like clone _conj_physical
""")
)
def _same_places(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    kwargs = {name: value for name, value in kwargs.items() if name != "layout"}
    return _like(engine, args[0], func(parts(engine, args[0]).values, *args[1:], **kwargs), device)


@_compressed(_aten.zeros_like.default)
def _zeros(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """Without an element."""
    source = args[0]
    block = parts(engine, source).values.shape[source.dim() - 1 :]
    return made(engine, source.shape, kwargs.get("dtype") or source.dtype, source.layout, 0, device, block)


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
        # Places that both have: at most as many as the smaller has.
        count = engine.selected("product of sparse tensors", min(old.elements, parts(engine, right).elements))
        return made(engine, left.shape, left.dtype, left.layout, count, device, old.values.shape[left.dim() - 1 :])
    if isinstance(right, torch.Tensor) and right.dim():
        return _like(engine, left, empty_like(engine, old.values, device), device)
    return _like(engine, left, func(old.values, right), device)


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
    hold_for_cusparse(engine, device, 1)
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
        count = engine.selected("product of sparse matrices", math.prod(shape[-2:]))
        return made(engine, shape, left.dtype, left.layout, count, device)
    matrix = left if is_compressed(left) else right
    old = parts(engine, matrix)
    if matrix.layout is torch.sparse_csc and matrix is left:
        matrix = left = flipped(engine, matrix, device)
        old = parts(engine, matrix)
    if matrix.layout in IN_BLOCKS:
        # `block_sparse_mm` has the indices in 32 bits.
        held = [_32_BITS * old.compressed.numel(), _32_BITS * old.plain.numel()]
    elif matrix.layout is torch.sparse_csr and matrix is left:
        # (`_sparse_csr_mm` of ``SparseCsrTensorMath.cpp`` adds a product to zeros.)
        zeros = _placed(engine, shape, matrix.dtype, device) if len(args) < 3 and right.dim() == 2 else None
        out = _placed(engine, shape, matrix.dtype, device)
        columns = right.shape[1] if right.dim() > 1 else 1
        hold_for_cusparse(engine, device, cusparse.by_rows(shape[0], old.elements, columns, matrix.dtype))
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
