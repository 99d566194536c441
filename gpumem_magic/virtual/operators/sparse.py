"""Sparse tensors (coordinate format) on a virtual device: how many elements there are, and what CUDA's kernels keep and take.

Fake tensors have rules for dense tensors, and lose a sparse tensor's elements on the way through them. So every operator with a
sparse argument comes here; one that has no rule says so. Numbers of elements are exact where they do not depend on values, and
the largest possible otherwise. After `SparseCUDATensorMath.cu`, `SparseCUDATensor.cpp` and `SparseTensor.cpp` of PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine.calls import sparse_of
from gpumem_magic.virtual.engine.engine import SPARSE, Engine, special
from gpumem_magic.virtual.engine.mismatch import refuse_mixed_devices
from gpumem_magic.virtual.operators import cusparse
from gpumem_magic.virtual.operators.cub import cub_of
from gpumem_magic.virtual.operators.data_dependent import _blank, _placed
from gpumem_magic.virtual.operators.gradients_that_meet import may_be_stolen
from gpumem_magic.virtual.operators.shapes import empty_like

_INDEX_BYTES = 8


class Parts(NamedTuple):
    """A sparse tensor's two tensors, and how many of its dimensions are sparse."""

    indices: Any
    values: Any

    @property
    def dims(self) -> int:
        return int(self.indices.shape[0])

    @property
    def elements(self) -> int:
        return int(self.indices.shape[1])


_sparse = partial(special, table=SPARSE)


def parts(engine: Engine, tensor: Any) -> Parts:
    found = engine._strided_parts(tensor)
    engine.settle(found, allocates=False)
    return Parts(*found)


