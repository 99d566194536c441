"""What operators look at before or beside their kernel: lengths of segments, counts, what is not zero, what lies plainly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from asked_for import made, steps

from gpumem_magic.virtual import gpu

# CUB's scan of few elements: a tile state of 1,024 with 255 to round up its start.
SCAN = 1279


@pytest.fixture(autouse=True)
def machine() -> Iterator[Any]:
    yield gpu.turn_on("H100,torch=2.11")
    gpu.turn_off()


def on_device(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, device="cuda")


@pytest.mark.parametrize(("shape", "byte"), [((6,), [1]), ((6, 2), [])])
def test_segments_by_length(shape: tuple[int, ...], byte: list[int]) -> None:
    data, lengths = torch.ones(shape, device="cuda"), on_device(1, 2, 3)
    result = 4 * 3 * (2 if len(shape) > 1 else 1)
    # The shortest; their sum, whether it fits, for all; the result; a zero before the lengths, both, their sums.
    looked = [8, 8, 1, 1]
    assert made(lambda: torch.segment_reduce(data, "sum", lengths=lengths)) == [*looked, result, 8, 32, SCAN, *byte]
    assert made(lambda: torch.segment_reduce(data, "sum", lengths=lengths, unsafe=True)) == [result, 8, 32, SCAN, *byte]


def test_segments_are_copied_where_they_do_not_lie_plainly() -> None:
    data = torch.ones(2, 6, device="cuda").t()
    lengths = torch.tensor([[1, 0], [2, 0], [3, 0]]).cuda()[:, 0]
    # The data, the lengths; the result; a zero before the lengths, both, their sums.
    segments = [48, 24, 24, 8, 32, SCAN]
    assert made(lambda: torch.segment_reduce(data, "sum", lengths=lengths, unsafe=True)) == segments
    # The shortest is of a copy of them, too.
    assert made(lambda: torch.segment_reduce(data, "sum", lengths=lengths))[:6] == [48, 8, 24, 8, 1, 1]
    plain = torch.ones(6, 2, device="cuda", requires_grad=True)
    out = torch.segment_reduce(plain, "sum", lengths=on_device(1, 2, 3))
    same = torch.ones((), device="cuda").expand(3, 2)
    # The gradient that is one number, the data's.
    assert made(lambda: torch.autograd.grad(out, plain, same)) == [24, 48, 8, 32, SCAN]


def test_segments_by_their_bounds() -> None:
    data, offsets = torch.ones(6, 2, device="cuda", requires_grad=True), on_device(0, 1, 3, 6)
    # The lengths between four bounds.
    assert made(lambda: torch.segment_reduce(data, "sum", offsets=offsets)) == [24, 24]
    out = torch.segment_reduce(data, "sum", offsets=offsets)
    gradient = torch.ones_like(out)
    assert made(lambda: torch.autograd.grad(out, data, gradient)) == [48, 24]


def test_counts_of_repetitions_are_checked_where_no_size_is_given() -> None:
    counts = on_device(1, 2, 3)
    # Where each one's end; whether each is positive, and all are; six places.
    assert made(lambda: torch.repeat_interleave(counts)) == [24, SCAN, 3, 1, 48]
    assert made(lambda: torch.repeat_interleave(counts, output_size=6)) == [24, SCAN, 48]
    apart = torch.tensor([[1, 0], [2, 0], [3, 0]]).cuda()[:, 0]
    # They are copied first, and again for their sums.
    assert made(lambda: torch.repeat_interleave(apart, output_size=6)) == [24, 24, 24, SCAN, 48]


def test_a_dense_tensor_is_searched_and_copied() -> None:
    dense = torch.eye(4, device="cuda")
    searched = made(lambda: dense.nonzero())
    # Four places of two numbers, copied; four values, copied.
    assert made(lambda: dense.to_sparse()) == [*searched, 64, 16, 16]


def test_elements_are_sorted_with_those_asked_for() -> None:
    elements, tested = torch.arange(5, device="cuda"), torch.arange(20, device="cuda")
    both = torch.cat([elements, tested])
    sort = made(lambda: both.sort(stable=True))
    found = made(lambda: torch.isin(elements, tested, assume_unique=True))
    # Which are; both lists, sorted; which follow one that is the same, of 24 and for 25, in the first order.
    assert found == [5, 200, *sort, 25, 24, 25]
    # Of few that are asked for each is compared with each.
    assert made(lambda: torch.isin(elements, tested[:2])) == [5, 10, 5]


def test_chunks_of_tensors_that_do_not_lie_plainly_are_padded_first() -> None:
    plain = [torch.ones(2, 3, device="cuda"), torch.ones(3, 3, device="cuda")]
    turned = [torch.ones(3, 2, device="cuda").t(), torch.ones(3, 3, device="cuda").t()]
    result = 3 * 6 * 4
    # Two tensors, of which each is one block: 6 x 2 + 2 + 2 numbers.
    assert made(lambda: torch._chunk_cat(plain, 0, 3)) == [result, 128]
    # The one with two rows is copied with a third.
    assert made(lambda: torch._chunk_cat(turned, 0, 3)) == [36, result]
    gpu.turn_off()
    gpu.turn_on("H100,torch=2.7")
    turned = [torch.ones(3, 2, device="cuda").t(), torch.ones(3, 3, device="cuda").t()]
    assert made(lambda: torch._chunk_cat(turned, 0, 3)) == [result, 128]


@pytest.mark.parametrize(("version", "places_first"), [("2.2", True), ("2.3", False)])
def test_the_places_of_a_sort_go_first_before_2_3(version: str, places_first: bool) -> None:
    gpu.turn_off()
    gpu.turn_on(f"H100,torch={version}")
    elements, tested = torch.zeros(5000, device="cuda"), torch.zeros(2000, device="cuda")
    found = steps(lambda: torch.isin(elements, tested, assume_unique=True))
    # In the end both lists: in order (7,000 numbers of four bytes), and where each stood (eight).
    gone = [size for action, size in found if action == "free_requested"]
    assert gone[-3:-1] == ([56000, 28000] if places_first else [28000, 56000])


@pytest.mark.parametrize(("version", "asked"), [("2.7", [40, 8, 40]), ("2.8", [40])])
def test_an_exponent_of_integers_is_a_power_of_two_first_before_2_8(version: str, asked: list[int]) -> None:
    gpu.turn_off()
    gpu.turn_on(f"H100,torch={version}")
    x, exponent = torch.zeros(10, device="cuda"), torch.zeros(10, dtype=torch.int64, device="cuda")
    assert made(lambda: torch.ldexp(x, exponent)) == asked


@pytest.mark.parametrize(
    ("columns", "dtype", "buffer"),
    [(2, torch.float32, 15), (1, torch.float32, 23), (1, torch.float16, 4 * 4 + 8 + 142)],
)
def test_a_matrix_in_rows_is_added_to_zeros(columns: int, dtype: torch.dtype, buffer: int) -> None:
    # Four elements: one stretch of 24 and one more, of eight bytes each, without the last byte; alike with other stretches.
    rows = torch.eye(4, dtype=dtype).to_sparse_csr().cuda()
    dense = torch.ones(4, columns, dtype=dtype, device="cuda")
    size = 4 * columns * dtype.itemsize
    assert made(lambda: rows @ dense) == [size, size, buffer]
    assert made(lambda: rows @ dense[:, 0]) == [4 * dtype.itemsize, *([23] if dtype == torch.float32 else [166])]
    assert made(lambda: torch.addmm(dense, rows, dense)) == [size, buffer]


def test_a_matrix_of_coordinates_works_in_a_few_bytes() -> None:
    coordinates = torch.eye(4).to_sparse().cuda()
    dense = torch.ones(4, 2, device="cuda")
    # Zeros and the result; rows in compressed form from 32 bits, columns, the result by columns; three numbers less a byte.
    assert made(lambda: coordinates @ dense) == [32, 32, 20, 16, 16, 32, 11]


def test_weights_that_are_no_fractions_are_made_so_before_they_are_counted() -> None:
    """Recorded on an H100: the weights in float64 to the end; bytes have no lowest that could be below zero."""
    places, weights = on_device(1, 0, 1, 0, 1).int(), on_device(1, 2, 3, 4, 5)
    assert made(lambda: torch.bincount(places, weights)) == [40, 4, 4, 16]
    double, byte = weights.double(), places.byte()
    assert made(lambda: torch.bincount(places, double)) == [4, 4, 16]
    assert made(lambda: torch.bincount(byte, weights)) == [40, 1, 16]


@pytest.mark.parametrize(("dtype", "blocks"), [(torch.int32, [8, 40]), (torch.uint8, [8, 40]), (torch.float32, [4])])
def test_the_trace_is_the_sum_of_the_diagonal(dtype: torch.dtype, blocks: list[int]) -> None:
    """Whole numbers are added up in 64 bits, in a copy."""
    square = torch.zeros(5, 5, dtype=dtype, device="cuda")
    assert made(square.trace) == blocks
    with pytest.raises(RuntimeError, match="trace: expected a matrix"):
        square[0].trace()


@pytest.mark.parametrize(("dtype", "least"), [(torch.float16, 4), (torch.bfloat16, 4), (torch.float64, 8)])
def test_the_least_norm_of_similar_vectors_is_as_wide_as_their_sums(dtype: torch.dtype, least: int) -> None:
    pair = torch.ones(2, 2, 3, dtype=dtype, device="cuda")
    norms, whole = 6 * dtype.itemsize, 12 * dtype.itemsize
    blocks = [norms, norms, norms, norms, least, whole, whole, whole, norms]
    assert made(lambda: torch.cosine_similarity(pair, pair, -2)) == blocks
