"""What cuSOLVER asks for to work in, as a real H100 was asked for it; other cards count nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from asked_for import made
from torch import linalg

from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.operators import cusolver


@pytest.fixture(autouse=True)
def _off() -> Iterator[None]:
    yield
    gpu.turn_off()


# (Function, rows of a square matrix in float32, and what the card was asked for beside the codes of errors.)
@pytest.mark.parametrize(
    ("function", "rows", "worked_in"),
    [
        (linalg.lu_factor, 8, [768]),
        (linalg.lu_factor, 65, [2048]),
        (linalg.lu_factor, 600, [9216]),
        (linalg.cholesky, 100, [192]),
        (linalg.cholesky, 1024, [4224]),
        (linalg.qr, 8, [3145856, 132352]),
        (linalg.qr, 100, [3145856, 186624]),
        (linalg.qr, 600, [4554880, 988160]),
        (linalg.ldl_factor, 8, [98432]),
        (linalg.ldl_factor, 512, [131328]),
        (linalg.eigh, 8, [287820]),
        (linalg.eigh, 10, [294380]),
        (linalg.eigh, 40, [18920]),
        (linalg.eigh, 64, [29000]),
        (linalg.eigh, 110, [69592]),
        (linalg.eigh, 600, [6425676]),
        (linalg.eigh, 2000, [65148044]),
        (linalg.eigvals, 100, [186368]),
        (linalg.svd, 8, [3968]),
        (linalg.svd, 100, [117632]),
    ],
)
def test_a_square_matrix(function: Callable[..., Any], rows: int, worked_in: list[int]) -> None:
    asked = {}
    for card in ("H100,torch=2.11", "A100,torch=2.11"):
        gpu.turn_on(card)
        a = torch.rand(rows, rows, device="cuda")
        asked[card] = made(lambda a=a: function(a))  # type: ignore[misc]
        gpu.turn_off()
    on_an_h100, elsewhere = asked.values()
    for size in worked_in:
        on_an_h100.remove(size)
    assert on_an_h100 == elsewhere


def test_complex_matrices_that_count_as_hermitian_are_not_cusolvers_in_ldl() -> None:
    """As an H100 was asked for: MAGMA's memory is its own."""
    gpu.turn_on("H100,torch=2.11")
    a = torch.zeros(2, 5, 5, dtype=torch.complex128, device="cuda")
    assert made(lambda: linalg.ldl_factor_ex(a, hermitian=True)) == [800, 40, 8]
    assert made(lambda: linalg.ldl_factor_ex(a)) == [800, 40, 8, 176_256]


def test_matrices_one_after_the_other_and_many_small_ones_at_once() -> None:
    gpu.turn_on("H100,torch=2.11")
    assert made(lambda: linalg.qr(torch.zeros(3, 200, 200, device="cuda"))).count(3145856) == 3
    assert made(lambda: linalg.eigh(torch.zeros(3, 200, 200, device="cuda"))).count(194380) == 3
    # Of 300 matrices of 16 rows the card was asked for 94,296,336 bytes.
    assert cusolver.eigh(16, 300, 4, True) == [94_296_336]
    # As the library answers: what the matrices share is rounded once.
    assert cusolver.eigh(2, 17, 4, True) == [4_562_156]
    assert cusolver.eigh(16, 3, 8, False) == [1_886_408]
    assert cusolver.eigh(33, 1, 8, False) == [753_840]
    assert cusolver.eigh(1024, 1, 16, False) == [69_717_168]


@pytest.mark.parametrize(
    ("rows", "reflections", "item", "nbytes"),
    [
        (1000, 10, 4, 172160),
        (100, 7, 4, 134912),
        (200, 100, 4, 226560),
        (96, 96, 4, 177152),
        (128, 96, 4, 189440),
        (1024, 512, 4, 1115136),
        (2000, 300, 4, 1397760),
        (5, 3, 4, 132224),
        (128, 128, 16, 1052672),
        (266, 70, 8, 51648 * 8),
    ],
)
def test_a_product_of_reflections(rows: int, reflections: int, item: int, nbytes: int) -> None:
    assert cusolver.orgqr(rows, reflections, item) == nbytes


