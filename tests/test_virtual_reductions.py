"""What reductions take where several blocks of threads share the work, against figures that were recorded on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from asked_for import made

from gpumem_magic.virtual import gpu


@pytest.fixture
def on() -> Iterator[Callable[[str], Any]]:
    yield gpu.turn_on
    gpu.turn_off()


@pytest.mark.parametrize(
    ("card", "shape", "dims", "shared"),
    [
        ("RTX3090,torch=2.6", (10, 200, 512), (0, 1), [8_388_608, 16]),
        ("A100-80GB,torch=2.11", (4, 512, 1024), (0, 1), [16_777_216, 32]),
        ("RTX3090,torch=2.6", (8, 4096, 16), (0, 1, 2), [256, 4]),
    ],
)
def test_what_was_recorded(
    on: Callable[[str], Any], card: str, shape: tuple[int, ...], dims: tuple[int, ...], shared: list[int]
) -> None:
    """In training steps of public repositories, whose recordings name the kernel."""
    on(card)
    x = torch.randn(shape, device="cuda")
    assert made(lambda: x.sum(dims))[1:] == shared


def test_small_work_is_not_split(on: Callable[[str], Any]) -> None:
    on("A100-40GB")
    x = torch.randn(64, 64, device="cuda")
    assert made(lambda: (x.sum(), x.sum(0), x.mean(1), x.amax())) == [4, 256, 256, 4]


def test_partial_results_are_as_wide_as_the_kernels(on: Callable[[str], Any]) -> None:
    on("A100-40GB")
    x = torch.randn(1 << 20, device="cuda")
    half = x.half()
    buffers = {
        name: made(program)[-2:]
        for name, program in {
            "sum": x.sum, "amax": x.amax, "half amax": half.amax, "argmax": x.argmax, "any": (x > 0).any,
        }.items()
    }  # fmt: skip
    blocks = buffers["any"][0]
    assert buffers["sum"][0] == buffers["amax"][0] == 4 * blocks
    assert buffers["half amax"][0] == 2 * blocks
    assert buffers["argmax"][0] == 16 * blocks
    assert {semaphores for _, semaphores in buffers.values()} == {4}


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.half, torch.float32, torch.int64, torch.complex64, torch.complex128]
)
def test_what_asks_whether_all_or_any_are_true_shares_the_numbers_as_they_come(
    on: Callable[[str], Any], dtype: torch.dtype
) -> None:
    """As an H100 was asked for with 2.11, and the CUDA build of 2.9.1 asks."""
    on("H100,torch=2.11")
    x = torch.zeros(2000, 2000, device="cuda", dtype=dtype)
    shared = made(x.all)[1]
    assert shared == 489 * dtype.itemsize if dtype in (torch.half, torch.complex64) else shared % dtype.itemsize == 0
    assert made(x.any)[1] == made(lambda: x.any((0, 1)))[1] == made(lambda: x.all((0, 1)))[1] == shared
    # Since 2.12 a byte of each block says whether.
    gpu.turn_off()
    on("A100-40GB,torch=2.12")
    assert made(torch.zeros(2000, 2000, device="cuda", dtype=dtype).any)[1] in (432, 123, 864)
    three = torch.zeros(3, 500_000, device="cuda")
    assert made(lambda: three.all(1)) == [3, 186, 12]


def test_the_norms_of_complex_numbers_are_shared_as_real_ones(on: Callable[[str], Any]) -> None:
    on("H100,torch=2.11")
    x = torch.zeros(512, 512, device="cuda", dtype=torch.complex64)
    assert made(lambda: torch.linalg.matrix_norm(x)) == [4, 128, 4]
    # (With another type they are copied first.)
    assert made(lambda: torch.linalg.vector_norm(x, dtype=torch.complex128))[1:] == [512 * 512 * 16, 512, 4]


def test_the_norm_of_a_single_complex_number_is_its_size(on: Callable[[str], Any]) -> None:
    """As an H100 was asked for with 2.11 (`linalg_vector_norm_out`, since 2.4)."""
    on("H100,torch=2.11")
    one = torch.zeros((), device="cuda", dtype=torch.complex128)
    column = torch.zeros(100, 1, device="cuda", dtype=torch.complex64)
    assert made(lambda: torch.linalg.vector_norm(one, 4)) == [8, 16]
    assert made(lambda: torch.linalg.vector_norm(column, dim=1)) == [400, 800]
    assert made(lambda: torch.linalg.vector_norm(column, 2, 1, dtype=torch.complex128)) == [800, 1600, 1600]
    on("H100,torch=2.3")
    older = torch.zeros(100, 1, device="cuda", dtype=torch.complex64)
    assert made(lambda: torch.linalg.vector_norm(older, dim=1)) == [400]


def test_what_is_summed_in_another_type_is_copied_first(on: Callable[[str], Any]) -> None:
    on("A100-40GB")
    mask = torch.ones(1 << 20, dtype=torch.bool, device="cuda")
    count, copy, *shared = made(mask.sum)
    assert (count, copy) == (8, 8 << 20)
    assert len(shared) == 2


def test_more_than_two_gibibytes_are_reduced_in_parts(on: Callable[[str], Any]) -> None:
    on("A100-80GB")
    x = torch.empty(3 << 28, dtype=torch.float32, device="cuda")
    found = made(x.sum)
    # Three GiB: the half of each half can be counted with 31 bits.
    assert len(found) == 1 + 2 * 2


@pytest.mark.parametrize(
    ("reduce", "dtype", "results", "held"),
    [
        (torch.max, torch.float32, [4, 8], 16),
        (torch.argmax, torch.float32, [8], 16),
        (torch.var, torch.float32, [4], 16),
        (torch.sum, torch.float32, [4], None),
        (torch.sum, torch.bfloat16, [2], 4),
        (torch.nansum, torch.float16, [2], 4),
        (torch.prod, torch.bfloat16, [2], None),
        (torch.amax, torch.bfloat16, [2], None),
    ],
)
def test_parts_meet_in_a_buffer_where_the_result_cannot_hold_what_they_found(
    on: Callable[[str], Any], reduce: Callable[..., Any], dtype: torch.dtype, results: list[int], held: int | None
) -> None:
    """`AccumulationBuffer`: as many partial results as there are results, made once for all parts. An A100 was seen to take
    2 MiB for the maxima of 131,072 rows of 16,384. Rows of 1,024 are reduced by one block each."""
    on("A100-80GB,torch=2.6")
    rows = (1 << 31) // dtype.itemsize // 1024
    fits, larger = (torch.empty(size, 1024, dtype=dtype, device="cuda") for size in (rows, rows + 1))
    assert made(lambda: reduce(fits, -1)) == [rows * one for one in results]
    rows += 1
    assert made(lambda: reduce(larger, -1)) == [rows * one for one in (*results, *([held] if held else []))]


def test_a_card_with_fewer_processors_splits_less(on: Callable[[str], Any]) -> None:
    found = {}
    for name in ("T4", "H100"):
        on(name)
        x = torch.randn(1 << 24, device="cuda")
        found[name] = made(x.sum)[1]
    assert found["T4"] < found["H100"]


def test_order_of_dimensions_does_not_matter_where_it_lies_the_same(on: Callable[[str], Any]) -> None:
    on("A100-40GB")
    x = torch.randn(64, 128, 512, device="cuda")
    plain = made(lambda: x.sum((0, 1)))
    moved = made(lambda: x.permute(2, 0, 1).sum((1, 2)))
    assert plain == moved


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (0, 3), (5, 0)])
def test_odd_shapes_take_nothing(on: Callable[[str], Any], shape: tuple[int, ...]) -> None:
    on("T4")
    x = torch.zeros(shape, device="cuda")
    assert all(size <= 24 for size in made(lambda: (x.sum(), x.sum(-1) if shape else None, x.mean())))
