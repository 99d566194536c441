"""Products of two sparse matrices: cuSPARSE has them in compressed rows, with numbers of 32 bits.

After ``SparseMatMul.cu`` (coordinates) and `spgemm` in ``SparseBlasImpl.cpp`` (compressed rows) of ATen/native/sparse/cuda, as an
H100 was asked with 2.11. How many products of two elements there are decides what cuSPARSE works in: where the places are not
known, the elements are taken to be spread evenly.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from gpumem_magic.virtual.engine import values
from gpumem_magic.virtual.engine.calls import sparse_of
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.operators import cusparse
from gpumem_magic.virtual.operators.compressed_parts import CompressedParts
from gpumem_magic.virtual.operators.data_dependent import _placed

_32_BITS = 4


def products_of(in_columns: Any, in_rows: Any) -> int | None:
    """How many pairs there are of an element in a column on the left and one in that row on the right. Given is how many each
    column and row has, on the host; None where that is not known."""
    return None if in_columns is None or in_rows is None else int((in_columns * in_rows).sum())


def _counts(
    engine: Engine, shape: tuple[int, int], inner: int, left: int, right: int, products: int | None
) -> tuple[int, int]:
    """Elements of the result, and products. shape: of the result."""
    rows, columns = shape
    most = min(math.prod(shape), left * columns, right * rows)
    if products is not None:
        most = min(most, products)
    count = engine.selected("product of sparse matrices", most) if most else 0
    return count, max(count, left * right // max(1, inner)) if products is None else products


def by_coordinates(
    engine: Engine, shape: tuple[int, int], left: Any, right: Any, inner: int, device: int
) -> tuple[Any, Any]:
    """Indices and values of the result. left, right: the same of the matrices."""
    rows, _ = shape
    columns, lines = (
        None if places is None else torch.bincount(places[row], minlength=inner)
        for places, row in ((values.exact(left[0]), 1), (values.exact(right[0]), 0))
    )
    products = products_of(columns, lines)
    elements = left[0].shape[1], right[0].shape[1]
    count, products = _counts(engine, shape, inner, *elements, products)
    dtype, index = left[1].dtype, torch.int32
    ours, theirs = (_32_BITS * each for each in elements)
    with engine.scratch(device, _32_BITS * (rows + 1)):
        with engine.scratch(device, ours):
            pass
        with engine.scratch(device, ours, _32_BITS * (inner + 1)):
            with engine.scratch(device, theirs):
                pass
            with engine.scratch(device, theirs):
                begins = _placed(engine, (rows + 1,), index, device)
                with cusparse.held(engine, device, *_rooms(elements[0], products, dtype)):
                    places = _placed(engine, (count,), index, device)
                    made = _placed(engine, (count,), dtype, device)
                indices = _placed(engine, (2, count), torch.int64, device)
                del begins
                engine.table.drain()
                del places
                engine.table.drain()
    return indices, made


def _rooms(elements: int, products: int, dtype: torch.dtype) -> tuple[int, int]:
    return cusparse.before_products(elements), cusparse.for_products(products, dtype.itemsize)


def by_rows(
    engine: Engine,
    shape: tuple[int, int],
    left: CompressedParts,
    right: CompressedParts,
    products: int | None,
    dtype: torch.dtype,
    device: int,
) -> Any:
    """The product of zeros without an element and a result without rows, which grows; then its indices have 32 bits, too."""
    rows, _ = shape
    inner = right.compressed.numel() - 1
    count, products = _counts(engine, shape, inner, left.elements, right.elements, products)
    index = left.compressed.element_size()
    with engine.scratch(device, index * (rows + 1)):
        with engine.scratch(device, index):
            compressed = _placed(engine, (rows + 1,), left.compressed.dtype, device)
        if not (left.elements and right.elements):
            plain = _placed(engine, (0,), left.plain.dtype, device)
            return sparse_of((compressed, plain, _placed(engine, (0,), dtype, device)), shape, torch.sparse_csr)
        of_both = [(_32_BITS * one.elements, _32_BITS * one.compressed.numel()) for one in (left, right)]
        with engine.scratch(device, *of_both[0], first_out=True), engine.scratch(device, *of_both[1], first_out=True):
            compressed = _placed(engine, (rows + 1,), torch.int32, device)
            engine.table.drain()
            with cusparse.held(engine, device, *_rooms(left.elements, products, dtype)):
                made = _placed(engine, (count,), dtype, device)
                plain = _placed(engine, (count,), torch.int32, device)
    return sparse_of((compressed, plain, made), shape, torch.sparse_csr)
