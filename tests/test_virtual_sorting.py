"""What kernels hold while they run, by PyTorch's source: sorting, choosing, writing through indices, copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from asked_for import made
from hypothesis import given
from hypothesis import strategies as st
from scratch_memory import scratch

import gpumem_magic
from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.operators.copies import fits_blas
from gpumem_magic.virtual.operators.sorting import radix_bytes, sort_blocks


@pytest.fixture(autouse=True)
def machine() -> Iterator[gpu.VirtualMachine]:
    yield gpu.turn_on("virtual:8GiB,context=0MiB")
    gpu.turn_off()


def adding(target: torch.Tensor, places: tuple[torch.Tensor, ...], rows: torch.Tensor) -> Callable[[], None]:
    def add() -> None:
        target.index_put_(places, rows, accumulate=True)

    return add


def blocks(*sizes: int) -> int:
    return sum(-(-size // 512) * 512 for size in sizes)


# ---- sorts


def test_short_rows_are_sorted_in_place_with_one_row_of_places() -> None:
    x = torch.zeros(1000, 4096, device="cuda")
    assert scratch(lambda: x.sort()) == 4096 * 8


def test_one_long_row() -> None:
    x = torch.zeros(1 << 20, device="cuda")
    # The places, and what CUB takes for keys and places.
    expected = (1 << 20) * 8 + blocks(radix_bytes(1 << 20, 4, 8))
    assert scratch(lambda: x.sort()) == expected
    assert scratch(lambda: torch.sort(x, stable=True)) == expected


def test_few_long_rows_are_sorted_together() -> None:
    x = torch.zeros(16, 8192, dtype=torch.float16, device="cuda")
    count = x.numel()
    # Twice (row, place), the sorted keys, and what CUB takes for both.
    assert scratch(lambda: x.sort()) == count * (8 + 8 + 2) + blocks(radix_bytes(count, 2, 8))


def test_many_long_rows_are_sorted_by_segments() -> None:
    x = torch.zeros(128, 8192, device="cuda")
    assert scratch(lambda: x.sort()) == x.numel() * (8 + 4 + 8)


def test_rows_that_lie_apart_are_gathered_first() -> None:
    x = torch.zeros(8192, 128, device="cuda")
    count = x.numel()
    assert scratch(lambda: x.sort(dim=0)) == count * (4 + 4 + 8) + count * (8 + 4 + 8)


def test_bytes_need_one_pass_and_no_copy() -> None:
    x = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    assert scratch(lambda: x.sort()) == (1 << 20) * 8 + blocks(radix_bytes(1 << 20, 1, 8))
    assert radix_bytes(1 << 20, 1, 8) < 1 << 19


def test_argsort_lets_go_of_the_values() -> None:
    x = torch.zeros(1 << 20, device="cuda")
    assert scratch(lambda: x.argsort()) == (1 << 20) * (4 + 8) + blocks(radix_bytes(1 << 20, 4, 8))


@given(st.integers(1, 300), st.integers(1, 20000), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_a_sort_holds_between_one_row_and_nine_copies(rows: int, row: int, item: int, by_last: bool) -> None:
    count = rows * row
    held, steps = sort_blocks(count, row, item, by_last)
    most = sum(held) + max(map(sum, steps))
    assert all(size >= 0 for size in [*held, *(size for step in steps for size in step)])
    assert row * 8 <= most <= 9 * count * 8


# ---- choosing


def test_few_chosen_need_nothing() -> None:
    x = torch.zeros(64, 100_000, device="cuda")
    assert scratch(lambda: x.topk(50)) == 0
    assert scratch(lambda: x.t().topk(50, dim=0)) == 64 * 100_000 * 4


def test_many_chosen_are_put_in_order_by_a_sort() -> None:
    x = torch.zeros(100_000, device="cuda")
    k = 50_000
    assert scratch(lambda: x.topk(k)) == blocks(k * 8, k * 4, k * 8, radix_bytes(k, 4, 8))
    assert scratch(lambda: x.topk(k, sorted=False)) == 0


def test_unique_values() -> None:
    x = torch.empty(1 << 18, dtype=torch.int64, device="cuda")
    n = 1 << 18
    # The sorted copy, and CUB's; the result comes after CUB's is gone.
    assert scratch(lambda: torch.unique(x)) == n * 8 + blocks(radix_bytes(n, 8, 0)) - n * 8
    # With the inverse: where everything was, where everything goes, the sorted copy and what CUB takes, less the two results.
    expected = n * 8 * (1 + 2) + blocks(radix_bytes(n, 8, 8)) - 2 * n * 8
    assert scratch(lambda: torch.unique(x, return_inverse=True)) == expected


def test_a_permutation_sorts_by_random_keys() -> None:
    # Numbers in order, keys, keys in order. 16 bits are enough for 100 of them; 100,000 take 36, in keys of eight bytes and five
    # passes: five histograms, 27 tiles of 3840, both lists again, five counters, and up to 255 bytes in front.
    assert made(lambda: torch.randperm(100, device="cuda")) == [800, 800, 400, 400, 1]
    cub = 5 * 2048 + 27 * 1024 + 2 * 800_000 + 256 + 255
    assert made(lambda: torch.randperm(100_000, device="cuda")) == [800_000] * 4 + [cub]


def test_neighbours_that_are_the_same() -> None:
    x = torch.rand(1000, device="cuda")
    # The values and how many there are.
    assert made(lambda: torch.unique_consecutive(x)) == [4000, 8]
    # Where each went, and before that whether it differs, in four bytes; the counts at the end.
    with_all = made(lambda: torch.unique_consecutive(x, return_inverse=True, return_counts=True))
    assert with_all == [8000, 4000, 4000, 8, 8000]


def test_rows_that_are_the_same() -> None:
    rows = torch.empty(100, 50, device="cuda")
    assert made(lambda: torch.unique(rows, dim=0)) == [800, 20_000]
    # Columns are laid out as rows first; places and where they go, then one place more than there are.
    found = made(lambda: torch.unique(rows, dim=1, return_inverse=True, return_counts=True))
    assert found == [20_000, 400, 400, 400, 408, 400, 20_000]


def test_what_reads_rows_lays_them_out() -> None:
    rows = torch.zeros(100, 50, device="cuda")
    turned, chosen = rows.t(), rows > 0
    assert made(lambda: rows.cumsum(0)) == [20_000]
    assert made(lambda: turned.cumsum(0)) == made(lambda: turned.logcumsumexp(1)) == [20_000, 20_000]
    assert made(lambda: turned.cummax(0)) == [20_000, 40_000, 20_000]
    # In the result's type, and then in rows.
    assert made(lambda: chosen.cumsum(0)) == [40_000, 40_000]
    assert made(lambda: chosen.t().cumsum(0)) == [40_000, 40_000, 40_000]
    assert made(lambda: turned.kthvalue(2)) == made(lambda: turned.median(1)) == [20_000, 200, 400]
    assert made(lambda: rows.mode(1)) == [400, 800]
    assert made(lambda: rows.mode(0)) == [200, 400, 20_000]
    assert made(lambda: torch.zeros(1, 2049, device="cuda").mode()) == [2049 * 4, 4, 8, 2049 * 4]


def test_the_median_of_numbers_sorts_them_and_counts_those_that_are_none() -> None:
    x = torch.zeros(1000, device="cuda")
    # Sorted, with places, and places for a moment; which are none, their count (in eight bytes each), half of the rest.
    sort = [4000, 8000, 8000]
    assert made(x.nanmedian)[:3] == sort
    assert made(x.nanmedian)[3:] == [1000, 8, 8000, 8, 4, 8, 4]


def test_a_draw_from_a_distribution() -> None:
    weights = torch.zeros(4, 50_000, device="cuda")
    one = blocks(4 * 50_000 * 4)
    assert scratch(lambda: torch.multinomial(weights, 1)) == one
    assert scratch(lambda: torch.multinomial(weights, 20, replacement=True)) == 3 * one
    # The result, a draw for each weight, and the twenty highest quotients.
    assert made(lambda: torch.multinomial(weights, 20)) == [4 * 20 * 8, 4 * 50_000 * 4, 4 * 20 * 4]


def test_a_masks_places_are_numbers_for_each_dimension() -> None:
    mask = torch.empty(256, 1024, dtype=torch.bool, device="cuda")
    x = torch.zeros(256, 1024, device="cuda")
    assert scratch(lambda: torch.masked_select(x, mask)) == 256 * 1024 * 2 * 8


# ---- writing through indices


def test_the_gradient_of_an_index() -> None:
    table = torch.zeros(50_000, 64, device="cuda", requires_grad=True)
    places = torch.zeros(10_000, dtype=torch.int64, device="cuda")
    out = table[places]
    seed = torch.zeros_like(out)
    listed = blocks(10_000 * 8)
    # The places, sorted and not, twice; and what CUB takes for sixteen bits. The values are there.
    assert scratch(lambda: torch.autograd.grad(out, table, seed)) == 4 * listed + blocks(radix_bytes(10_000, 8, 8, 16))


def test_values_that_are_repeated_are_laid_out() -> None:
    target = torch.zeros(1000, 64, device="cuda")
    places = torch.zeros(4096, dtype=torch.int64, device="cuda")
    one = torch.zeros(64, device="cuda")

    assert scratch(adding(target, (places,), one)) == 4 * 4096 * 8 + blocks(radix_bytes(4096, 8, 8, 10)) + 4096 * 64 * 4


def test_few_rows_are_sorted_in_one_pass() -> None:
    target = torch.zeros(256, 64, device="cuda")
    places = torch.zeros(4096, dtype=torch.int64, device="cuda")
    rows = torch.zeros(4096, 64, device="cuda")
    sort = radix_bytes(4096, 8, 8, 8)
    assert sort < 4096 * 8
    assert scratch(adding(target, (places,), rows)) == 4 * 4096 * 8 + blocks(sort)


def test_two_indices_are_summed_up() -> None:
    target = torch.zeros(64, 64, device="cuda")
    places = torch.zeros(1 << 16, dtype=torch.int64, device="cuda")
    ones = torch.zeros(1 << 16, device="cuda")
    # 4096 places are twelve bits: two passes.
    assert scratch(adding(target, (places, places), ones)) == 4 * 8 * (1 << 16) + blocks(radix_bytes(1 << 16, 8, 8, 12))


def test_indices_that_are_apart_turn_the_target_around() -> None:
    target = torch.zeros(64, 1024, 64, device="cuda", requires_grad=True)
    places = torch.zeros(16, dtype=torch.int64, device="cuda")
    out = target[places, :, places]
    seed = torch.zeros_like(out)
    listed = 512
    assert scratch(lambda: torch.autograd.grad(out, target, seed)) == target.nbytes + 5 * listed


def test_without_accumulation_only_a_masks_places_are_found() -> None:
    target = torch.zeros(4096, 64, device="cuda")
    places = torch.zeros(4096, dtype=torch.int64, device="cuda")
    mask = torch.empty(4096, dtype=torch.bool, device="cuda")
    rows = torch.zeros(1000, 64, device="cuda")

    def by_places() -> None:
        target[places] = torch.zeros((), device="cuda")

    def by_mask() -> None:
        target[mask] = rows

    def filled() -> None:
        target[mask] = 0.0

    assert scratch(by_places) == 512
    assert scratch(by_mask) == blocks(1000 * 8)
    assert scratch(filled) <= 512


def test_a_mask_with_known_values_is_counted() -> None:
    target = torch.zeros(4096, 64, device="cuda")
    mask = (torch.arange(4096) < 16).cuda()
    rows = torch.zeros(16, 64, device="cuda")

    def write() -> None:
        target[mask] = rows

    assert scratch(write) == 512


def test_determinism_sorts_always() -> None:
    target = torch.zeros(50_000, 64, device="cuda")
    places = torch.zeros(4096, dtype=torch.int64, device="cuda")
    rows = torch.zeros(4096, 64, device="cuda")

    def write() -> None:
        target[places] = rows

    assert scratch(write) == 0
    torch.use_deterministic_algorithms(True)
    try:
        assert scratch(write) == 4 * 4096 * 8 + blocks(radix_bytes(4096, 8, 8, 16))
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_masked_scatter_counts_for_every_element() -> None:
    words = torch.zeros(2, 512, 1024, dtype=torch.bfloat16, device="cuda")
    images = torch.zeros(128, 1024, dtype=torch.bfloat16, device="cuda")
    mask = torch.zeros(2, 512, dtype=torch.bool, device="cuda")[..., None]
    count = words.numel()
    # The counts, and the mask laid out for all of them.
    assert scratch(lambda: words.masked_scatter(mask, images)) == count * 8 + count
    whole = mask.expand_as(words).contiguous()
    assert scratch(lambda: words.masked_scatter(whole, images)) == count * 8

    def in_place() -> None:
        words.masked_scatter_(whole, images)

    assert scratch(in_place) == count * 8


# ---- gradients that are written in place


WRITTEN: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda x, places: x[places],
    lambda x, places: x.gather(0, places[:, None].expand(-1, 64)),
    lambda x, places: x.index_select(0, places),
    lambda x, places: x.topk(3).values,
    lambda x, places: x.sort().values,
    lambda x, places: x.max(0).values,
    lambda x, places: x.take(places),
    lambda x, places: x.kthvalue(2).values,
]


@pytest.mark.parametrize("choose", WRITTEN)
def test_gradients_of_what_was_chosen_are_made_once(
    choose: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    x = torch.zeros(1 << 15, 64, device="cuda", requires_grad=True)
    places = torch.zeros(8, dtype=torch.int64, device="cuda")
    out = choose(x, places)
    seed = torch.zeros_like(out)
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    (gradient,) = torch.autograd.grad(out, x, seed)
    assert gradient.shape == x.shape
    assert x.nbytes <= torch.cuda.max_memory_allocated() - start < 1.01 * x.nbytes


def test_a_gradient_of_ones_own_may_keep_what_it_reads() -> None:
    class Added(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(places)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
            (places,) = ctx.saved_tensors
            more = gradient.index_add(0, places, gradient[: len(places)])
            assert more.data_ptr() != gradient.data_ptr()
            return more, None

    x = torch.zeros(64, 8, device="cuda", requires_grad=True)
    Added.apply(x, torch.zeros(4, dtype=torch.int64, device="cuda")).sum().backward()
    assert x.grad is not None


def test_the_gradient_of_such_a_gradient() -> None:
    x = torch.zeros(64, 8, device="cuda", requires_grad=True)
    places = torch.zeros(4, dtype=torch.int64, device="cuda")
    (gradient,) = torch.autograd.grad((x[places] ** 2).sum(), x, create_graph=True)
    gradient.sum().backward()
    assert x.grad is not None


# ---- copies


@pytest.mark.parametrize("function", [F.softmax, F.log_softmax])
def test_a_softmax_of_what_lies_across_copies_it(function: Callable[..., Any]) -> None:
    x = torch.zeros(512, 1024, device="cuda").t()
    assert scratch(lambda: function(x, -1)) == x.nbytes
    assert scratch(lambda: function(x.t(), -1)) == 0


def test_a_norm_of_what_lies_across_copies_it_both_ways() -> None:
    x = torch.zeros(8, 64, 32, 32, device="cuda").permute(0, 2, 3, 1).requires_grad_()
    out = F.layer_norm(x, (64,))
    with torch.no_grad():
        assert scratch(lambda: F.layer_norm(x, (64,))) == x.nbytes + 2 * 8 * 32 * 32 * 4
    seed = torch.zeros_like(out)
    assert scratch(lambda: torch.autograd.grad(out, x, seed)) >= x.nbytes


def test_products_of_rows_with_gaps_copy_them() -> None:
    # A version that keeps cuBLAS's workspace.
    gpu.turn_on("virtual:8GiB,context=0MiB,torch=2.13")
    torch.zeros(8, 8, device="cuda") @ torch.zeros(8, 8, device="cuda")
    wide = torch.zeros(512, 1024, device="cuda")
    weight = torch.zeros(512, 256, device="cuda")
    with_gaps = wide[:, ::2]
    assert scratch(lambda: with_gaps @ weight) == with_gaps.numel() * 4
    assert scratch(lambda: wide[:, :512] @ weight) == 0
    assert scratch(lambda: wide[:, :256].t() @ wide) == 0


@pytest.mark.parametrize(
    ("shape", "stride", "fits"),
    [
        ((4, 8), (8, 1), True),
        ((4, 8), (1, 4), True),
        ((4, 8), (16, 1), True),
        ((4, 8), (16, 2), False),
        ((4, 8), (0, 1), False),
        ((2, 4, 8), (0, 8, 1), True),
        ((2, 4, 8), (4, 16, 2), False),
    ],
)
def test_what_cublas_can_read(shape: tuple[int, ...], stride: tuple[int, ...], fits: bool) -> None:
    assert fits_blas(shape, stride) is fits


def test_norms_of_many_tensors_are_added_up_in_pieces() -> None:
    tensors = [torch.zeros(65536 * 10, device="cuda") for _ in range(100)]
    assert scratch(lambda: torch._foreach_norm(tensors)) == blocks(100 * 10 * 4)


def test_what_does_not_fit_is_out_of_memory_and_is_given_back() -> None:
    gpu.turn_on("virtual:256MiB,context=0MiB")
    x = torch.zeros(8 << 20, device="cuda")
    start = torch.cuda.memory_allocated()
    with pytest.raises(torch.OutOfMemoryError):
        x.sort()
    assert torch.cuda.memory_allocated() == start


def test_categories_add_up_over_all_of_them() -> None:
    x = torch.zeros(1 << 18, device="cuda", requires_grad=True)
    places = torch.zeros(1 << 16, dtype=torch.int64, device="cuda")
    with gpumem_magic.measure() as measured:
        values, order = x.sort()
        (values[places].sum() + x.topk(5000).values.sum()).backward()
        torch.unique(order)
    peak = measured.report.peak
    outside = ("cached", "context", "other_processes", "context_or_others")
    assert sum(size or 0 for name, size in peak.categories.items() if name not in outside) == peak.allocated
    assert peak.categories["unknown"] == 0


@pytest.mark.parametrize(
    ("count", "bits", "recorded"), [(1000, 14, 1), (2304, 14, 1), (4096, 14, 72_191), (8192, 14, 138_751)]
)
def test_what_cub_takes_is_what_was_recorded(count: int, bits: int, recorded: int) -> None:
    assert radix_bytes(count, 8, 8, bits) == recorded


def test_bits_decide_about_a_second_copy() -> None:
    assert radix_bytes(10_000, 8, 8, 9) - radix_bytes(10_000, 8, 8, 8) >= 160_000
    assert radix_bytes(10_000, 8, 8) > radix_bytes(10_000, 8, 8, 9)
