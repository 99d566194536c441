"""How much cuSOLVER asks for to work in, in bytes, as an H100 was asked for it (PyTorch 2.11, CUDA 13.0; 1,575 calls,
and what the library answered there for thousands of sizes).

Nothing public says it. The sizes are the same numbers of elements for all types, or the same bytes for all. On other cards, and
with other versions, nothing is counted.
"""

from __future__ import annotations

from itertools import repeat
from math import ceil

import torch

from gpumem_magic.units import round_up

_HEAD = 128
_SMALLEST_GESVDJ, _SMALL = 992, 32
_LINE_BYTES, _ALIGNED = 512, 32
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
    """Eigenvectors, by dividing: what their reflections take, where that is more than what making them does."""
    lines = round_up(batch * rows, 32) if rows > _SMALL else 0
    few = batch * (65536 + 768 * rows) + round_up(batch * (2 * rows - 1) * (rows - 1), 32)
    many = batch * (32896 + 128 * rows) + round_up(batch * (3 * rows - 1) * (rows - 1), 32)
    return batch * (rows**2 + 2 * rows + 3) + lines + max(few, many)


def _syevj(rows: int) -> int:
    return rows**2 + _of_blocks(rows)


def _of_blocks(rows: int) -> int:
    """By Jacobi's way: a row, and what goes by the blocks of 32 rows."""
    blocks = ceil(rows / _SMALL)
    return rows + 4 * blocks**2 + 1025 * blocks + 1024


def gesvdj(rows: int, columns: int, item: int, full: bool) -> int:
    """Of all matrices of a batch: the matrix and its vectors, or what a triangle takes, and its reflections. full: whether all
    vectors are made. (All of 11,408 answers for more than 32 rows or columns.)"""
    if max(rows, columns) <= _SMALL:
        return _SMALLEST_GESVDJ * item
    many, few = max(rows, columns), min(rows, columns)
    if rows == columns:
        return (round_up(2 * rows**2, 32) + round_up(_of_blocks(rows), 32) + 1024 * ceil(rows / _SMALL)) * item
    # A wide matrix is turned first.
    turned = round_up(rows * columns, 32) if rows < columns else 0
    reflected = ormqr(many, few, many, many if full else few, 1, left=True)
    return (max(_triangle(few), reflected) + round_up(few, 32) + turned) * item


def gesvd(rows: int, columns: int, item: int) -> int:
    """Of each matrix of a batch, which has at least as many rows as columns. (Of 505 sizes that cuSOLVER answered 503 are met to
    the byte, all squares among them; two of more than 600 columns within 5 %.)"""
    square, line = round_up(columns**2, 32), round_up(columns, 32)
    if rows == columns:
        lines = 256 * columns + 4 * line
        return (65536 + lines + 2 * square + round_up(columns**2 + 16, 32) + (224 if columns > _SMALL else 192)) * item
    side = round_up(rows * columns, 32)
    if columns >= _REFLECTIONS_AT_ONCE:
        sides = side + 16640 + 384 * rows
    else:
        sides = 2 * side + max(33024, 16640 + round_up(2 * rows * columns, 32))
    return (_triangle(columns) + sides + 2 * square + line) * item


def gesvda(rows: int, columns: int, batch: int, dtype: torch.dtype) -> int:
    """Of a batch, each of at least as many rows as columns: a copy, the eigenvalues of its product with itself, and what these
    are worked out in, all in double precision. That also has room for the copy of what is single. (All of 9,216 answers.)"""
    wide, each = (16 if dtype.is_complex else 8), batch * columns
    small = 1024 * (1 + batch) + 4 + batch * (columns + 1) ** 2
    vectors = small if columns <= _SMALL else 32 + _syevd(columns, batch)
    copy = round_up(rows * each * wide, _ALIGNED)
    converted = copy if dtype.itemsize < wide else 0
    product = round_up((columns + 2) * each * wide, _ALIGNED)
    return copy + round_up(each * 8, _ALIGNED) + product + max(vectors * wide, converted)


def _triangle(columns: int) -> int:
    """Elements, in a function that makes a triangle first."""
    return (max(columns, 256) + 512) * 1024 + 32
