"""How much cuSPARSE asks for to work in, in bytes, where a sparse matrix is multiplied with a dense or a sparse one, or solved.

As an H100 was asked for it (PyTorch 2.11, CUDA 13.0): these are the very sizes of 963 recorded products with a dense matrix, from
10 to 100,000 elements. On other cards, and with other versions, nothing is counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from gpumem_magic.units import round_up
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.half_precision import HALF
from gpumem_magic.virtual.operators.cusolver import is_known


def held(engine: Engine, device: int, *sizes: int) -> AbstractContextManager[None]:
    """Inside, cuSPARSE works in so many bytes, on a card of which that is known."""
    known = is_known(engine.memory.capability(device), engine.memory.torch_version(device))
    return engine.scratch(device, *(sizes if known else ()))


def by_rows(rows: int, elements: int, columns: int, dtype: torch.dtype) -> int:
    """A matrix in compressed rows, with a dense one of so many columns."""
    if columns > 1:
        return 8 * (-(-elements // 24) + 1) - 1
    if dtype in HALF:
        return 4 * rows + 8 * -(-elements // 896) + 142
    at_once = 512 if dtype.is_complex else 3072
    return 8 * (-(-elements // at_once) + 2) - 1


def by_coordinates(elements: int, columns: int, dtype: torch.dtype) -> int:
    at_once = 256 if columns > 1 else 896 if dtype.is_complex else 4096 if dtype == torch.float32 else 3584
    return 4 * (-(-elements // at_once) + 2) - 1


# (Rows, bytes) of triangular systems with an element in each row.
_SOLVING = ((16, 2234), (100, 7274), (500, 34258))


def by_solving(rows: int, size: int) -> int:
    """A triangular system by compressed rows. size: of its right sides, in bytes. (Five calls.)"""
    return 2 * size + _between(_SOLVING, rows)


# Of a product of two sparse matrices: what a prefix sum shares between its blocks, for so many elements (products) of each.
_ELEMENTS_OF_A_BLOCK, _PRODUCTS_OF_A_BLOCK = 896, 768
_HEADS, _OF_A_BLOCK, _PIECE = 32, 16, 256


def _shared_by_blocks(count: int, at_once: int) -> int:
    return round_up(_OF_A_BLOCK * (-(-count // at_once) + _HEADS), _PIECE)


def before_products(elements: int) -> int:
    """`cusparseSpGEMM_workEstimation`, for so many elements on the left: of 19 products all, to the byte."""
    return 12 * elements + 311 + _shared_by_blocks(elements, _ELEMENTS_OF_A_BLOCK)


def for_products(products: int, item: int) -> int:
    """`cusparseSpGEMM_compute`, for so many products of two elements, which are sorted with their places: of 17 products all but
    two, of a single product each, to the byte."""
    return 2 * products * (8 + item) + 4391 + _shared_by_blocks(products, _PRODUCTS_OF_A_BLOCK) if products else 0


def _between(table: Sequence[tuple[int, int]], rows: int) -> int:
    """By the line between two sizes; beyond the last by the square."""
    place = bisect_left(table, (rows, 0))
    if place == len(table):
        last, elements = table[-1]
        return elements * rows**2 // last**2
    size, elements = table[place]
    if size == rows or not place:
        return elements
    before, fewer = table[place - 1]
    return fewer + (elements - fewer) * (rows - before) // (size - before)
