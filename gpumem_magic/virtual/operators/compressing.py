"""Changes of a sparse matrix's form on a virtual device: to and from compressed ones, and from rows to columns.

After ``TensorConversions.cpp`` in ATen/native, as an H100 was asked with 2.11. What a batch of compressed matrices takes while
its rows become columns is not counted. What else is done with compressed ones is in `compressed`.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine import values
from gpumem_magic.virtual.engine.calls import bytes_of, sparse_of
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.modes import pushed
from gpumem_magic.virtual.engine.rules import COMPRESSED, SPARSE, special
from gpumem_magic.virtual.operators.compressed_parts import BY_ROWS, FLIPPED, IN_BLOCKS, made, parts
from gpumem_magic.virtual.operators.cub import cub_of
from gpumem_magic.virtual.operators.data_dependent import _blank, _placed, found_among
from gpumem_magic.virtual.operators.sparse import join as join_coordinates
from gpumem_magic.virtual.operators.sparse import parts as coordinates

_INDEX = 8
_LAYOUTS = {
    torch.sparse_csr: "SparseCsr", torch.sparse_csc: "SparseCsc", torch.sparse_bsr: "SparseBsr", torch.sparse_bsc: "SparseBsc",
}  # fmt: skip
_COMPRESSING = overloads("_to_sparse_csr _to_sparse_csc _to_sparse_bsr _to_sparse_bsc")
_compressed = partial(special, table=COMPRESSED)


def _asked(func: Any) -> str:
    """``sparse_csr`` of ``aten::_to_sparse_csr``."""
    name: str = func._schema.name
    return name.removeprefix("aten::_to_")


def _form_of(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The layout that is asked for, and the size of a block where it has some."""
    name = _asked(func)
    layout = kwargs.get("layout") or (torch.sparse_coo if name == "sparse" else getattr(torch, name))
    return layout, tuple(kwargs.get("blocksize") or (args[1] if layout in IN_BLOCKS and len(args) > 1 else ()))


