"""Sparse tensors in compressed form (CSR, CSC, and in blocks) on a virtual device: three tensors each, and what operators make.

As with those in coordinate form (`sparse`), every operator with such an argument comes here, and one without a rule says so.
After `SparseCsrTensor.cpp`, `SparseCsrTensorMath.cpp`, `TensorConversions.cpp` and `SparseBlasImpl.cpp` of PyTorch. What cuSPARSE
asks for while it multiplies, and what a change of form takes meanwhile, is not known and not counted.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine import values
from gpumem_magic.virtual.engine.calls import sparse_of
from gpumem_magic.virtual.engine.engine import COMPRESSED, SPARSE, Engine, special
from gpumem_magic.virtual.engine.mismatch import refuse_mixed_devices
from gpumem_magic.virtual.operators import cusparse
from gpumem_magic.virtual.operators.data_dependent import _placed
from gpumem_magic.virtual.operators.sparse import hold_for_cusparse
from gpumem_magic.virtual.operators.sparse import join as join_coordinates
from gpumem_magic.virtual.operators.sparse import parts as coordinates

_BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_IN_BLOCKS = (torch.sparse_bsr, torch.sparse_bsc)
_32_BITS = 4

_compressed = partial(special, table=COMPRESSED)


class CompressedParts(NamedTuple):
    """Where each row (or column) begins, where its elements stand in it, and these."""

    compressed: Any
    plain: Any
    values: Any

    @property
    def elements(self) -> int:
        return int(self.plain.shape[-1])


def parts(engine: Engine, tensor: Any) -> CompressedParts:
    found = engine._strided_parts(tensor)
    engine.settle(found, allocates=False)
    return CompressedParts(*found)


def is_compressed(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.layout not in (torch.strided, torch.sparse_coo)


def _copy(engine: Engine, tensor: Any, device: int) -> Any:
    return engine.run(_aten.empty_like.default, (tensor,), {}, device)


def _made(
    engine: Engine, shape: Any, dtype: torch.dtype, layout: torch.layout, count: int, device: int, block: Any = ()
) -> Any:
    """One with memory of its own: `count` elements (blocks) in matrices of this shape, all batches alike."""
    *batches, rows, columns = shape
    by = block or (1, 1)
    lines = rows // by[0] if layout in _BY_ROWS else columns // by[1]
    sizes = ((*batches, lines + 1), torch.int64), ((*batches, count), torch.int64), ((*batches, count, *block), dtype)
    return sparse_of([_placed(engine, *size, device) for size in sizes], shape, layout)


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
    """With other values in the same places, which PyTorch copies."""
    old = parts(engine, source)
    places = _copy(engine, old.compressed, device), _copy(engine, old.plain, device)
    return sparse_of((*places, elements), source.shape, source.layout)


@_compressed(
    *overloads("""
    neg abs sqrt sin sinh tan tanh asin atan expm1 log1p sgn sign relu isnan isinf floor ceil round trunc erf rad2deg deg2rad
    pow.Tensor_Scalar mul.Scalar div.Scalar empty_like clone
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
    return _made(engine, source.shape, kwargs.get("dtype") or source.dtype, source.layout, 0, device, block)


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
        return _made(engine, left.shape, left.dtype, left.layout, count, device, old.values.shape[left.dim() - 1 :])
    if isinstance(right, torch.Tensor) and right.dim():
        return _like(engine, left, _copy(engine, old.values, device), device)
    return _like(engine, left, func(old.values, right), device)


@_compressed(_aten.add.Tensor, _aten.sub.Tensor)
def _add(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    refuse_mixed_devices(func, args, kwargs)
    left, right = args[:2]
    if not (is_compressed(left) and is_compressed(right)):
        return _copy(engine, right if is_compressed(left) else left, device)
    most = parts(engine, left).elements + parts(engine, right).elements
    count = engine.selected("sum of sparse tensors", min(most, math.prod(left.shape[-2:])))
    return _made(engine, left.shape, left.dtype, left.layout, count, device)


@_compressed(_aten.sparse_mask.default, _aten.sparse_sampled_addmm.default)
def _mask(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    refuse_mixed_devices(func, args, kwargs)
    mask = args[1] if func is _aten.sparse_mask.default else args[0]
    old = parts(engine, mask)
    return _like(engine, mask, _placed(engine, tuple(old.values.shape), args[0].dtype, device), device)


# ---- other forms


def _form_of(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The layout that is asked for, and the size of a block where it has some."""
    name = func._schema.name.removeprefix("aten::_to_")
    layout = kwargs.get("layout") or (torch.sparse_coo if name == "sparse" else getattr(torch, name))
    return layout, tuple(kwargs.get("blocksize") or (args[1] if layout in _IN_BLOCKS and len(args) > 1 else ()))


_COMPRESSING = overloads("_to_sparse_csr _to_sparse_csc _to_sparse_bsr _to_sparse_bsc")


@special(*_COMPRESSING)
def _from_dense(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    source, (layout, block) = args[0], _form_of(func, args, kwargs)
    return _elements_of(engine, source, values.exact(source), layout, block, device)


def _elements_of(engine: Engine, source: Any, host: Any, layout: torch.layout, block: Any, device: int) -> Any:
    """What is there in a matrix. host: its values, where they are known."""
    *batches, rows, columns = source.shape
    by = block or (1, 1)
    if host is None:
        count = engine.selected("to_sparse", rows * columns // math.prod(by))
    else:
        there = host.ne(0).reshape(-1, rows // by[0], by[0], columns // by[1], by[1]).any(-1).any(2)
        count = int(there.sum()) // max(1, math.prod(batches))
    return _made(engine, source.shape, source.dtype, layout, count, device, block)


def _by_way_of_dense(engine: Engine, source: Any, layout: torch.layout, block: Any, device: int) -> Any:
    with engine.scratch(device, source.numel() * source.element_size()):
        return _elements_of(engine, source, None, layout, block, device)


@special(*_COMPRESSING, table=SPARSE)
def _from_coordinates(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    source, (layout, block) = args[0], _form_of(func, args, kwargs)
    if block:
        return _by_way_of_dense(engine, source, layout, block, device)
    summed = source if source.is_coalesced() else _aten._coalesce.default(source)
    count = coordinates(engine, summed).elements
    return _made(engine, source.shape, source.dtype, layout, count, device)


@_compressed(*_COMPRESSING, _aten._to_sparse.default, _aten._to_sparse.sparse_dim)
def _to_other_form(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    source, (layout, block) = args[0], _form_of(func, args, kwargs)
    old = parts(engine, source)
    if layout is source.layout:
        return _like(engine, source, _copy(engine, old.values, device), device)
    if source.layout in _IN_BLOCKS and layout in _IN_BLOCKS:
        block = block or tuple(old.values.shape[-2:])
    elif source.layout in _IN_BLOCKS or block:
        return _by_way_of_dense(engine, source, layout, block, device)
    if layout is torch.sparse_coo:
        indices = _placed(engine, (source.dim(), old.elements), torch.int64, device)
        return join_coordinates(indices, _copy(engine, old.values, device), source.shape, True)
    return _made(engine, source.shape, source.dtype, layout, old.elements, device, block)


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
        return _made(engine, shape, left.dtype, left.layout, count, device)
    matrix = left if is_compressed(left) else right
    old = parts(engine, matrix)
    if matrix.layout in _IN_BLOCKS:
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
