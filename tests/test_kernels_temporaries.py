"""What kernels take while they run: the gradients of embeddings and of bags of them, worked out by hand from the source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from asked_for import made
from torch import nn

import gpumem_magic
from gpumem_magic.units import MIB
from gpumem_magic.virtual import gpu


@pytest.fixture(autouse=True)
def machine() -> Iterator[gpu.VirtualMachine]:
    # 108 multiprocessors: below 432 blocks an embedding's gradient is added up in place.
    # (And of this version, whichever is installed.)
    yield gpu.turn_on("A100-40GB,total=1GiB,context=0MiB,torch=2.13")
    gpu.turn_off()


def of_gradient(
    count: int,
    rows: int = 1000,
    dtype: torch.dtype = torch.float32,
    by_frequency: bool = False,
    index: Any = torch.int64,
) -> list[int]:
    gradient = torch.zeros(count, 64, device="cuda", dtype=dtype)
    tokens = torch.zeros(count, dtype=index, device="cuda")
    return made(lambda: torch.ops.aten.embedding_dense_backward(gradient, tokens, rows, -1, by_frequency))


def test_few_indices_need_nothing_beside_the_gradient() -> None:
    assert of_gradient(3072) == [1000 * 64 * 4]


def sorting(passes: int) -> list[int]:
    """To sort 4096 indices: the sorted ones, where each stood, and for a moment where they stand and CUB's storage.

    That is a histogram of 2048 bytes for each pass, two tiles of 1024, both lists again where there are several, the passes'
    counters in a block of 256, 255 bytes to round up the start.
    """
    return [32768, 32768, 32768, passes * 2048 + 2048 + (2 * 32768 if passes > 1 else 0) + 256 + 255]


# Then where runs begin, and how many there are. They are found with a list of their numbers and CUB's four tiles of 192 x 7, each
# with 16 bytes, 32 before them. The parts of up to a thousand runs, and where they begin: two tiles of 896, or one.
FOUND = [32768, 8, 32768, 768 + 256 + 255]
COUNTED = 768 + 256 + 255


@pytest.mark.parametrize(
    ("dtype", "accumulated"), [(torch.float32, 4), (torch.float16, 4), (torch.bfloat16, 4), (torch.float64, 8)]
)
def test_more_are_sorted_and_their_runs_added_up_in_parts(dtype: torch.dtype, accumulated: int) -> None:
    # At most 1000 runs, and so 409 + 1000 parts of up to ten. A thousand rows have ten bits: two passes.
    lists = [*FOUND, 8000, 8000, COUNTED, 8, 1409 * 8]
    assert of_gradient(4096, dtype=dtype) == [*sorting(2), 1000 * 64 * dtype.itemsize, *lists, 1409 * 64 * accumulated]


def test_few_rows_are_added_up_in_the_gradient() -> None:
    # Ten runs of 64 threads are 10 blocks; 419 parts are more than four for each.
    lists = [*FOUND, 80, 80, COUNTED, 8, 419 * 8, 419 * 8]
    assert of_gradient(4096, 10) == [*sorting(1), 10 * 64 * 4, *lists]
    assert of_gradient(4096, 10, torch.float16) == [*sorting(1), 10 * 64 * 2, *lists, 10 * 64 * 4]
    torch.use_deterministic_algorithms(True)
    try:
        # (The numbers of the places are a range, which is filled.)
        held = sorting(1)
        assert of_gradient(4096, 10) == [*held[:3], 8, held[3], 10 * 64 * 4, *lists[:-1], 419 * 64 * 4]
    finally:
        torch.use_deterministic_algorithms(False)


def test_earlier_versions_keep_the_parts_of_few_rows_and_sort_by_all_bits() -> None:
    gpu.turn_off()
    gpu.turn_on("A100-40GB,torch=2.10,context=0MiB")
    # Numbers of four bytes, in three tiles of 256 x 7.
    lists = [32768, 8, 32768, 768 + 255, 80, 80, 768 + 255, 8, 419 * 8]
    assert of_gradient(4096, 10) == [*sorting(8), 10 * 64 * 4, *lists, 419 * 64 * 4]


def test_scaling_by_frequency_sorts_always_and_counts() -> None:
    # Up to 2304 pairs of eight bytes each are one tile of CUB's.
    lists = [8192, 8, 8192, COUNTED, 8000, 8000, COUNTED, 8, 1102 * 8]
    # One tile of 224 x 10 scans by key: 33 states of 16 bytes, and two keys.
    counts = [8192, COUNTED, COUNTED]
    assert of_gradient(1024, by_frequency=True) == [8192, 8192, 8192, 1, *counts, 256000, *lists, 1102 * 64 * 4]


@pytest.mark.parametrize(("card", "tile"), [("A100-40GB", 2240), ("H100", 2464), ("RTX3090", 2304), ("B200", 5888)])
def test_counts_are_scanned_in_tiles_of_the_cards_generation(card: str, tile: int) -> None:
    gpu.turn_off()
    gpu.turn_on(f"{card},context=0MiB,torch=2.13")
    tiles = -(-400000 // tile)
    up = lambda size: -(-size // 256) * 256  # noqa: E731
    counts = up(16 * (tiles + 32)) + up(8 * (tiles + 1)) + 255
    assert of_gradient(400000, by_frequency=True)[5:7] == [counts, counts]


def test_the_largest_norm_sorts_the_indices_and_finds_each_once() -> None:
    table = torch.zeros(1000, 16, device="cuda")
    tokens = torch.zeros(8, 500, dtype=torch.int64, device="cuda")
    run = lambda: torch.embedding_renorm_(table, tokens, 1.0, 2.0)  # noqa: E731
    # A copy, the indices in order, where they stood, and numbers to sort by; then each once, how many, and CUB's 32 + 11 states
    # of eight bytes in a block of its own.
    assert made(run) == [32000, 32000, 32000, 32000, 32000, 8, 512 + 256 + 255]
    gpu.turn_off()
    gpu.turn_on("A100-40GB,torch=2.11,context=0MiB")
    table = torch.zeros(1000, 16, device="cuda")
    tokens = torch.zeros(8, 500, dtype=torch.int64, device="cuda")
    # Each row of indices by itself.
    assert made(run) == [32000, 32000, 500 * 8, 32000, 8, 512 + 256 + 255]


def test_indices_of_four_bytes_make_shorter_lists() -> None:
    # One tile of 1920 sums of four bytes: 33 states of eight.
    found = [16384, 8, 16384, 768 + 256 + 255, 4000, 4000, 512 + 256 + 255, 8]
    assert of_gradient(4096, index=torch.int32)[5:] == [*found, 1409 * 4, 1409 * 64 * 4]


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_bag_sorts_always_and_has_parts_unless_it_takes_the_largest(mode: str) -> None:
    bag = nn.EmbeddingBag(10, 64, mode=mode, device="cuda")
    gradient = torch.ones(2, 64, device="cuda")
    out = bag(torch.zeros(1000, dtype=torch.int64, device="cuda"), torch.tensor([0, 500], device="cuda"))
    parts = [8000, 8000, 8000, 1, 2560, 8000, 8, 8000, COUNTED, 80, 80, COUNTED, 8, 110 * 8, 110 * 64 * 4]
    assert made(lambda: out.backward(gradient)) == ([2560] if mode == "max" else parts)


def test_a_bag_has_its_size_and_each_indexs_bag_before_its_result() -> None:
    bag = nn.EmbeddingBag(10, 64, mode="sum", device="cuda")
    indices, starts = torch.zeros(1000, dtype=torch.int64, device="cuda"), torch.tensor([0, 500], device="cuda")
    assert made(lambda: bag(indices, starts)) == [16, 8000, 512]


def test_a_gradient_that_is_not_contiguous_is_copied_first() -> None:
    table = nn.Embedding(128, 64, device="cuda")
    out = table(torch.zeros(1024, dtype=torch.int64, device="cuda"))
    gradient = torch.zeros(64, 1024, device="cuda").t()
    assert made(lambda: out.backward(gradient)) == [gradient.nbytes, table.weight.nbytes]


@pytest.mark.filterwarnings("ignore:where received a uint8 condition")
@pytest.mark.parametrize(("dtype", "copied"), [(torch.uint8, 1), (torch.bool, 0)])
def test_a_condition_of_bytes_is_made_one_of_flags(dtype: torch.dtype, copied: int) -> None:
    x, condition = torch.zeros(4 * MIB, device="cuda"), torch.zeros(4 * MIB, dtype=dtype, device="cuda")
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = torch.where(condition, x, x)
    assert torch.cuda.max_memory_allocated() - start == (4 + copied) * 4 * MIB
    assert torch.cuda.memory_allocated() - start == result.nbytes


def test_what_does_not_fit_is_out_of_memory_and_all_is_given_back() -> None:
    # A version that sorts by all bits.
    gpu.turn_on("A100-40GB,total=1GiB,context=0MiB,torch=2.11")
    table = nn.Embedding(128, 1024, device="cuda")
    tokens = torch.zeros(8, 1024, 8, dtype=torch.int64, device="cuda")
    gradient = torch.zeros(1, device="cuda").expand(*tokens.shape, 1024)
    start = torch.cuda.memory_allocated()
    # The gradient's copy of 256 MiB fits beside this, the segment of 20 MiB for what CUB sorts in does not.
    filler = torch.zeros(760 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        torch.ops.aten.embedding_dense_backward(gradient, tokens, 128, -1, False)
    del filler
    assert torch.cuda.memory_allocated() == start
    assert table.weight.grad is None


def test_the_report_knows_them_as_memory_of_the_backward_pass() -> None:
    table = nn.Embedding(128, 64, device="cuda")
    tokens = torch.zeros(8192, dtype=torch.int64, device="cuda")
    with gpumem_magic.measure() as measured:
        table(tokens).sum().backward()
    peak = measured.report.peak.categories
    assert peak["unknown"] == 0
    assert (peak["activation_gradients"] or 0) + (peak["temporaries"] or 0) >= 8192 * 64 * 4


def test_weights_in_eight_bits_are_multiplied_in_float32() -> None:
    weight = torch.ones(64, 1024, dtype=torch.int8, device="cuda")
    rows = torch.zeros(16, 1024, dtype=torch.bfloat16, device="cuda")
    factors = torch.ones(64, dtype=torch.bfloat16, device="cuda")
    product = 16 * 64
    assert made(lambda: torch._weight_int8pack_mm(rows, weight, factors)) == [
        2 * rows.nbytes,
        256,
        4 * product,
        2 * product,
    ]
    assert made(lambda: torch._weight_int8pack_mm(rows.float(), weight, factors.float()))[2:] == [4 * product]


def test_zero_points_of_channels_are_looked_through_before_rounding() -> None:
    x, scale = torch.zeros(4, 64, device="cuda"), torch.ones(64, device="cuda")
    integers, one = torch.zeros(64, dtype=torch.int32, device="cuda"), 4
    rounded, mask = x.nbytes, x.numel()
    channels = torch.fake_quantize_per_channel_affine
    assert made(lambda: channels(x, scale, integers, 1, -128, 127)) == [one, one, rounded, mask]
    assert made(lambda: channels(x, scale, scale, 1, -128, 127)) == [rounded, mask]
    assert made(lambda: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127)) == [rounded, mask]


def test_learnt_scales_have_a_gradient_for_every_element_first() -> None:
    x = torch.zeros(4, 64, device="cuda", requires_grad=True)
    scale, zeros = (torch.ones(64, device="cuda", requires_grad=True) for _ in range(2))
    size, channels, one = x.nbytes, 64 * 4, 4
    learnt = torch._fake_quantize_learnable_per_channel_affine
    arguments = (x, scale, zeros, 1, -128, 127, 1.0)
    # Zero points rounded, and made integers; looked through; the result and a mask.
    assert made(lambda: learnt(*arguments)) == [channels, channels, one, one, size, x.numel()]
    y, gradient = learnt(*arguments), torch.ones(4, 64, device="cuda")
    found = made(lambda: torch.autograd.grad(y, (x, scale, zeros), gradient))
    assert found == [channels, one, one, size, size, size, channels, channels]
    whole = torch._fake_quantize_learnable_per_tensor_affine
    scale, zeros = (torch.ones(1, device="cuda", requires_grad=True) for _ in range(2))
    y = whole(x, scale, zeros, -128, 127, 1.0)
    assert made(lambda: torch.autograd.grad(y, (x, scale, zeros), gradient)) == [size, size, size, one, one]


@pytest.mark.parametrize("mode", ["mean", "sum"])
def test_a_sparse_gradient_of_means_has_one_over_each_bags_size(mode: str) -> None:
    """As 2.5's and 2.10's CUDA builds ask for."""
    weight = torch.zeros(50, 8, device="cuda", requires_grad=True)
    indices, offsets = (
        torch.zeros(40, dtype=torch.int64, device="cuda"),
        torch.zeros(10, dtype=torch.int64, device="cuda"),
    )
    out = torch.nn.functional.embedding_bag(indices, weight, offsets, mode=mode, sparse=True)
    gradient = torch.ones_like(out)
    found = made(lambda: torch.autograd.grad(out, weight, gradient))
    assert found == [40 * 8 * 4, *([40, 40, 160] if mode == "mean" else [])]
