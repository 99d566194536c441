"""Sparse tensors (coordinate format) on a virtual device: how many elements there are, and what CUDA's kernels keep and take.

Fake tensors have rules for dense tensors, and lose a sparse tensor's elements on the way through them. So every operator with a
sparse argument comes here; one that has no rule says so. Numbers of elements are exact where they do not depend on values, and
the largest possible otherwise. After `SparseCUDATensorMath.cu`, `SparseCUDATensor.cpp` and `SparseTensor.cpp` of PyTorch.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine.calls import bytes_of, sparse_of
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.mismatch import refuse_mixed_devices
from gpumem_magic.virtual.engine.modes import pushed
from gpumem_magic.virtual.engine.rules import SPARSE, special
from gpumem_magic.virtual.operators import cusparse
from gpumem_magic.virtual.operators.cub import cub_of
from gpumem_magic.virtual.operators.data_dependent import _blank, _placed, found_among
from gpumem_magic.virtual.operators.gradients_that_meet import may_be_stolen
from gpumem_magic.virtual.operators.shapes import empty_like
from gpumem_magic.virtual.operators.sparse_products import by_coordinates

_INDEX_BYTES = 8
# What is done to the elements alone in each sparse form (``SparseUnaryOps.cpp``, ``SparseCsrTensorMath.cpp``), and asked of them.
OF_EACH_ELEMENT = (
    "abs sqrt sin sinh tan tanh asin asinh atan atanh expm1 log1p sgn sign relu floor ceil round trunc frac erf erfinv rad2deg"
    " deg2rad"
)
ASKED_OF_EACH = "isnan isinf isposinf isneginf signbit"
_LINEAR = {*overloads("neg _conj_physical")}
_NEW_PRODUCT = {_aten.mul_.Tensor: _aten.mul.Tensor, _aten.mul_.Scalar: _aten.mul.Scalar}


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
    sparse_resize_and_clear_ resize_as_sparse_ _has_compatible_shallow_copy_type
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


@_sparse(*overloads(f"{OF_EACH_ELEMENT} {ASKED_OF_EACH} nan_to_num neg _conj_physical"))
def _each(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """Of what is there once; only what is linear is done to parts of sums (`coalesced_unary_ufunc` in
    ``SparseUnaryOps.cpp``)."""
    source = args[0] if func in _LINEAR else coalesced(engine, args[0], device)
    old = parts(engine, source)
    values = func(old.values, *args[1:], **kwargs)
    return join(empty_like(engine, old.indices, device), values, source.shape, source.is_coalesced())


@_sparse(*overloads(" ".join(f"{name}_" for name in (*OF_EACH_ELEMENT.split(), "nan_to_num"))))
def _each_in_place(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    if not args[0].is_coalesced():
        raise RuntimeError(f"{func._schema.name.removeprefix('aten::')} requires coalesced input")
    return args[0]


@_sparse(_aten.pow.Tensor_Scalar)
def _by_a_number(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """The places first (`pow_out_sparse_scalar`, `div_out_sparse_zerodim`)."""
    old = parts(engine, args[0])
    places = empty_like(engine, old.indices, device)
    return join(places, func(old.values, *args[1:], **kwargs), args[0].shape, args[0].is_coalesced())


@_sparse(_aten.clone.default)
def _clone(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """The values first: C++ copies both in one call, whose last argument is made first (`copy_into_sparse`)."""
    old = parts(engine, args[0])
    if may_be_stolen(args) and old.indices.is_contiguous() and old.values.is_contiguous():
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


@_sparse(_aten.copy_.default)
def _copied_into(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """Copies take the place of what was there, the values first (`copy_sparse_`)."""
    target, source = args[:2]
    if target is not source:
        old = parts(engine, source)
        values = old.values.to(target.device, target.dtype, copy=True)
        target.data = join(old.indices.to(target.device, copy=True), values, source.shape, source.is_coalesced())
    return target


@_sparse(*overloads("neg_ div_.Tensor div_.Scalar"))
def _in_place(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """The values alone."""
    _check_pair(func, (*args, None)[:2], kwargs)
    return args[0]


@_sparse(_aten.mul_.Tensor, _aten.mul_.Scalar)
def _multiply_into(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """Of places and values of its own, which take the place of the old ones."""
    target = args[0]
    made = _multiply(engine, _NEW_PRODUCT[func], args, kwargs, device)
    if made.dtype != target.dtype:
        old = parts(engine, made)
        made = join(old.indices, old.values.to(target.dtype), made.shape, made.is_coalesced())
    target.data = made
    return target


@_sparse(_aten.mul.Tensor, _aten.mul.Scalar, _aten.div.Tensor, _aten.div.Scalar)
def _multiply(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    _check_pair(func, args, kwargs)
    left, right = args[:2]
    if not is_sparse(left):
        left, right = right, left
    if is_sparse(right):
        return _product_of_places(engine, left, right, device)
    old = parts(engine, left)
    if isinstance(right, torch.Tensor) and right.dim():
        # What the other has at these places (`_mul_dense_sparse_out`).
        with engine.scratch(device, bytes_of(old.values)):
            places = empty_like(engine, old.indices, device)
            return join(places, empty_like(engine, old.values, device), left.shape, left.is_coalesced())
    return _by_a_number(engine, func, (left, right), kwargs, device)


def _product_of_places(engine: Engine, left: Any, right: Any, device: int) -> Any:
    """Each place of one tensor is looked for among the other's, and stays in the result in any case.

    ``SparseBinaryOpIntersectionCommon.h``: looked through is the one of which each place is there once, or the larger one.
    """
    common = torch.promote_types(left.dtype, right.dtype)
    if left.is_coalesced() != right.is_coalesced():
        among, source = (left, right) if left.is_coalesced() else (right, left)
    else:
        is_larger = parts(engine, left).elements >= parts(engine, right).elements
        among, source = (left, right) if is_larger else (right, left)
    old, listed = parts(engine, source), parts(engine, among).elements
    if not (old.elements and listed):
        return _made(engine, left, left.shape, 0, device)
    longest = max(old.elements, listed) * _INDEX_BYTES
    with engine.scratch(device, longest):
        numbers = _placed(engine, (listed,), torch.int64, device)
        order = None
        if not among.is_coalesced():
            with pushed(engine.mode):
                order = numbers.sort()
        with engine.scratch(device, 2 * old.elements * _INDEX_BYTES):
            with engine.scratch(device, _INDEX_BYTES):
                pass
            places = empty_like(engine, old.indices, device)
            others = (tensor for tensor in (left, right) if tensor.dtype != common)
            with engine.scratch(device, *(parts(engine, one).values.numel() * common.itemsize for one in others)):
                made = empty_like(engine, old.values, device, dtype=common)
        del order, numbers
        engine.table.drain()
    return join(places, made, left.shape, source.is_coalesced())


@_sparse(_aten.add.Tensor, _aten.sub.Tensor)
def _add(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    _check_pair(func, args, kwargs)
    left, right = args[:2]
    _refuse_dense(left, right)
    if not (is_sparse(left) and is_sparse(right)):
        return empty_like(engine, right if is_sparse(left) else left, device)
    return _summed(
        engine, left, right, _factor(func, args, kwargs), torch.promote_types(left.dtype, right.dtype), device
    )


@_sparse(_aten.add_.Tensor, _aten.sub_.Tensor)
def _add_into(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """A gradient that comes on top of another (`zero_grad(set_to_none=False)`, or several backward passes)."""
    _check_pair(func, args, kwargs)
    target, other = args[:2]
    _refuse_dense(target, other)
    if is_sparse(target):
        indices, values = parts(engine, target)
        target.data = _summed(engine, target, other, _factor(func, args, kwargs), target.dtype, device)
        # (Variables of C++'s function hold the old ones to its end.)
        del values
        engine.table.drain()
        del indices
        engine.table.drain()
    return target


def _factor(func: Any, args: Any, kwargs: Any) -> Any:
    factor = args[2] if len(args) > 2 else kwargs.get("alpha", 1)
    return -factor if "sub" in func._schema.name else factor


def _summed(engine: Engine, left: Any, right: Any, factor: Any, dtype: torch.dtype, device: int) -> Any:
    """CUDA puts the lists one behind the other, in the type that both have in common, and sums them up when that makes more of
    them than there are places, or when the result has another type (`add_out_sparse_cuda` in ``SparseCUDATensorMath.cu``)."""
    common = torch.promote_types(left.dtype, right.dtype)
    if not torch.can_cast(common, dtype):
        name = {tensor: str(tensor).removeprefix("torch.") for tensor in (common, dtype)}
        raise RuntimeError(f"Can't convert result type {name[common]} to output {name[dtype]}")
    ours, theirs = parts(engine, left), parts(engine, right)
    if not theirs.elements:
        values = empty_like(engine, ours.values, device, dtype=dtype)
        return join(empty_like(engine, ours.indices, device), values, left.shape, left.is_coalesced())
    if not ours.elements:
        places = empty_like(engine, theirs.indices, device)
        return join(places, empty_like(engine, theirs.values, device, dtype=dtype), left.shape, right.is_coalesced())
    count = ours.elements + theirs.elements
    with ExitStack() as held, ExitStack() as converted:
        for tensor, old in ((left, ours), (right, theirs)):
            if tensor.dtype != common:
                stack = converted if tensor is right and factor != 1 else held
                stack.enter_context(engine.scratch(device, old.values.numel() * common.itemsize))
        if factor != 1:
            held.enter_context(engine.scratch(device, theirs.values.numel() * common.itemsize))
            converted.close()
        indices = _placed(engine, (ours.dims, count), torch.int64, device)
        values = _placed(engine, (count, *ours.values.shape[1:]), common, device)
        made = join(indices, values, left.shape, False)
        del indices, values
        if dtype != common:
            made = _in_order(engine, made, device)
            ordered = parts(engine, made)
            made = join(ordered.indices, ordered.values.to(dtype), left.shape, False)
            del ordered
        if parts(engine, made).elements > left.numel():
            made = _in_order(engine, made, device)
        engine.table.drain()
    return made


def _refuse_dense(left: Any, right: Any) -> None:
    """(`add_out_sparse_cuda` in ``SparseCUDATensorMath.cu``.)"""
    if is_sparse(left) and not is_sparse(right):
        raise RuntimeError("add(sparse, dense) is not supported. Use add(dense, sparse) instead.")


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


@_sparse(_aten.permute.default)
def _rearranged(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    source = args[0]
    shape = func(torch.empty(source.shape, device="meta"), *args[1:], **kwargs).shape
    old = parts(engine, source)
    return join(empty_like(engine, old.indices, device), empty_like(engine, old.values, device), shape, False)


@_sparse(_aten.unsqueeze.default)
def _with_a_dimension(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """The values are the same memory; zeros are put among the places (`unsqueeze_sparse` in ``TensorShape.cpp``)."""
    source, dim = args
    dim %= source.dim() + 1
    shape = [*source.shape[:dim], 1, *source.shape[dim:]]
    old = parts(engine, source)
    if dim > old.dims:
        return join(old.indices, old.values.unsqueeze(dim - old.dims + 1), shape, source.is_coalesced())
    with engine.scratch(device, old.elements * _INDEX_BYTES):
        indices = _placed(engine, (old.dims + 1, old.elements), torch.int64, device)
    return join(indices, old.values, shape, source.is_coalesced())


@_sparse(_aten._coalesce.default)
def _coalesce(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    return _in_order(engine, args[0], device)


def _in_order(engine: Engine, source: Any, device: int, inside: bool = False) -> Any:
    """Elements are sorted by their places' numbers, and those of one place summed up (``SparseCUDATensor.cu``)."""
    old = parts(engine, source)
    if old.elements < 2:
        return source._coalesced_(True)
    count = min(engine.selected("coalesce", old.elements, inside=inside), _places(source.shape, old.dims))
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


