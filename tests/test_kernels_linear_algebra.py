"""What linear algebra takes beside its results, worked out by hand from BatchLinearAlgebra.cpp and its CUDA kernels.

A matrix of 100 rows and columns in float32 has 40,000 bytes. Codes of errors and pivots have four bytes, addresses and places
eight.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from asked_for import made, steps
from scratch_memory import scratch
from torch import linalg
from torch.torch_version import TorchVersion

from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.operators import reflections

BYTES = 40_000


@pytest.fixture(scope="module", autouse=True)
def machine() -> Iterator[None]:
    gpu.turn_on("A100-40GB,torch=2.13,context=0MiB")
    # cuBLAS's workspace is there from now on.
    torch.zeros(2, 2, device="cuda") @ torch.zeros(2, 2, device="cuda")
    yield
    gpu.turn_off()


def matrix(*shape: int) -> torch.Tensor:
    return torch.rand(shape, device="cuda")


# Whether any code says that it went wrong: of one matrix it is converted to a truth value.
ONE_CODE, CODES = [1, 1], [1]


def test_an_inverse_is_solved_for_in_place_beside_its_factors() -> None:
    # The result and a code; factors and pivots; the permutation, whose inverse comes from its places; the ordered copy is there
    # before it is solved. (The matrix itself is the first.)
    inverse = [BYTES, 4, BYTES, 400, 800, 800, 800, BYTES, *ONE_CODE]
    assert made(lambda: linalg.inv(matrix(100, 100))) == [BYTES, *inverse]
    assert made(lambda: linalg.inv(matrix(100, 100).mT)) == [BYTES, *inverse]
    assert scratch(lambda: linalg.inv(torch.zeros(1000, 1000, device="cuda"))) >= 2 * 4_000_000


def test_earlier_versions_solve_the_transposed_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = gpu.current().engine
    monkeypatch.setattr(engine.memory, "torch_version", lambda device: (2, 10))
    # The permutation, and the result once more, to be put in order.
    assert made(lambda: linalg.inv(matrix(100, 100))) == [BYTES, BYTES, 4, BYTES, 400, 800, BYTES, *ONE_CODE]
    turned = made(lambda: linalg.inv(matrix(100, 100).mT))
    assert turned == [BYTES, BYTES, 4, BYTES, 400, 800, 800, 800, BYTES, *ONE_CODE]


def test_many_are_told_by_their_addresses() -> None:
    many = matrix(3, 100, 100)
    # cuBLAS factorizes them; of the first permutation each gets its own; eight or fewer of 64 and more are solved one by one.
    factors = [3 * BYTES, 1200, 12, 24, *CODES]
    assert made(lambda: linalg.lu_factor(many)) == factors
    order = [800, 2400, 800, 2400, 3 * BYTES]
    assert made(lambda: linalg.inv(many)) == [3 * BYTES, 12, 3 * BYTES, 1200, 24, *order, *CODES]
    # MAGMA factorizes more of them, from 129 rows on, and those that are not square.
    assert made(lambda: linalg.lu_factor(matrix(17, 100, 100)))[1:] == [17 * BYTES, 17 * 400, 17 * 4, *CODES]
    assert made(lambda: linalg.lu_factor(matrix(3, 129, 129)))[2:] == [3 * 129 * 4, 12, *CODES]
    assert made(lambda: linalg.cholesky(many)) == [3 * BYTES, 12, 24, *CODES]


@pytest.mark.parametrize(
    ("size", "width", "batch", "beside"),
    [
        (8, 4, 1, [8, 8]),  # cuBLAS
        (32, 100, 2, [4]),  # cuSOLVER
        # By triangles: a permutation and its inverse, a copy of the right-hand side.
        (33, 70, 1, [33 * 8] * 3 + [33 * 70 * 4] + [8] * 4),
        (33, 8, 3, [24, 24]),  # cuBLAS
        (100, 2, 2, [4]),
        (100, 2, 3, [24, 24]),
        (100, 3, 1, [800, 800, 800, 1200]),
        (33, 9, 3, [33 * 8, 3 * 33 * 8] * 2 + [3 * 33 * 9 * 4] + [24] * 4),
    ],
)
def test_the_way_to_solve_follows_from_the_sizes(size: int, width: int, batch: int, beside: list[int]) -> None:
    left, right = matrix(batch, size, size), matrix(batch, size, width)
    by_cublas = [batch * 8] if batch > 1 else []
    results = [right.nbytes, left.nbytes, batch * size * 4, batch * 4]
    codes = CODES if batch > 1 else ONE_CODE
    assert made(lambda: linalg.solve(left, right)) == [*results, *by_cublas, *beside, *codes]


def test_one_matrix_for_many_right_hand_sides_is_spread() -> None:
    factors, pivots = linalg.lu_factor(matrix(1, 100, 100))
    spread = [3 * BYTES, 1200]
    right = matrix(3, 100, 3)
    order = [800, 2400, 800, 2400, right.nbytes]
    assert made(lambda: linalg.solve(matrix(100, 100), right))[1:] == [
        right.nbytes, BYTES, 400, 4, *spread, *order, *ONE_CODE,
    ]  # fmt: skip
    assert made(lambda: linalg.lu_solve(factors, pivots, right)) == [right.nbytes, *spread, *order]
    assert made(lambda: linalg.solve_triangular(matrix(100, 100).expand(3, -1, -1), right, upper=True))[1:] == [
        right.nbytes, 3 * BYTES,
    ]  # fmt: skip


def test_determinants_multiply_the_diagonal_and_count_exchanges() -> None:
    # A code; the product; the places, compared, as numbers of eight bytes, summed.
    counted = [400, 100, 800, 8]
    a = matrix(100, 100)
    det = made(lambda: linalg.det(a))
    assert det[:5] == [4, BYTES, 400, 4, 4]
    assert sorted(det[5:]) == sorted(counted)
    # Signs of the diagonal and their product come after what they are multiplied by, its logarithms last.
    slogdet = made(lambda: linalg.slogdet(a))
    assert slogdet[:5] == [4, 4, BYTES, 400, 4]
    assert sorted(slogdet[5:-3]) == sorted(counted)
    assert slogdet[-3:] == [400, 4, 400]


def test_cholesky_solves_in_a_copy() -> None:
    a, b = matrix(100, 100), matrix(100, 10)
    assert made(lambda: torch.cholesky_solve(b, a)) == [4000, 4, BYTES]
    assert made(lambda: torch.cholesky_inverse(a)) == [BYTES, BYTES, 4, BYTES]
    # Many are solved as triangles, in place.
    assert made(lambda: torch.cholesky_solve(matrix(3, 100, 10), matrix(3, 100, 100)))[2:] == [12_000]


def test_earlier_versions_solve_many_of_choleskys_by_magma() -> None:
    gpu.turn_off()
    gpu.turn_on("A100-40GB,torch=2.9,context=0MiB")
    assert made(lambda: torch.cholesky_solve(matrix(3, 100, 10), matrix(3, 100, 100)))[2:] == [12_000, 3 * BYTES]
    assert made(lambda: torch.cholesky_inverse(matrix(100, 100)))[1:] == [BYTES, BYTES, 4]
    # (An H100 with 2.11 makes the code of errors of a single one first.)
    assert made(lambda: torch.cholesky_solve(matrix(100, 10), matrix(100, 100)))[2:] == [4, 4000, BYTES]
    gpu.turn_off()
    gpu.turn_on("A100-40GB,torch=2.13,context=0MiB")
    torch.zeros(2, 2, device="cuda") @ torch.zeros(2, 2, device="cuda")


def test_qr_works_in_a_result_that_fits() -> None:
    tall = matrix(100, 40)
    # Factors of 40 reflections, a code for these and one for their product.
    assert made(lambda: linalg.qr(tall)) == [16_000, 6400, 160, 4, 4]
    assert made(lambda: linalg.qr(tall, mode="complete")) == [BYTES, 16_000, 160, 4, 4]
    # Without the first factor nothing fits.
    assert made(lambda: linalg.qr(tall, mode="r")) == [6400, 160, 16_000, 4]
    # From seven of 112 rows on, cuBLAS.
    assert made(lambda: linalg.qr(matrix(7, 112, 2)))[3:] == [7 * 2 * 4, 56, 56, 4]


def test_least_squares_reflect_a_copy() -> None:
    tall, right = matrix(100, 80), matrix(100, 10)
    # A code, the solution, the copy, reflections, two codes; the residuals, and whether the code says that it went wrong.
    assert made(lambda: linalg.lstsq(tall, right)) == [4, 4000, 32_000, 320, 4, 4, 40, 1, 1]
    # A wide one is turned first.
    assert made(lambda: linalg.lstsq(matrix(80, 100), matrix(80, 10)))[2:] == [4, 4000, 32_000, 320, 32_000, 4, 4, 1, 1]
    # Many small ones are copied once more for cuBLAS, with two lists of addresses; each code is looked at.
    many = made(lambda: linalg.lstsq(matrix(8, 20, 20), matrix(8, 20, 20)))[2:]
    assert many == [8 * 4, 8 * 1600, 8 * 1600, 8 * 1600, 8 * 8, 8 * 8, 1]


def test_both_factors_are_made_in_one_that_lies_in_columns() -> None:
    # The permutation, the factors; both in one, pivots and a code; the places from 0 on.
    assert made(lambda: linalg.lu(matrix(40, 50)))[1:] == [6400, 6400, 8000, 8000, 160, 4, 320]
    a = matrix(40, 50)
    assert steps(lambda: linalg.lu(a))[6] == ("free_requested", 8000)


def test_a_solved_vector_is_copied() -> None:
    a = matrix(40, 40)
    alone = made(lambda: linalg.solve(a, matrix(40)))
    column = made(lambda: linalg.solve(a, matrix(40, 1)))
    assert sorted(alone) == sorted([*column, 160])


def test_older_names_hold_the_same() -> None:
    a = torch.eye(40, device="cuda")
    if TorchVersion(torch.__version__) < "2.14":  # (It is gone since.)
        # The factor, a code, and whether that says that it went wrong.
        assert made(lambda: torch.cholesky(a)) == [6400, 4, 1, 1]
    assert made(lambda: torch.triangular_solve(a, a))[2:] == [8, 8]
    out = torch.zeros(40, 40, device="cuda"), torch.zeros(40, device="cuda")
    assert made(lambda: torch.geqrf(a, out=out)) == [6400, 160, 4]
    factors, pivots = linalg.ldl_factor(a)
    assert made(lambda: linalg.ldl_solve(factors, pivots, a[:, :3])) == [40 * 3 * 4, 40 * 8, 4]


@pytest.mark.parametrize("with_gradient", [False, True])
def test_vectors_are_made_only_for_a_gradient(with_gradient: bool) -> None:
    tall = matrix(100, 40).requires_grad_(with_gradient)
    square = matrix(100, 100).requires_grad_(with_gradient)
    # cuSOLVER wants room for the vectors in any case.
    wanted = [16_000, 6400, 160, 4, 16_000] if with_gradient else [160, 4, 16_000, 16_000, 6400]
    assert made(lambda: linalg.svdvals(tall)) == [*wanted, *ONE_CODE]
    vectors_or_copy = [BYTES, 400] if with_gradient else [400, BYTES]
    assert made(lambda: linalg.eigvalsh(square)) == [*vectors_or_copy, 4, *ONE_CODE]
    kept = linalg.eigvalsh(square)
    assert (kept.grad_fn is not None) == with_gradient


def test_singular_vectors_by_driver_and_size() -> None:
    tall = matrix(100, 40)
    results = [16_000, 6400, 160, 4, 16_000, *ONE_CODE]
    assert made(lambda: linalg.svd(tall, full_matrices=False)) == results
    assert made(lambda: linalg.svd(tall, full_matrices=False, driver="gesvd")) == results
    # Up to 32 rows and columns all vectors of the longer side are made.
    assert made(lambda: linalg.svd(matrix(5, 32, 8), full_matrices=False))[1:] == [
        5 * 32 * 8 * 4, 5 * 8 * 8 * 4, 5 * 8 * 4, 20, 5 * 32 * 8 * 4, 5 * 32 * 32 * 4, *CODES,
    ]  # fmt: skip


def test_an_exponential_takes_the_polynomial_for_its_norm() -> None:
    """What an H100 was asked for, with 2.11."""
    # Absolute values, sums, norm and place; the result, a place, the matrix; 16 coefficients; four powers, ones, sums.
    assert made(lambda: linalg.matrix_exp(torch.eye(8, device="cuda")))[1:] == [
        256, 32, 4, 8, 256, 8, 256, 64, 1024, 4, 256, 1024,
    ]  # fmt: skip
    # One more power and sum where the norm is too large, or is not known.
    for scale in (20.0, float("nan")):
        large = scale * torch.eye(8, device="cuda") if scale > 0 else torch.rand(8, 8, device="cuda")
        assert [size for size in made(lambda large=large: linalg.matrix_exp(large)) if size == 1280] == [1280, 1280]  # type: ignore[misc]


def test_exponentials_are_multiplied_with_themselves_as_often_as_they_were_halved() -> None:
    # Norms of 1, 6 and 20 are halved 0, 1 and 3 times: three matrices' products, then two's, and two of the last one's.
    scales = torch.tensor([1.0, 6.0, 20.0]).view(3, 1, 1)
    many = (scales * torch.eye(16)).to("cuda")
    large = [size // 1024 for size in made(lambda: linalg.matrix_exp(many)) if size % 1024 == 0]
    assert large[:5] == [3, 3, 15, 3, 15]
    # Those in order of their number, the products, all together, and in their order.
    assert large[5:] == [3, 2, 1, 1, 3, 3]


def test_what_is_multiplied_equally_often_is_one_section() -> None:
    """As an H100 was asked with 2.11: the sections' counts are one number, and so are the differences."""
    found = made(lambda: linalg.matrix_exp(torch.rand(40, 8, 8, device="cuda")))
    assert found[found.index(1279) - 1 : found.index(1279) + 10] == [8, 1279, 8, 8, 8, 8, 16, 8, 16, 10_240, 10_240]