def is_sparse(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.layout is torch.sparse_coo


def join(indices: Any, values: Any, shape: Any, coalesced: bool) -> Any:
    return sparse_of((indices, values), shape, torch.sparse_coo)._coalesced_(coalesced)


def _made(
    engine: Engine, like: Any, shape: Any, count: int, device: int, *, dims: int | None = None, sure: bool = True
) -> Any:
    """A sparse tensor with memory of its own: `count` elements in the first `dims` dimensions."""
    old = parts(engine, like)
    dims = old.dims if dims is None else dims
    indices = _placed(engine, (dims, count), torch.int64, device)
    values = _placed(engine, (count, *tuple(shape)[dims:]), like.dtype, device)
    return join(indices, values, shape, sure)


def _places(shape: Any, dims: int) -> int:
    return math.prod(tuple(shape)[:dims])


# ---- what passes: questions, and the parts themselves


@_sparse(
    *overloads("""
    _indices _values _nnz is_coalesced _coalesced_ sparse_dim dense_dim _dimI _dimV detach alias is_same_size sym_size sym_numel
    sym_stride sym_storage_offset _sparse_coo_tensor_with_dims_and_tensors zeros_like empty_like zero_ sparse_resize_
    sparse_resize_and_clear_ resize_as_sparse_
""")
)
def _passes(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    return engine.run(func, args, kwargs, device)


@_sparse(_aten.indices.default, _aten.values.default)
def _parts_of_a_coalesced(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    if not args[0].is_coalesced():
        name = func._schema.name.removeprefix("aten::")
        raise RuntimeError(f"Cannot get {name} on an uncoalesced tensor, please call .coalesce() first")
    return engine.run(func, args, kwargs, device)


def _check_pair(func: Any, args: Any, kwargs: Any) -> None:
    """Both on one device, and of the same shape unless one is a number."""
    refuse_mixed_devices(func, args, kwargs)
    left, right = args[:2]
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor) and left.dim() and right.dim():
        try:
            torch.broadcast_shapes(left.shape, right.shape)
        except RuntimeError:
            raise RuntimeError(f"the sizes of {tuple(left.shape)} and {tuple(right.shape)} must match") from None


# ---- the same places, other values


def _same_places(*, indices: bool, coalesced: bool | None = None) -> Callable[..., Any]:
    """A handler for operators that keep the places. indices: whether the kernel copies those too."""

    def handler(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
        source = args[0]
        old = parts(engine, source)
        values = func(old.values, *args[1:], **kwargs)
        places = empty_like(engine, old.indices, device) if indices else old.indices
        return join(places, values, source.shape, source.is_coalesced() if coalesced is None else coalesced)

    return handler


_sparse(
    *overloads("""
    neg abs sqrt sin sinh tan tanh asin atan expm1 log1p sgn sign relu isnan isinf floor ceil round trunc erf rad2deg deg2rad
    pow.Tensor_Scalar _conj_physical
""")
)(_same_places(indices=True))
_scaled = _same_places(indices=False)


@_sparse(*overloads("clone _sparse_softmax _sparse_log_softmax"))
def _clone(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """The values first: C++ copies both in one call, whose last argument is made first (`copy_into_sparse`)."""
    old = parts(engine, args[0])
    stolen = func is _aten.clone.default and may_be_stolen(args)
    if stolen and old.indices.is_contiguous() and old.values.is_contiguous():
        return join(old.indices, old.values, args[0].shape, args[0].is_coalesced())
    values = empty_like(engine, old.values, device)
    return join(empty_like(engine, old.indices, device), values, args[0].shape, args[0].is_coalesced())


@_sparse(_aten._to_copy.default)
def _to_copy(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    source = args[0]
    old = parts(engine, source)
    target = kwargs.get("device")
    indices, values = old.indices.to(target, copy=True), old.values.to(target, kwargs.get("dtype"), copy=True)
    return join(indices, values, source.shape, source.is_coalesced())


@_sparse(_aten.mul.Tensor, _aten.mul.Scalar, _aten.div.Tensor, _aten.div.Scalar)
def _multiply(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    _check_pair(func, args, kwargs)
    left, right = args[:2]
    if not is_sparse(left):
        left, right = right, left
    if is_sparse(right):
        # Places that both have: at most as many as the smaller has.
        count = engine.selected(
            "product of sparse tensors", min(parts(engine, left).elements, parts(engine, right).elements)
        )
        return _made(engine, left, left.shape, count, device)
    if isinstance(right, torch.Tensor) and right.dim():
        old = parts(engine, left)
        return join(old.indices, empty_like(engine, old.values, device), left.shape, left.is_coalesced())
    return _scaled(engine, func, (left, right), kwargs, device)


@_sparse(_aten.add.Tensor, _aten.sub.Tensor)
def _add(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """CUDA puts the lists one behind the other; they are summed up when that makes more of them than there are places."""
    _check_pair(func, args, kwargs)
    left, right = args[:2]
    _refuse_dense(left, right)
    if not (is_sparse(left) and is_sparse(right)):
        return empty_like(engine, right if is_sparse(left) else left, device)
    count = parts(engine, left).elements + parts(engine, right).elements
    made = _made(engine, left, left.shape, count, device, sure=False)
    return _aten._coalesce.default(made) if count > left.numel() else made


def _refuse_dense(left: Any, right: Any) -> None:
    """(`add_out_sparse_cuda` in ``SparseCUDATensorMath.cu``.)"""
    if is_sparse(left) and not is_sparse(right):
        raise RuntimeError("add(sparse, dense) is not supported. Use add(dense, sparse) instead.")


@_sparse(_aten.add_.Tensor)
def _add_into(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """A gradient that comes on top of another (`zero_grad(set_to_none=False)`, or several backward passes)."""
    target, other = args[:2]
    _refuse_dense(target, other)
    if is_sparse(target):
        count = parts(engine, target).elements + parts(engine, other).elements
        old = parts(engine, target)
        indices = _blank(engine, (old.dims, count), torch.int64, device)
        values = _blank(engine, (count, *old.values.shape[1:]), target.dtype, device)
        made = engine.fake_call(
            _aten._sparse_coo_tensor_with_dims_and_tensors.default,
            (old.dims, old.values.dim() - 1, target.shape, indices, values),
            {"dtype": target.dtype, "layout": torch.sparse_coo, "device": target.device},
        )
        engine.fake_call(_aten.copy_sparse_to_sparse_.default, (target, made), {})
        engine.settle(target)
    return target


# ---- the same elements at other places


@_sparse(_aten.t.default, _aten.transpose.int)
def _turned(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """A clone, in which two lists of places change their places by way of a third (`sparse_transpose_` in
    ``TensorShape.cpp``)."""
    source = args[0]
    shape = func(torch.empty(source.shape, device="meta"), *args[1:], **kwargs).shape
    old = parts(engine, source)
    values = empty_like(engine, old.values, device)
    indices = empty_like(engine, old.indices, device)
    with engine.scratch(device, old.elements * _INDEX_BYTES):
        return join(indices, values, shape, False)


@_sparse(_aten.permute.default, _aten.unsqueeze.default)
def _rearranged(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    source = args[0]
    shape = func(torch.empty(source.shape, device="meta"), *args[1:], **kwargs).shape
    old = parts(engine, source)
    dims = old.dims + (len(shape) - source.dim())
    indices = _placed(engine, (dims, old.elements), torch.int64, device)
    return join(indices, empty_like(engine, old.values, device), shape, False)


@_sparse(_aten._coalesce.default)
def _coalesce(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """Elements are sorted by their places' numbers, and those of one place summed up (``SparseCUDATensor.cu``)."""
    source = args[0]
    old = parts(engine, source)
    if old.elements < 2:
        return source._coalesced_(True)
    count = min(engine.selected("coalesce", old.elements), _places(source.shape, old.dims))
    listed, cub = old.elements * _INDEX_BYTES, cub_of(engine, device)
    numbers = _placed(engine, (old.elements,), torch.int64, device)
    # Where each stood, and where each place begins.
    with engine.scratch(device, listed, listed):
        for size in (cub.merge_sort(old.elements, _INDEX_BYTES, _INDEX_BYTES), cub.unique_by_key(old.elements)):
            with engine.scratch(device, size):
                pass
        values = _placed(engine, (count, *old.values.shape[1:]), source.dtype, device)
        shape = (old.dims, count)
        indices = _placed(engine, shape, torch.int64, device) if old.dims > 1 else numbers.resize_(shape)
    del numbers
    engine.table.drain()
    return join(indices, values, source.shape, True)


@_sparse(_aten.cat.default)
def _cat(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    tensors, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    shape = list(tensors[0].shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    count = sum(parts(engine, tensor).elements for tensor in tensors)
    return _made(engine, tensors[0], shape, count, device, sure=False)


@_sparse(_aten.stack.default)
def _stack(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    tensors, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    return torch.cat([tensor.unsqueeze(dim) for tensor in tensors], dim)


@_sparse(_aten.select.int, _aten.index_select.default)
def _selected(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    source, dim, which = args[:3]
    shape = list(source.shape)
    old = parts(engine, source)
    dims = old.dims
    if func is _aten.select.int:
        del shape[dim]
        dims -= 1
    else:
        shape[dim] = which.numel()
    count = engine.selected("selection from a sparse tensor", old.elements)
    if not dims:
        return _placed(engine, tuple(shape), source.dtype, device)
    return _made(engine, source, shape, count, device, dims=dims)


@_sparse(_aten.sparse_mask.default, _aten._sparse_mask_projection.default)
def _mask(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    _check_pair(func, args, kwargs)
    source, mask = args[:2]
    old = parts(engine, mask)
    shape = tuple(old.values.shape)
    if is_sparse(source):
        values = _placed(engine, shape, source.dtype, device)
        return join(empty_like(engine, old.indices, device), values, mask.shape, mask.is_coalesced())
    # A dense one is multiplied by ones at those places: the one, what stands there, and the product (`sparse_mask` in
    # ``SparseTensor.cpp``).
    item = source.element_size()
    with engine.scratch(device, item, math.prod(shape) * item):
        places = empty_like(engine, old.indices, device)
        values = _placed(engine, shape, source.dtype, device)
    return join(places, values, mask.shape, mask.is_coalesced())


# ---- dense results


def _dense(engine: Engine, shape: Any, dtype: torch.dtype, device: int) -> Any:
    return _placed(engine, tuple(shape), dtype, device)


@_sparse(_aten._to_dense.default, _aten.to_dense.default)
def _to_dense(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    dtype = args[1] if len(args) > 1 else kwargs.get("dtype")
    return _dense(engine, args[0].shape, dtype or args[0].dtype, device)


@_sparse(*overloads("mm mv bmm _sparse_mm _sparse_sparse_matmul addmm _sparse_addmm"))
def _product(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    refuse_mixed_devices(func, args, kwargs)
    left, right = args[-2:] if len(args) < 4 else args[1:3]
    if left.shape[-1] != right.shape[-2 if right.dim() > 1 else 0]:
        raise RuntimeError(
            f"mat1 and mat2 shapes cannot be multiplied ({'x'.join(map(str, left.shape))} and {'x'.join(map(str, right.shape))})"
        )
    shape = (*left.shape[:-1], *right.shape[-1:]) if right.dim() > 1 else tuple(left.shape[:-1])
    if is_sparse(left) and is_sparse(right):
        return _made(engine, left, shape, engine.selected("product of sparse matrices", math.prod(shape)), device)
    if is_sparse(left) and left.dim() == right.dim() == 2:
        return _product_with_dense(engine, left, shape, device, adds=len(args) > 2)
    sparse = left if is_sparse(left) else right
    # cuSPARSE takes rows in compressed form, with numbers of 32 bits.
    listed = 4 * (sparse.shape[-2] + 1 + parts(engine, sparse).elements)
    with engine.scratch(device, listed):
        return _dense(engine, shape, sparse.dtype, device)


def hold_for_cusparse(engine: Engine, device: int, size: int) -> None:
    if cusparse.is_known(engine.memory.capability(device), engine.memory.torch_version(device)):
        with engine.scratch(device, size):
            pass


def _product_with_dense(engine: Engine, left: Any, shape: tuple[int, ...], device: int, adds: bool) -> Any:
    """``s_addmm_out_sparse_dense_cuda`` of SparseCUDATensorMath.cu, as a real H100 was asked for with 2.11.

    Its elements are sorted first where they are not.
    """
    added = None if adds else _dense(engine, shape, left.dtype, device)
    result = _dense(engine, shape, left.dtype, device)
    ordered = left if left.is_coalesced() else _coalesce(engine, _aten._coalesce.default, (left,), {}, device)
    elements = parts(engine, ordered).elements
    # Rows in compressed form, from numbers of 32 bits; columns likewise; and the result by columns.
    with engine.scratch(device, 4 * (left.shape[0] + 1)):
        with engine.scratch(device, 4 * elements):
            pass
        with engine.scratch(device, 4 * elements, result.nbytes):
            columns = shape[1] if len(shape) > 1 else 1
            hold_for_cusparse(engine, device, cusparse.by_coordinates(elements, columns, left.dtype))
    del ordered
    engine.table.drain()
    del added
    engine.table.drain()
    return result


@_sparse(_aten._sparse_sum.default, _aten.sum.default, _aten.norm.Scalar, _aten.any.default, _aten.norm.ScalarOpt_dim)
def _to_one(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    return _dense(engine, (), torch.bool if func is _aten.any.default else args[0].dtype, device)


@_sparse(_aten._sparse_sum.dim)
def _sum_of_dims(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    source, dims = args[0], {dim % args[0].dim() for dim in args[1]}
    old = parts(engine, source)
    shape = [size for dim, size in enumerate(source.shape) if dim not in dims]
    left = sum(dim not in dims for dim in range(old.dims))
    if not left:
        return _dense(engine, shape, source.dtype, device)
    count = min(engine.selected("sum of a sparse tensor", old.elements), _places(shape, left))
    return _made(engine, source, shape, count, device, dims=left)