@_sparse(_aten._sparse_broadcast_to.default)
def _spread(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """The values first; the new places are counted in one list, as long as the longest of them (`sparse_broadcast_to` in
    ``TensorShape.cpp``)."""
    source, shape = args
    old, more = parts(engine, source), len(args[1]) - source.dim()
    if more < 0:
        raise RuntimeError("input not broadcastable to size with smaller dimensionality")
    dims = more + old.dims
    before = [0] * more + [*source.shape]
    for dim in range(more, len(shape)):
        if before[dim] not in (1, shape[dim]):
            raise RuntimeError(
                f"The expanded size of the tensor ({shape[dim]}) must match the existing size ({before[dim]}) at "
                f"non-singleton dimension {dim - more}"
            )
    spread = [dim for dim in range(dims) if before[dim] != shape[dim]]
    kept = [dim for dim in range(dims) if before[dim] == shape[dim]]
    count = old.elements * math.prod(shape[dim] for dim in spread)
    values = _placed(engine, (count, *shape[dims:]), source.dtype, device)
    indices = _placed(engine, (dims, count), torch.int64, device)
    with engine.scratch(device, max((shape[dim] for dim in spread), default=0) * _INDEX_BYTES):
        is_in_order = not spread or not kept or max(kept) < min(spread)
        return join(indices, values, shape, source.is_coalesced() and is_in_order)


def coalesced(engine: Engine, tensor: Any, device: int, inside: bool = False) -> Any:
    """The tensor, or another with its elements in order. inside: see `Engine.selected`."""
    return tensor if tensor.is_coalesced() else _in_order(engine, tensor, device, inside)


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


def _flags(engine: Engine, shape: tuple[int, ...], device: int) -> Any:
    return _blank(engine, shape, torch.bool, device)


@_sparse(_aten.select.int)
def _selected(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """The places in one row are looked for, and so are the dimensions that are left (`select_sparse` in ``TensorShape.cpp``)."""
    source, dim, which = args
    dim %= source.dim()
    old = parts(engine, source)
    shape = [size for place, size in enumerate(source.shape) if place != dim]
    if dim >= old.dims:
        values = empty_like(engine, old.values.select(dim - old.dims + 1, which), device)
        return join(old.indices, values, shape, source.is_coalesced()) if old.dims else values
    count, left = engine.selected("selection from a sparse tensor", old.elements), old.dims - 1
    if not left:
        return _placed(engine, tuple(shape), source.dtype, device)
    with engine.scratch(device, old.elements):
        places = found_among(engine, device, _flags(engine, (old.elements,), device), count)
    values = _placed(engine, (count, *old.values.shape[1:]), source.dtype, device)
    with engine.scratch(device, old.dims * _INDEX_BYTES, old.dims):
        dims = found_among(engine, device, _flags(engine, (old.dims,), device), left)
    with engine.scratch(device, old.dims * count * _INDEX_BYTES):
        indices = _placed(engine, (left, count), torch.int64, device)
    del dims
    engine.table.drain()
    del places
    engine.table.drain()
    return join(indices, values, shape, source.is_coalesced())


@_sparse(_aten.narrow_copy.default)
def _narrowed(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """The elements between two places, which are looked for twice: with their places, and with their values
    (`narrow_copy_sparse` in ``TensorShape.cpp``)."""
    source, dim, _, length = args
    dim %= source.dim()
    old = parts(engine, source)
    shape = list(source.shape)
    shape[dim] = length
    if dim >= old.dims:
        values = empty_like(engine, old.values.narrow(dim - old.dims + 1, 0, length), device)
        return join(old.indices, values, shape, source.is_coalesced())
    count = engine.selected("selection from a sparse tensor", old.elements)
    with engine.scratch(device, old.elements, old.elements):
        mask = _placed(engine, (old.elements,), torch.bool, device)
    with engine.scratch(device, old.dims * old.elements):
        chosen = found_among(engine, device, _flags(engine, (old.dims, old.elements), device), old.dims * count)
    indices = _placed(engine, (old.dims, count), torch.int64, device)
    del chosen
    engine.table.drain()
    places = found_among(engine, device, mask, count)
    values = _placed(engine, (count, *old.values.shape[1:]), source.dtype, device)
    del places
    engine.table.drain()
    del mask
    engine.table.drain()
    return join(indices, values, shape, source.is_coalesced())


@_sparse(_aten.index_select.default)
def _chosen(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    source, dim, which = args[:3]
    shape = list(source.shape)
    shape[dim] = which.numel()
    count = engine.selected("selection from a sparse tensor", parts(engine, source).elements)
    return _made(engine, source, shape, count, device)


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
        made = by_coordinates(engine, shape, parts(engine, left), parts(engine, right), left.shape[1], device)
        return join(*made, shape, True)
    if is_sparse(left) and left.dim() == 2 and right.dim() < 3:
        return _product_with_dense(engine, left, shape, device, adds=len(args) > 2)
    sparse = left if is_sparse(left) else right
    # cuSPARSE takes rows in compressed form, with numbers of 32 bits.
    listed = 4 * (sparse.shape[-2] + 1 + parts(engine, sparse).elements)
    with engine.scratch(device, listed):
        return _dense(engine, shape, sparse.dtype, device)


def _product_with_dense(engine: Engine, left: Any, shape: tuple[int, ...], device: int, adds: bool) -> Any:
    """``s_addmm_out_sparse_dense_cuda`` of SparseCUDATensorMath.cu, as a real H100 was asked for with 2.11.

    Its elements are sorted first where they are not.
    """
    added = None if adds else _dense(engine, shape, left.dtype, device)
    result = _dense(engine, shape, left.dtype, device)
    ordered = coalesced(engine, left, device, inside=True)
    elements = parts(engine, ordered).elements
    # Rows in compressed form, from numbers of 32 bits; columns likewise; and the result by columns.
    with engine.scratch(device, 4 * (left.shape[0] + 1)):
        with engine.scratch(device, 4 * elements):
            pass
        with engine.scratch(device, 4 * elements, result.nbytes):
            columns = shape[1] if len(shape) > 1 else 1
            with cusparse.held(engine, device, cusparse.by_coordinates(elements, columns, left.dtype)):
                pass
    del ordered
    engine.table.drain()
    del added
    engine.table.drain()
    return result


@_sparse(_aten._sparse_sum.default, _aten.sum.default, _aten.norm.Scalar, _aten.any.default, _aten.norm.ScalarOpt_dim)
def _to_one(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    return _dense(engine, (), torch.bool if func is _aten.any.default else args[0].dtype, device)


@_sparse(_aten.sum.dim_IntList)
def _sum_that_may_keep_dims(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """`sum_sparse_coo`."""
    source, dims, keeps = (*args, None, False)[:3]
    dtype = kwargs.get("dtype") or (None if source.dtype.is_floating_point or source.dtype.is_complex else torch.int64)
    source = source if dtype is None else source.to(dtype)
    if dims is None:
        return _aten._sparse_sum.default(source)
    found = _aten._sparse_sum.dim(source, dims)
    for dim in sorted(dim % source.dim() for dim in dims) if keeps else ():
        found = found.unsqueeze(dim)
    return found


@_sparse(_aten._sparse_sum.dim)
def _sum_of_dims(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """The values are copied (or summed), and so are the places in what is left of the dimensions; then each is made one
    (``SparseTensorMath.cpp``)."""
    source, dims = args[0], {dim % args[0].dim() for dim in args[1]}
    old = parts(engine, source)
    shape = [size for dim, size in enumerate(source.shape) if dim not in dims]
    left = sum(dim not in dims for dim in range(old.dims))
    if not left:
        return _dense(engine, shape, source.dtype, device)
    inner = [size for dim, size in enumerate(source.shape) if dim >= old.dims and dim not in dims]
    values = _placed(engine, (old.elements, *inner), source.dtype, device)
    indices = _placed(engine, (left, old.elements), torch.int64, device)
    found = _in_order(engine, join(indices, values, shape, False), device)
    # The function's own variables go last, the places first.
    del indices
    engine.table.drain()
    del values
    engine.table.drain()
    return found


@_sparse(_aten._sparse_sum_backward.default)
def _gradient_of_a_sum(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """The sum's gradient, spread over what was summed up. Where places were, each element looks for its place among the sum's, by
    their numbers; Thrust's search takes nothing of its own. The places are copied (`_sparse_sum_backward_cuda` in
    ``SparseCUDATensorMath.cu``)."""
    given, source, dims = args[0], args[1], {dim % args[1].dim() for dim in args[2]}
    if not (parts(engine, given).elements if is_sparse(given) else given.numel()):
        return torch.zeros_like(source)
    source = coalesced(engine, source, device)
    old = parts(engine, source)
    if dims.issuperset(range(old.dims)):
        values = _placed(engine, tuple(old.values.shape), given.dtype, device)
    else:
        given = coalesced(engine, given, device)
        elements, values = parts(engine, given).elements, parts(engine, given).values
        if any(dim >= old.dims for dim in dims):
            values = _placed(engine, (elements, *old.values.shape[1:]), given.dtype, device)
        if any(dim < old.dims for dim in dims):
            found = _placed(engine, tuple(old.values.shape), given.dtype, device)
            with engine.scratch(device, *(count * _INDEX_BYTES for count in (elements, old.elements, old.elements))):
                pass
            values = found
    indices = _placed(engine, tuple(old.indices.shape), torch.int64, device)
    return join(indices, values, source.shape, False)