@pytest.mark.parametrize("values", ["stand-in", "real"])
def test_the_other_side_s_complex_vectors_are_noted_as_conjugated(values: str) -> None:
    """So a product with them copies them first, in the gradient of singular values too (an H100, 2.11)."""
    gpu.turn_off()
    gpu.turn_on(f"H100,torch=2.11,context=0MiB,values={values}")
    a = torch.randn(513, 33, dtype=torch.complex64, device="cuda", requires_grad=True)
    left, found, right = linalg.svd(a, full_matrices=False)
    assert right.is_conj()
    assert not left.is_conj()
    if values == "real":
        assert torch.allclose((left * found) @ right, a, atol=1e-4)
    singular = linalg.svdvals(a)
    gradient = torch.ones_like(singular)
    assert made(lambda: torch.autograd.grad(singular, a, gradient))[:3] == [8712, 8712, 135_432]
    gpu.turn_off()
    gpu.turn_on("A100-40GB,torch=2.13,context=0MiB")


def test_the_gradient_of_an_exponential_has_one_of_twice_as_many_rows() -> None:
    matrices = torch.zeros(100, 100, device="cuda", requires_grad=True)
    out = linalg.matrix_exp(matrices)
    assert made(lambda: torch.autograd.grad(out, matrices, torch.zeros_like(out)))[1] == 4 * BYTES


