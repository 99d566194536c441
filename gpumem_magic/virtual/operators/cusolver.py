"""How much cuSOLVER asks for to work in, in bytes, as an H100 was asked for it (PyTorch 2.11, CUDA 13.0; 1,575 calls,
and what the library answered there for thousands of sizes).

Nothing public says it. The sizes are the same numbers of elements for all types, or the same bytes for all; what is no formula is
a table of square matrices, with a straight line between its sizes. On other cards, and with other versions, nothing is counted.
Roughly met are tall matrices of many columns in `gesvd` and `gesvdj`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import repeat
from math import ceil

from gpumem_magic.units import round_up

_HEAD = 128
# (Rows, elements) of singular values, by Jacobi's way.
_GESVDJ = (
    (33, 7392), (48, 9824), (64, 13408), (65, 15776), (96, 25760), (100, 29408), (128, 42208), (129, 44832), (200, 95776),
    (256, 149024), (257, 152192), (300, 202240), (400, 348768), (512, 559648), (513, 563904), (600, 762016), (768, 1232928),
    (1000, 2071712), (1024, 2168864),
)  # fmt: skip
_SMALLEST_GESVDJ, _SMALL = 992, 32
_LINE_BYTES = 512
_REFLECTIONS_AT_ONCE = 128
_LEAST_OF_SYTRF = {4: 98432, 8: 106624, 16: 176256}


def is_known(capability: tuple[int, int], version: tuple[int, int]) -> bool:
    return capability == (9, 0) and version >= (2, 11)


def getrf(rows: int) -> int:
    parts = round_up(rows, 32) // 32
    return 256 * (parts + 1 + min(16, 1 << (parts - 1).bit_length()))


def potrf(rows: int, item: int, upper: bool) -> int:
    """For an upper factor beside a matrix of the same size, as two calls have it."""
    if upper:
        return _HEAD + round_up(rows**2 * item, _HEAD)
    return round_up(4 * (round_up(rows, 32) // 32) ** 2 + _HEAD, 32)


def geqrf(columns: int, item: int) -> int:
    return (max(columns, 256) + 512) * 1024 * item + _HEAD


def orgqr(rows: int, reflections: int, item: int) -> int:
    """(All of 543 sizes that it answered.)"""
    if reflections >= _REFLECTIONS_AT_ONCE:
        return (128 * rows + 256 * reflections + 16640) * item
    return (round_up(rows * reflections, 32) + max(33024, 16640 + round_up(2 * reflections**2, 32))) * item


def ormqr(rows: int, reflections: int, height: int, width: int, item: int, left: bool) -> int:
    """height, width: of what is multiplied. (All of 3,503 sizes that it answered.)"""
    beside = width if left else height
    longest = max(rows, beside)
    spread = round_up((longest + reflections) * reflections, 32)
    lines = 256 * rows + 512 * width if left else 256 * height
    return (65792 + lines + spread + (round_up(beside, 32) if longest > _SMALL else 0)) * item


def geev(rows: int, item: int, is_complex: bool) -> int:
    """The matrix again, or what `orgqr` takes for all reflections of it, and a few lines. (2,130 of 2,144 answers.)"""
    lines = (7 * rows if is_complex else 8 * rows) // 2 + 32
    return round_up((max(rows**2, orgqr(rows - 1, rows - 1, 1)) + lines) * item, _LINE_BYTES)


def sytrf(rows: int, item: int) -> int:
    return max(_LEAST_OF_SYTRF[item], 64 * (rows + 1) * item)


def eigh(rows: int, batch: int, item: int, is_float: bool) -> list[int]:
    """One after the other: small ones of a batch at once, those of float32 by Jacobi's way up to 512 rows."""
    head = _HEAD + 32 * item
    if batch > 1 and rows <= _SMALL:
        return [head + _syevd(rows, batch) * item]
    if is_float and _SMALL <= rows <= 512:
        return [*repeat(_syevj(rows) * item, batch)]
    return [*repeat(head + _syevd(rows) * item, batch)]


def _syevd(rows: int, batch: int = 1) -> int:
    """Eigenvectors, by dividing: what their reflections take, where that is more than what making them does. (Of 268 sizes 258
    are met, and all to 32 elements; and all of those of batches up to 32 rows.)"""
    lines = 65536 + 768 * rows + (round_up(rows, 32) if rows > _SMALL else 0)
    few = batch * lines + round_up(batch * (2 * rows - 1) * (rows - 1), 32)
    many = 32896 + 128 * rows + round_up(3 * rows * (rows - 1) + 28, 32)
    return batch * (rows**2 + 2 * rows + 3) + max(few, many)


def _syevj(rows: int) -> int:
    """The matrix, a row more, and what goes by its blocks of 32 rows."""
    blocks = ceil(rows / _SMALL)
    return rows * (rows + 1) + 4 * blocks**2 + 1025 * blocks + 1024


def gesvdj(rows: int, columns: int, item: int) -> int:
    """Of all matrices of a batch."""
    if max(rows, columns) <= _SMALL:
        return _SMALLEST_GESVDJ * item
    if rows == columns:
        return between(_GESVDJ, rows) * item
    few = min(rows, columns)
    # A wide matrix is turned first.
    turned = round_up(rows * columns, 32) if rows < columns else 0
    return (_reflections(few) + round_up(few, 32) + turned) * item


def gesvd(rows: int, columns: int, item: int) -> int:
    """Of each matrix of a batch, which has at least as many rows as columns. (Of 505 sizes that cuSOLVER answered 429 are met to
    the byte, all squares among them; those of more than 128 columns that are no squares within 8 %.)"""
    square, wide = round_up(columns**2, 32), columns > _SMALL
    if rows == columns:
        lines = 256 * columns + 4 * round_up(columns, 32)
        return (65536 + lines + 2 * square + round_up(columns**2 + 16, 32) + (224 if wide else 192)) * item
    sides = 2 * round_up(rows * columns, 32)
    if columns >= _REFLECTIONS_AT_ONCE:
        beside = 16640 + 128 * rows
    else:
        beside = max(33024, 16640 + round_up(2 * rows * columns, 32)) + (64 if wide else 32)
    return (_reflections(columns) + sides + 2 * square + beside) * item


def _reflections(columns: int) -> int:
    """Elements, in a function that makes a triangle first."""
    return (max(columns, 256) + 512) * 1024 + 32


def between(table: Sequence[tuple[int, int]], rows: int) -> int:
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
