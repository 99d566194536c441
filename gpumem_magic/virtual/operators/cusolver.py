"""How much cuSOLVER asks for to work in, in bytes, as an H100 was asked for it (PyTorch 2.11, CUDA 13.0; 1,575 calls).

Nothing public says it. The sizes are the same numbers of elements for all types, or the same bytes for all; what is no formula is
a table of square matrices, with a straight line between its sizes. On other cards, and with other versions, nothing is counted.
Roughly met are tall matrices of many columns in `gesvd` and `gesvdj`, `orgqr` of 66 to 95 reflections, and `geev` of more than
256 rows. What `ormqr` takes from the right follows from two calls.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import repeat
from math import ceil

from gpumem_magic.units import round_up

_HEAD = 128
# (Rows, elements) of eigenvectors, by dividing; of singular values, by Jacobi's way.
_SYEVD = (
    (1, 66342), (2, 67147), (3, 67922), (4, 68699), (5, 69510), (6, 70291), (7, 71106), (8, 71923), (9, 72742), (10, 73563),
    (11, 74386), (12, 75211), (13, 76070), (14, 76899), (15, 77762), (16, 78627), (17, 79494), (18, 80363), (19, 81234),
    (20, 82139), (21, 83014), (22, 83923), (23, 84802), (24, 85715), (25, 86630), (26, 87547), (27, 88498), (28, 89419),
    (29, 90342), (30, 91299), (31, 92258), (32, 93219), (64, 127043), (100, 172411), (128, 213059), (200, 339219),
    (256, 458819), (300, 565995), (512, 1245251), (513, 1249094), (576, 1503299), (600, 1606387), (640, 1785923),
    (700, 2081867), (736, 2293219), (750, 2378211), (767, 2483522), (768, 2489795), (800, 2694563), (832, 2907523),
    (896, 3358019), (900, 3387291), (1000, 4159987), (1023, 4348994), (1024, 4357315), (1100, 5012683), (1200, 5945379),
    (1280, 6749123), (1500, 9223467), (1536, 9665219), (2000, 16286979), (2048, 17070275),
)  # fmt: skip
_GESVDJ = (
    (33, 7392), (48, 9824), (64, 13408), (65, 15776), (96, 25760), (100, 29408), (128, 42208), (129, 44832), (200, 95776),
    (256, 149024), (257, 152192), (300, 202240), (400, 348768), (512, 559648), (513, 563904), (600, 762016), (768, 1232928),
    (1000, 2071712), (1024, 2168864),
)  # fmt: skip
_GEEV = (
    (1, 33152), (8, 33152), (16, 33408), (20, 33536), (31, 34176), (32, 34176), (33, 34304), (48, 35584), (64, 37376),
    (100, 46592), (128, 65664), (200, 93952), (256, 115712),
)  # fmt: skip
_SMALLEST_GESVDJ, _SMALL = 992, 32
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
    if reflections >= 128:
        return (128 * rows + 256 * reflections + 16640) * item
    more = round_up((reflections - 64) * reflections, 32) if reflections > 96 else 2048 * (reflections == 96)
    return (33024 + round_up(rows * reflections, 32) + more) * item


def ormqr(rows: int, reflections: int, height: int, width: int, item: int, left: bool) -> int:
    """height, width: of what is multiplied."""
    spread = round_up((rows + reflections) * reflections, 32)
    if not left:
        return (65792 + 256 * height + spread) * item
    return (65792 + 256 * rows + 512 * width + spread + (round_up(width, 32) if rows > _SMALL else 0)) * item


def geev(rows: int, item: int) -> int:
    """Beyond the table by the line of its end."""
    (before, fewer), (last, elements) = _GEEV[-2:]
    if rows > last:
        return (elements + (elements - fewer) * (rows - last) // (last - before)) * item
    return between(_GEEV, rows) * item


def sytrf(rows: int, item: int) -> int:
    return max(_LEAST_OF_SYTRF[item], 64 * (rows + 1) * item)


def eigh(rows: int, batch: int, item: int, is_float: bool) -> list[int]:
    """One after the other: small ones of a batch at once, those of float32 by Jacobi's way up to 512 rows."""
    if batch > 1 and rows <= _SMALL:
        return [batch * between(_SYEVD, rows) * item]
    if is_float and _SMALL <= rows <= 512:
        return [*repeat(_syevj(rows) * item, batch)]
    return [*repeat(between(_SYEVD, rows) * item + _HEAD, batch)]


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
