"""Softmax of a sparse matrix, along a row or a column of what is there, and its gradient: attention over the edges of a graph.

After ``SoftMax.cu`` and ``SoftMax.cpp`` of ATen/native/sparse, and as an H100 was asked for with 2.11 (three calls; the gradient
was not recorded). Elements that lie in one row are a pool. They are sorted by their pools' numbers, and counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine import values
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.rules import SPARSE, special
from gpumem_magic.virtual.operators.cub import cub_of
from gpumem_magic.virtual.operators.data_dependent import _placed
from gpumem_magic.virtual.operators.shapes import empty_like
from gpumem_magic.virtual.operators.sparse import Parts, coalesced, join, parts

_NUMBER = 8
_sparse = partial(special, table=SPARSE)
# Of dense values, along their own dimensions.
_OF_VALUES = {
    _aten._sparse_softmax.default: torch.softmax,
    _aten._sparse_log_softmax.default: torch.log_softmax,
    _aten._sparse_softmax_backward_data.default: _aten._softmax_backward_data.default,
    _aten._sparse_log_softmax_backward_data.default: _aten._log_softmax_backward_data.default,
}


@_sparse(_aten._sparse_softmax.default, _aten._sparse_log_softmax.default)
def _softmax(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """Room for the values is there before those along a dense dimension are."""
    source = coalesced(engine, args[0], device)
    old, dim = parts(engine, source), args[1] % source.dim()
    made = empty_like(engine, old.values, device)
    indices = empty_like(engine, old.indices, device)
    if dim >= old.dims:
        made = _OF_VALUES[func](old.values, dim - old.dims + 1)
    elif old.elements:
        _hold_pools(engine, device, source, old, dim, has_largest=True)
    return join(indices, made, source.shape, True)


@_sparse(_aten._sparse_softmax_backward_data.default, _aten._sparse_log_softmax_backward_data.default)
def _gradient(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """Elements of the result are looked for among those of its gradient, by their places' numbers."""
    gradient, output = (coalesced(engine, one, device) for one in args[:2])
    old, others, dim = parts(engine, output), parts(engine, gradient), args[2] % output.dim()
    made = empty_like(engine, old.values, device)
    indices = empty_like(engine, old.indices, device)
    if not old.elements:
        return join(indices, made, output.shape, True)
    with _numbered(engine, device, old), _numbered(engine, device, others):
        if dim >= old.dims:
            made = _OF_VALUES[func](others.values, old.values, dim - old.dims + 1, args[3].dtype)
        else:
            with engine.scratch(device, old.elements * _NUMBER):
                _hold_pools(engine, device, output, old, dim, has_largest=False)
    return join(indices, made, output.shape, True)


@contextmanager
def _numbered(engine: Engine, device: int, old: Parts) -> Iterator[None]:
    """A number for each element, by its places but for those in one dimension (`get_offsets`)."""
    numbers = None
    with engine.scratch(device, old.dims * _NUMBER):
        numbers = _placed(engine, (old.elements,), torch.int64, device)
    yield
    del numbers
    engine.table.drain()


def _hold_pools(engine: Engine, device: int, source: Any, old: Parts, dim: int, has_largest: bool) -> None:
    """The order of the elements, the pools' sizes and where they begin, and the largest value of each (`compute_pool_max`)."""
    cub, count = cub_of(engine, device), old.elements
    pools = _pools(source, old, dim)
    with _numbered(engine, device, old):
        order = _placed(engine, (count,), torch.int64, device)
        with engine.scratch(device, cub.merge_sort(count, _NUMBER)):
            pass
        sizes = _placed(engine, (count,), torch.int64, device)
        with engine.scratch(device, cub.sums_by_key(count)):
            pass
        begins = _placed(engine, (pools,), torch.int64, device)
        with engine.scratch(device, cub.scan(pools, _NUMBER, by_sum=cub.version >= (3, 0))):
            pass
        inner = old.values.numel() // count
        largest = _placed(engine, (pools * inner,), old.values.dtype, device) if has_largest else None
    # (The first goes first.)
    del order
    engine.table.drain()
    del begins
    engine.table.drain()
    del sizes
    engine.table.drain()
    del largest
    engine.table.drain()


def _pools(source: Any, old: Parts, dim: int) -> int:
    """As many as there can be where the places are not known."""
    others = [place for place in range(old.dims) if place != dim]
    if (places := values.exact(old.indices)) is not None:
        return int(places[others].unique(dim=1).shape[1]) if others else 1
    return min(old.elements, math.prod(int(source.shape[place]) for place in others))