@pytest.mark.parametrize(
    ("rows", "reflections", "shape", "item", "left", "nbytes"),
    [
        (5, 5, (5, 5), 4, True, 278784),
        (5, 2, (2, 5), 8, False, 530688),
        (33, 33, (33, 33), 4, True, 93408 * 4),
        (1000, 30, (1000, 30), 4, True, 368096 * 4),
        (100, 50, (100, 100), 8, True, 150240 * 8),
        (600, 600, (600, 600), 4, True, 1247200 * 4),
        (10, 10, (10, 100), 4, True, 120800 * 4),
        (334, 71, (33, 334), 8, False, 103072 * 8),
        (33, 5, (7, 33), 4, False, 271232),
    ],
)
def test_what_reflections_are_multiplied_with(
    rows: int, reflections: int, shape: tuple[int, int], item: int, left: bool, nbytes: int
) -> None:
    assert cusolver.ormqr(rows, reflections, *shape, item, left) == nbytes


def test_least_squares_of_a_tall_matrix_multiply_by_all_of_its_reflections() -> None:
    gpu.turn_on("H100,torch=2.11")
    a, b = torch.rand(300, 200, device="cuda"), torch.rand(300, 2, device="cuda")
    assert 974592 in made(lambda: linalg.lstsq(a, b))


def test_an_upper_factor_has_a_matrix_beside_and_factors_of_nothing_codes() -> None:
    gpu.turn_on("H100,torch=2.11")
    a = torch.eye(5, device="cuda")
    assert made(lambda: linalg.cholesky_ex(a)) == [100, 4, 160]
    assert made(lambda: linalg.cholesky_ex(a, upper=True)) == [100, 4, 256]
    nothing, pivots = torch.zeros(0, 5, device="cuda"), torch.zeros(0, dtype=torch.int, device="cuda")
    assert made(lambda: linalg.ldl_solve(nothing[:, :0], pivots, nothing)) == []
    # Of two without rows there are the two codes only.
    assert made(lambda: linalg.cholesky_ex(torch.zeros(2, 0, 0, device="cuda"))) == [8]


@pytest.mark.parametrize(
    ("rows", "columns", "nbytes"),
    [
        (96, 128, 3195392),
        (32, 96, 3158272),
        (128, 96, 3146240),
        (256, 64, 3146112),
        (64, 300, 3222912),
        (96, 96, 103040),
    ],
)
def test_singular_values_of_what_is_no_square(rows: int, columns: int, nbytes: int) -> None:
    # (As `decompositions` of the own programs was recorded.)
    assert cusolver.gesvdj(rows, columns, 4, full=False) == nbytes


@pytest.mark.parametrize(("rows", "elements"), [(82, 20768), (128, 42208), (512, 559648), (2000, 8148000)])
def test_a_square_has_itself_twice_and_its_blocks(rows: int, elements: int) -> None:
    """As cuSOLVER answered on an H100."""
    assert cusolver.gesvdj(rows, rows, 8, full=True) == 8 * elements


@pytest.mark.parametrize(
    ("rows", "columns", "full", "elements"),
    [(700, 664, True, 1510464), (700, 664, False, 1492000), (677, 255, True, 824352), (509, 650, False, 1414656)],
)
def test_many_columns_are_reflected(rows: int, columns: int, full: bool, elements: int) -> None:
    """As cuSOLVER answered on an H100."""
    assert cusolver.gesvdj(rows, columns, 8, full) == 8 * elements


@pytest.mark.parametrize(
    ("rows", "columns", "elements"),
    [
        (300, 300, 413888),
        (200, 200, 237888),
        (300, 16, 829632),
        (64, 33, 826016),
        (9, 8, 819840),
        (401, 30, 853120),
        (389, 82, 944320),
        (556, 543, 2202720),
    ],
)
def test_singular_values_by_reflections_first(rows: int, columns: int, elements: int) -> None:
    """As cuSOLVER answered on an H100."""
    assert cusolver.gesvd(rows, columns, 8) == 8 * elements