def test_the_first_solution_takes_cublas_workspace() -> None:
    gpu.turn_off()
    gpu.turn_on("A100-40GB,torch=2.13,context=0MiB")
    assert made(lambda: linalg.cholesky(matrix(100, 100))) == [BYTES, BYTES, 4, *ONE_CODE]
    assert made(lambda: linalg.inv(matrix(100, 100))).count(8_519_680) == 1


@pytest.mark.parametrize("shape", [(0, 0), (2, 0, 0), (0, 3, 3)])
def test_the_inverse_of_an_empty_matrix(shape: tuple[int, ...]) -> None:
    assert torch.linalg.inv(torch.zeros(*shape, device="cuda")).shape == shape


@pytest.mark.parametrize(("dtype", "real"), [(torch.float32, 1), (torch.complex64, 0)])
def test_eigenvalues_of_any_matrix_are_made_apart_since_2_10(dtype: torch.dtype, real: int) -> None:
    gpu.turn_off()
    gpu.turn_on("H100,torch=2.11,context=0MiB")
    a = torch.zeros(3, 8, 8, dtype=dtype, device="cuda")
    values, vectors, given = 3 * 8 * 8, 3 * 8 * 8 * 8, 3 * 8 * 8 * dtype.itemsize
    found = made(lambda: linalg.eig(a))
    start = found.index(3 * 4)
    found_finite = found[:start]
    # Codes of errors, complex results, real ones, the copy that is worked in, whether any is complex; the results, and the codes.
    room = 33152 * dtype.itemsize
    parts = [12, vectors, values, *[values, given] * real, given, room, *[3 * 8, 1] * real, values, vectors, 1]
    assert found[start:] == parts
    found = made(lambda: linalg.eigvals(a))
    assert found == [12, values, *[values] * real, given, room, *[3 * 8, 1] * real, values, 1]
    gpu.turn_off()
    gpu.turn_on("H100,torch=2.9,context=0MiB")
    a = torch.zeros(3, 8, 8, dtype=dtype, device="cuda")
    # (MAGMA's are made on the host. It is looked first whether all are finite.)
    assert made(lambda: linalg.eig(a)) == [*found_finite, values, vectors]
    assert made(lambda: linalg.eigvals(a)) == [values]
    gpu.turn_off()
    gpu.turn_on("H100,torch=2.10,context=0MiB")
    a = torch.zeros(3, 8, 8, dtype=dtype, device="cuda")
    # (What cuSOLVER works in is known of 2.11.)
    assert made(lambda: linalg.eigvals(a)) == [12, values, *[values] * real, given, *[3 * 8, 1] * real, values, 1]
    gpu.turn_off()
    gpu.turn_on("A100-40GB,torch=2.13,context=0MiB")