@special(_aten._to_sparse.default, _aten._to_sparse.sparse_dim)
def _to_sparse(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    source = args[0]
    if kwargs.get("layout") not in (None, torch.sparse_coo):
        return _from_dense(engine, func, args, kwargs, device)
    dense = kwargs.get("dense_dim") or 0
    dims = args[1] if len(args) > 1 else source.dim() - dense
    host = values.exact(source)
    places = math.prod(source.shape[:dims])
    if host is None:
        count = engine.selected("to_sparse", places, shape=source.shape[:dims])
    else:
        count = int(host.flatten(dims).ne(0).any(-1).sum()) if dims < host.dim() else int(host.ne(0).sum())
    shape = (count, *source.shape[dims:])
    # The places that are not zero, of which the indices are a copy, as the values are of what is there (`dense_to_sparse`).
    places = found_among(engine, device, source, count) if source.dim() and dims == source.dim() else None
    indices = _placed(engine, (dims, count), torch.int64, device)
    with engine.scratch(device, *([] if places is None else [math.prod(shape) * source.element_size()])):
        made = _placed(engine, shape, source.dtype, device)
    del places
    return torch.sparse_coo_tensor(indices, made, source.shape, check_invariants=False)._coalesced_(True)


@special(*_COMPRESSING)
def _from_dense(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    source, (layout, block) = args[0], _form_of(func, args, kwargs)
    first = 2 if layout in IN_BLOCKS else 1
    dense = (args[first] if len(args) > first else kwargs.get("dense_dim")) or 0
    sides = source.shape[: source.dim() - dense]
    *batches, rows, columns = sides
    by, host = block or (1, 1), values.exact(source)
    if host is None:
        count = engine.selected("to_sparse", rows * columns // math.prod(by))
    else:
        inner = math.prod(source.shape[len(sides) :])
        tiles = host.ne(0).reshape(math.prod(batches), rows // by[0], by[0], columns // by[1], by[1], inner)
        count = int(tiles.any(-1).any(-1).any(2).sum()) // max(1, math.prod(batches))
    if batches and not source.numel():
        return made(engine, source.shape, source.dtype, layout, count, device, block)
    with engine.scratch(device, source.numel()):
        if block or dense:
            found = _by_blocks(engine, source, len(batches), layout, block, count, device)
        elif batches:
            found = _by_batches(engine, [source], [], len(batches), layout, count, device)
        else:
            found = _by_places(engine, [source], layout, count, device)
    return sparse_of(found, source.shape, layout)


def _by_blocks(
    engine: Engine, source: Any, dims: int, layout: torch.layout, block: Any, count: int, device: int
) -> Any:
    """Block by block there are a copy of the matrix, and of where something is, of which each block's sum is taken; without
    blocks the sum of each place that is dense. dims: of the batch."""
    *batches, rows, columns = source.shape[: dims + 2]
    by = block or (1, 1)
    shape = *batches, rows // by[0], columns // by[1]
    numbers = source.numel()
    laid = [_placed(engine, (*shape, *block, *source.shape[dims + 2 :]), source.dtype, device) if block else source]
    with engine.scratch(device, numbers if block else 0, math.prod(shape) * _INDEX, first_out=True):
        with engine.scratch(device, numbers * _INDEX):
            pass
        mask = [_placed(engine, shape, torch.bool, device)]
    if batches:
        return _by_batches(engine, laid, mask, dims, layout, count, device)
    found = _by_places(engine, laid, layout, count, device)
    mask.clear()
    engine.table.drain()
    return found


def _by_batches(
    engine: Engine, numbers: Any, mask: Any, dims: int, layout: torch.layout, count: int, device: int
) -> Any:
    """All matrices of a batch as one, below each other, or side by side where it is done by columns, once each was found to have
    as many elements (`dense_to_sparse_compressed_prepare_check_mask_values_batched`). At the end each has its own list of where
    its rows (columns) begin. numbers, mask: the matrices, and of blocks where something is, in lists that are given up;
    dims: of the batch."""
    shape, by_rows = numbers[0].shape, layout in BY_ROWS
    batches, (rows, columns) = shape[:dims], shape[dims : dims + 2]
    many, each = math.prod(batches), rows * columns
    joined = (many * rows, columns) if by_rows else (rows, many * columns)
    with ExitStack() as held:
        with engine.scratch(device, _INDEX):
            with engine.scratch(device, each * _INDEX):
                pass
            with engine.scratch(device, many * _INDEX):
                with engine.scratch(device, many * each * _INDEX):
                    pass
                with engine.scratch(device, many), engine.scratch(device, 1):
                    pass
            if not by_rows:
                _beside_each_other(engine, numbers, dims, joined)
                held.enter_context(engine.scratch(device, many * each))
                mask.clear()
                engine.table.drain()
        with pushed(engine.mode):
            numbers[0] = numbers[0].reshape(*joined, *shape[dims + 2 :])
        compressed, plain, chosen = _by_places(engine, numbers, layout, many * count, device)
        lines = joined[not by_rows] // many
        of_each = _placed(engine, (*batches, lines + 1), torch.int64, device)
        with engine.scratch(device, many * lines * _INDEX):
            pass
        del compressed
        engine.table.drain()
        mask.clear()
        engine.table.drain()
    with pushed(engine.mode):
        plain, chosen = (part.reshape(*batches, count, *part.shape[1:]) for part in (plain, chosen))
    return of_each, plain, chosen


def _beside_each_other(engine: Engine, numbers: Any, dims: int, joined: tuple[int, int]) -> None:
    """In a copy, where there are several."""
    (source,) = numbers
    numbers.clear()
    with pushed(engine.mode):
        others = range(dims + 1, source.dim())
        numbers.append(source.permute(dims, *range(dims), *others).reshape(*joined, *source.shape[dims + 2 :]))
    del source
    engine.table.drain()


def _by_places(engine: Engine, numbers: Any, layout: torch.layout, count: int, device: int) -> tuple[Any, Any, Any]:
    """`dense_to_sparse_compressed`: where something is, row by row or column by column, is looked for twice, the second time in
    one line; the first list is kept for the columns (rows) in it. numbers: the matrix, or its blocks, in a list that is given up
    at the end."""
    (source,) = numbers
    block = tuple(source.shape[2:])
    mask: Any = _blank(engine, tuple(source.shape[:2]), torch.bool, device)
    if layout not in BY_ROWS:
        mask, source = mask.t(), source.transpose(0, 1)
    plain = found_among(engine, device, mask, count).select(1, 1)
    compressed = _placed(engine, (mask.shape[0] + 1,), torch.int64, device)
    in_line = _blank(engine, (mask.numel(),), torch.bool, device)
    with engine.scratch(device, 0 if mask.is_contiguous() else mask.numel()):
        places = found_among(engine, device, in_line, count)
    with engine.scratch(device, 0 if source.is_contiguous() else bytes_of(source)):
        chosen = _placed(engine, (count, *block), source.dtype, device)
    del source
    numbers.clear()
    engine.table.drain()
    del places
    engine.table.drain()
    return compressed, plain, chosen


@special(*_COMPRESSING, _aten._to_sparse.default, table=SPARSE)
def _from_coordinates(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """By rows nothing but where each begins is new; columns are the rows of the transposed matrix, blocks come of either."""
    source, (layout, block) = args[0], _form_of(func, args, kwargs)
    if source.sparse_dim() != 2:
        name = _asked(func)
        wanted = f"conversion from Sparse to {_LAYOUTS[layout]} for input tensors with sparse_dim()!=2"
        raise RuntimeError(f"{'sparse_' if name == 'sparse' else ''}coo_to_{name}: {wanted} is not supported")
    by_rows = layout in BY_ROWS
    summed = source if by_rows else source.transpose(0, 1)
    summed = summed if summed.is_coalesced() else _aten._coalesce.default(summed)
    old = coordinates(engine, summed)
    compressed = _placed(engine, (summed.shape[0] + 1,), torch.int64, device)
    plain = old.indices.select(0, 1)
    elements = sparse_of(
        (compressed, plain, old.values), source.shape, torch.sparse_csr if by_rows else torch.sparse_csc
    )
    return _in_blocks(engine, elements, layout, block, device) if block else elements


@_compressed(*_COMPRESSING, _aten._to_sparse.default, _aten._to_sparse.sparse_dim)
def _to_other_form(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    source, (layout, block) = args[0], _form_of(func, args, kwargs)
    if layout is torch.sparse_coo:
        return _places_of(engine, source, device)
    if layout is FLIPPED[source.layout]:
        return flipped(engine, source, device)
    its, wanted = _LAYOUTS[source.layout], _LAYOUTS[layout]
    if source.layout in IN_BLOCKS:
        name = wanted.replace("Sparse", "sparse_").lower()
        raise RuntimeError(f"sparse_compressed_to_{name}: expected SparseCsr or SparseCsc layout but got {its}")
    if parts(engine, source).batches:
        refused = f"conversion from {its} to {wanted} for batched inputs is not supported"
        raise RuntimeError(f"sparse_compressed_to_{_asked(func)}: {refused}")
    return _in_blocks(engine, source, layout, block, device)


def _in_blocks(engine: Engine, source: Any, layout: torch.layout, block: Any, device: int) -> Any:
    """The host does this (`_compressed_to_block_compressed_cpu`)."""
    if (source.layout in BY_ROWS) != (layout in BY_ROWS):
        source = flipped(engine, source, device)
    most = min(parts(engine, source).elements, math.prod(source.shape[:2]) // math.prod(block))
    count = engine.selected("to_sparse", most)
    lines = source.shape[0] // block[0] if layout in BY_ROWS else source.shape[1] // block[1]
    # They come from the host, the values first.
    elements = _placed(engine, (count, *block, *source.shape[2:]), source.dtype, device)
    compressed = _placed(engine, (lines + 1,), torch.int64, device)
    return sparse_of((compressed, _placed(engine, (count,), torch.int64, device), elements), source.shape, layout)


def _places_of(engine: Engine, source: Any, device: int) -> Any:
    """`sparse_compressed_to_sparse`: a list of places, and the values as they are. Of blocks, where each begins, to which what
    lies in it is added."""
    old = parts(engine, source)
    batches, block = old.batches, old.block(source.layout)
    count = math.prod(source.shape[:batches]) * old.elements
    listed = (batches + 2, count)
    if source.layout not in IN_BLOCKS:
        indices = _placed(engine, listed, torch.int64, device)
        return join_coordinates(indices, old.values.flatten(0, batches), source.shape, source.layout in BY_ROWS)
    inside = math.prod(block)
    with engine.scratch(device, math.prod(listed) * _INDEX, listed[0] * inside * _INDEX, first_out=True):
        with engine.scratch(device, sum(block) // 2 * _INDEX, 2 * inside * _INDEX, first_out=True):
            pass
        with engine.scratch(device, listed[0] * _INDEX, math.prod(listed) * _INDEX):
            indices = _placed(engine, (listed[0], count * inside), torch.int64, device)
    return join_coordinates(indices, old.values.flatten(0, batches + 2), source.shape, False)


def flipped(engine: Engine, source: Any, device: int) -> Any:
    """Columns in place of rows, and the other way round (`sparse_compressed_to_flipped`): every element gets its place's number,
    and these are sorted."""
    old = parts(engine, source)
    layout, block = FLIPPED[source.layout], old.block(source.layout)
    rows, columns = source.shape[old.batches : old.batches + 2]
    if old.batches:
        return made(engine, source.shape, source.dtype, layout, old.elements, device, block, old.batches)
    by = block or (1, 1)
    lines = (columns // by[1]) if source.layout in BY_ROWS else (rows // by[0])
    index, count = old.compressed.dtype, old.elements
    item = index.itemsize
    each, before, after = count * item, old.compressed.nbytes, (lines + 1) * item
    with ExitStack() as held:
        with engine.scratch(device, item):
            held.enter_context(engine.scratch(device, item))
            with engine.scratch(device, cub_of(engine, device).scan(1, item, True)):
                pass
        with engine.scratch(device, before - item):
            held.enter_context(engine.scratch(device, before))
        held.enter_context(engine.scratch(device, 2 * each))
        with engine.scratch(device, each, each):
            pass
        numbers = _placed(engine, (count,), index, device)
        with pushed(engine.mode):
            ordered, places = numbers.sort()
        del ordered
        engine.table.drain()
        plain = _placed(engine, (2, count), index, device).select(0, 1)
        chosen = _placed(engine, (count, *old.values.shape[1:]), source.dtype, device)
        with engine.scratch(device, after):
            compressed = _placed(engine, (lines + 1,), index, device)
            with engine.scratch(device, after - item):
                pass
        del places
        engine.table.drain()
        del numbers
        engine.table.drain()
    return sparse_of((compressed, plain, chosen), source.shape, layout)
