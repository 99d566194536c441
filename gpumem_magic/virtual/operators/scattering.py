"""Adding and writing through a list of indices: `index_add`, `index_copy`, `scatter` and its like.

Where algorithms are deterministic they are `index_put_`, which sorts the places (`index_add_cuda_impl` in ``Indexing.cu``,
`index_copy_` and `_scatter_via_index_put` in ``TensorAdvancedIndexing.cpp``; the CUDA builds of 2.6, 2.11 and 2.13 show it). A
mean counts how many values come to each place.
"""

from __future__ import annotations

from typing import Any

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine.calls import bytes_of
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.modes import STATE, pushed
from gpumem_magic.virtual.engine.rules import special
from gpumem_magic.virtual.operators.written_gradients import IN_PLACE, writes_into_zeros

_BY_LIST = overloads("index_add index_add_ index_copy index_copy_")
_BY_PLACE = overloads("scatter_add scatter_add_ scatter.src scatter_.src scatter.reduce scatter_.reduce")
_REDUCED = overloads("scatter_reduce.two scatter_reduce_.two scatter_reduce.two_out")
_ADDED = frozenset(overloads("index_add index_add_ scatter_add scatter_add_"))
# Since when the places are given by an index for each dimension. (The builds of 2.9 and 2.11 do so, those of 2.6 and 2.8 do not.)
_BY_DIMENSION_FROM = (2, 9)


def _is_plain(engine: Engine, args: Any, kwargs: Any) -> bool:
    return not (STATE.backward or torch.are_deterministic_algorithms_enabled())


@special(*_BY_LIST, *_BY_PLACE, plain=_is_plain, outside_backward=True)
def _write(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    if func in IN_PLACE and writes_into_zeros(func, args[0]):
        func = IN_PLACE[func]
    reduce = kwargs.get("reduce", "")
    if not torch.are_deterministic_algorithms_enabled() or reduce == "multiply":
        return engine.run(func, args, kwargs, device)
    target, dim, index, source = args
    accumulate = func in _ADDED or reduce == "add"
    with pushed(engine.mode):
        out = _written_to(func, target)
        if func not in _BY_LIST:
            _scatter(engine, device, out, dim, index, source, accumulate)
        elif out.dim():
            if accumulate:
                index = index.long()
                source = source * kwargs.get("alpha", 1)
            _aten.index_put_.default(out, [*[None] * (dim % out.dim()), index], source, accumulate)
            del source
        else:
            func(out, *args[1:], **kwargs)
    return out


@special(*_REDUCED)
def _reduce(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    target, dim, index, source, reduce = args
    sorts = torch.are_deterministic_algorithms_enabled() and reduce in ("sum", "mean") and "out" not in kwargs
    if not sorts:
        out = engine.run(func, args, kwargs, device)
    else:
        with pushed(engine.mode):
            out = _written_to(func, target)
            _scatter(engine, device, out, dim, index, source, True)
        engine.table.drain()
    if reduce == "mean":
        with engine.scratch(device, bytes_of(source), bytes_of(out)):
            if sorts:
                with pushed(engine.mode):
                    _scatter(engine, device, out, dim, index, source, True)
                engine.table.drain()
            # Where no value comes.
            with engine.scratch(device, out.numel()):
                pass
    return out


def _written_to(func: Any, target: Any) -> Any:
    return target if func._schema.name.endswith("_") else target.clone(memory_format=torch.contiguous_format)


def _scatter(engine: Engine, device: int, out: Any, dim: int, index: Any, source: Any, accumulate: bool) -> None:
    if not index.numel():
        return
    if out.dim() < 2:
        out.index_put_((index,), source, accumulate)
        return
    dim %= out.dim()
    if engine.memory.torch_version(device) < _BY_DIMENSION_FROM:
        _scatter_flat(out, dim, index, source, accumulate)
        return
    places = [index if one == dim else _numbered(index, one).expand_as(index) for one in range(out.dim())]
    out.index_put_(places, _part(source, index), accumulate)
    while places:
        del places[0]


def _scatter_flat(out: Any, dim: int, index: Any, source: Any, accumulate: bool) -> None:
    """The place in each dimension, side by side; then their sum, each with its stride."""
    plain = out.contiguous()
    places = index.new_empty((*index.shape, out.dim()), dtype=torch.int64)
    for one in (other for other in range(out.dim()) if other != dim):
        places[..., one].copy_(_numbered(index, one))
    places[..., dim].copy_(index)
    strides = torch.tensor(plain.stride()).to(out.device)
    weighted = places.flatten(0, -2) * strides
    numbers = weighted.sum(-1)
    del weighted
    flat = plain.flatten()
    flat.index_put_((numbers,), _part(source, index).flatten(), accumulate)
    del numbers
    del strides
    del places
    if not out.is_contiguous():
        out.copy_(flat.view(out.shape))


def _numbered(index: Any, dim: int) -> Any:
    """The places along a dimension, in the index's shape."""
    return torch.arange(index.shape[dim], device=index.device).view(-1, *[1] * (index.dim() - dim - 1))


def _part(source: Any, index: Any) -> Any:
    return source.as_strided(index.shape, source.stride())