def test_values_alone_are_written_where_they_shall_be() -> None:
    """What is worked in beside them is the same: those that `out=` names are no memory of the kernel's."""
    square, few = matrix(5, 5), matrix(5)
    many = torch.zeros(5, dtype=torch.complex64, device="cuda")
    for function, out in ((linalg.eigvalsh, few), (linalg.svdvals, few), (linalg.eigvals, many)):
        returned = made(lambda function=function: function(square))
        written = made(lambda function=function, out=out: function(square, out=out))
        returned.remove(out.nbytes)
        assert sorted(written) == sorted(returned)


def test_matrices_without_numbers_are_looked_at_too() -> None:
    """Recorded on an H100: whether all are finite, a code, and whether it says that it went wrong; no factors."""
    empty = torch.zeros(1, 1, 0, 0, dtype=torch.complex128, device="cuda")
    assert made(lambda: linalg.eig(empty)) == [1, 4, *ONE_CODE]
    assert made(lambda: linalg.solve(empty, empty)) == [4, *ONE_CODE]


def test_the_gradient_of_reflections_is_written_into_zeros() -> None:
    vectors, factors = (matrix(*shape).requires_grad_() for shape in ((6, 2), (2,)))
    result = linalg.householder_product(vectors, factors)
    gradient = torch.zeros_like(result)
    found = made(lambda: torch.autograd.grad(result, (vectors, factors), gradient))
    both, square, row, one = 6 * 2 * 4, 6 * 6 * 4, 6 * 4, 4
    # (cuBLAS's workspace of the thread that runs backward passes apart.)
    found = [size for size in found if size < 1_000_000]
    # What is below the diagonal, and its squares; their sums, and what turns a reflection back; the first one turned back. Then
    # both gradients, in which each reflection's are put; between them the second one is turned back, and the first one on.
    of_one = [row, row, row, one, row, row, one, one]
    between = [row, 5 * 4, 5 * row, row, row, square]
    assert found == [both, both, 8, 8, 8, 8, square, row, row, square, both, 8, *of_one, *between, *of_one]