def test_singular_vectors_by_gesvd_have_numbers_and_a_square_beside() -> None:
    gpu.turn_on("H100,torch=2.11")
    a = torch.zeros(200, 200, device="cuda", dtype=torch.complex64)
    asked = made(lambda: linalg.svd(a, driver="gesvd"))
    assert asked[3:] == [4, 320000, 1903104, 800, 320000, 1, 1]


@pytest.mark.parametrize(
    ("dtype", "rows", "columns", "batch", "elements"),
    [
        (torch.float64, 12, 6, 3, 4627),
        (torch.float64, 62, 32, 17, 89717),
        # Larger ones are worked out as eigenvalues are.
        (torch.complex128, 523, 523, 3, 5508546),
        (torch.float64, 2000, 2000, 17, 412979363),
        # Twice as many single numbers as double ones, but where the copies in double precision are larger than all else.
        (torch.float32, 12, 6, 3, 9254),
        (torch.float32, 881, 881, 1, 9608900),
        (torch.float32, 655, 15, 17, 677296),
        (torch.complex64, 655, 15, 17, 677032),
    ],
)
def test_batches_by_the_product_of_each_with_itself(
    dtype: torch.dtype, rows: int, columns: int, batch: int, elements: int
) -> None:
    """As cuSOLVER answered on an H100."""
    assert cusolver.gesvda(rows, columns, batch, dtype) == elements * dtype.itemsize


def test_singular_vectors_of_a_batch_by_gesvda() -> None:
    gpu.turn_on("H100,torch=2.11")
    for shape, dtype, worked_in in (((17, 16, 32), torch.float32, 297768), ((3, 300, 64), torch.complex64, 7221904)):
        a = torch.zeros(shape, device="cuda", dtype=dtype)
        asked = made(lambda a=a: linalg.svd(a, full_matrices=False, driver="gesvda"))
        # The results, the codes, a copy, and what it works in.
        assert asked[3:] == [4 * shape[0], a.nbytes, worked_in, 1]


@pytest.mark.parametrize(
    ("rows", "columns", "elements"), [(2, 35, 786592), (25, 79, 788480), (119, 56, 786528), (370, 630, 1136704)]
)
def test_by_jacobi_a_wide_matrix_is_turned(rows: int, columns: int, elements: int) -> None:
    assert cusolver.gesvdj(rows, columns, 4, full=False) == 4 * elements


@pytest.mark.parametrize(("rows", "nbytes"), [(694, 16381208), (881, 25995952), (1054, 36883864)])
def test_eigenvectors_of_many_rows(rows: int, nbytes: int) -> None:
    """As cuSOLVER answered on an H100."""
    assert cusolver.eigh(rows, 1, 8, is_float=False) == [nbytes]


@pytest.mark.parametrize(
    ("rows", "item", "is_complex", "nbytes"),
    [
        (12, 8, False, 266240),
        (20, 16, True, 536576),
        (97, 8, False, 357888),
        (334, 4, False, 583680),
        (639, 8, True, 3284992),
    ],
)
def test_eigenvalues_of_any_matrix(rows: int, item: int, is_complex: bool, nbytes: int) -> None:
    assert cusolver.geev(rows, item, is_complex) == nbytes


def test_results_that_are_given_grow_before_a_system_is_solved_and_after_eigenvalues_are_found() -> None:
    gpu.turn_on("H100,torch=2.11")
    a = torch.eye(100, device="cuda")
    out = torch.empty(0, device="cuda"), torch.empty(0, device="cuda", dtype=torch.int32)
    # The result, the factors and their order, a code, what the factors take, and (rows in another order) what solving does.
    assert made(lambda: linalg.solve_ex(a, a, out=out))[:5] == [40000, 40000, 400, 4, 2304]
    assert out[0].shape == (100, 100)
    given = torch.empty(0, device="cuda", dtype=torch.complex64)
    values = made(lambda: linalg.eigvals(a, out=given))
    # A code, both numbers of each value, twice, the matrix by columns, and what it is worked out in.
    room = cusolver.geev(100, 4, False)
    assert values[:5] == [4, 800, 800, 40000, room]
    # The result, and whether it went well.
    assert values[-3:] == [800, 1, 1]