def test_gradients_of_reflections_are_the_host_s() -> None:
    a, tau = torch.geqrf(torch.randn(3, 6, 4, dtype=torch.complex128))
    arguments = a.requires_grad_(), tau.requires_grad_()
    result = linalg.householder_product(*arguments)
    gradient = torch.randn_like(result)
    expected = torch.autograd.grad(result, arguments, gradient)
    with torch.no_grad():
        in_place = reflections.gradients(gradient, result, *arguments)
    # With a graph, for gradients of gradients.
    for found in (in_place, reflections.gradients(gradient, result, *arguments)):
        for mine, its in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, its)
    assert found[0].grad_fn is not None


@pytest.mark.parametrize("hermitian", [False, True])
def test_a_rank_is_written_into_the_result_that_was_made_first(hermitian: bool) -> None:
    batch = matrix(3, 5, 5)
    asked = made(lambda: linalg.matrix_rank(batch, hermitian=hermitian))
    # Three ranks and both tolerances; at the end what is large, a truth value for each number, and these as numbers to add up.
    assert asked[:3] == [24, 8, 8]
    assert asked[-2:] == [15, 120]
    assert asked.count(24) - asked[3:].count(24) == 1
    out = torch.zeros(3, dtype=torch.int64, device="cuda")
    place = out.data_ptr()
    assert made(lambda: linalg.matrix_rank(batch, hermitian=hermitian, out=out)) == asked[1:]
    assert out.data_ptr() == place
    with torch.inference_mode():
        assert made(lambda: linalg.matrix_rank(batch, hermitian=hermitian)) == asked


def test_tolerances_of_a_rank_are_numbers_on_the_device() -> None:
    one, number = matrix(5, 5), torch.ones((), device="cuda", dtype=torch.float64)
    assert made(lambda: linalg.matrix_rank(one, 0.1))[:3] == [8, 8, 8]
    # The usual one and a zero, whether one was given, and which it is then.
    assert made(lambda: linalg.matrix_rank(one, atol=number))[:5] == [8, 8, 8, 1, 8]
    assert made(lambda: linalg.matrix_rank(one, atol=number, rtol=number))[:2] == [8, 20]
    assert linalg.matrix_rank(torch.zeros(0, 4, 0, device="cuda")).shape == (0,)
    with pytest.raises(RuntimeError, match="at least 2 dimensions"):
        linalg.matrix_rank(torch.zeros(3, device="cuda"))


def test_what_is_given_to_be_written_grows_in_the_order_of_the_results() -> None:
    x = torch.eye(33, device="cuda")
    given = [torch.empty(0, device="cuda") for _ in range(3)]
    # Vectors of both sides before the values, as an H100 was asked with 2.11; and of eigenvalues.
    assert made(lambda: torch.linalg.svd(x, out=given))[:3] == [4356, 4356, 132]
    assert made(lambda: torch.linalg.eigh(x, out=[torch.empty(0, device="cuda") for _ in range(2)]))[:2] == [4356, 132]
