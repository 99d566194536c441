"""What kernels hold while they run, by PyTorch's source: sorting, choosing, writing through indices, copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from asked_for import made, steps
from hypothesis import given
from hypothesis import strategies as st
from scratch_memory import scratch

import gpumem_magic
from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.operators.cub import Cub
from gpumem_magic.virtual.operators.matrices_as_they_lie import fits_blas
from gpumem_magic.virtual.operators.sorting import sort_blocks

# That of PyTorch 2.13 on the card of the tests, and what it sorts in.
CUB = Cub((3, 0), (8, 0), (108, 2048))
radix_bytes = CUB.radix_sort


@pytest.fixture(autouse=True)
def machine() -> Iterator[gpu.VirtualMachine]:
    # (The figures are those of this version, whichever is installed.)
    yield gpu.turn_on("virtual:8GiB,context=0MiB,torch=2.13")
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
    assert scratch(lambda: x.sort()) == x.numel() * 8 + blocks(x.numel() * (4 + 8) + 255)


def test_rows_that_lie_apart_are_gathered_first() -> None:
    x = torch.zeros(8192, 128, device="cuda")
    count = x.numel()
    assert scratch(lambda: x.sort(dim=0)) == count * (4 + 4 + 8) + count * 8 + blocks(count * (4 + 8) + 255)


def test_few_very_long_rows_are_sorted_one_after_the_other() -> None:
    x = torch.zeros(3, 1_000_000, device="cuda")
    # The places of one row, and for each what CUB takes: four histograms of 2048 bytes, 326 tiles of 3072, both lists again
    # (keys of four bytes, 4,000,000 of them, places of eight), four counters in 256 bytes, and up to 255 bytes in front.
    cub = 8192 + 326 * 1024 + 4_000_000 + 8_000_000 + 256 + 255
    assert made(x.sort)[2:] == [8_000_000, cub, cub, cub]


def test_bytes_are_counted_by_blocks() -> None:
    x = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    assert scratch(lambda: x.sort()) == (1 << 20) * 8 + blocks(radix_bytes(1 << 20, 1, 8))


def test_what_has_gaps_is_copied_before_it_is_sorted() -> None:
    # As PyTorch's own build of 2.13 asks. The results lie as the copy does, unless another dimension is sorted.
    gaps = torch.zeros(10_000, 2, device="cuda")[:, 0]
    assert made(lambda: gaps.sort())[:4] == [40_000, 80_000, 40_000, 80_000]
    assert made(lambda: gaps.sort())[4:] == [radix_bytes(10_000, 4, 8)]
    same = torch.zeros(10_000, device="cuda").expand(3, 10_000)
    assert made(lambda: same.sort(1))[:5] == [120_000, 240_000, 120_000, 240_000, 240_000]
    turned = torch.zeros(10_000, 3, device="cuda")
    assert made(lambda: turned.sort(0))[:5] == [120_000, 240_000, 120_000, 120_000, 240_000]


def test_the_most_frequent_flag_is_counted() -> None:
    flags = torch.zeros(2, 5000, dtype=torch.bool, device="cuda")
    # Sums of eight bytes of each block, and the result; a pair of sixteen (5 blocks of 2048 / 256 on 108 processors).
    counted, found = CUB.true_ones(), CUB.first_found()
    assert counted == 255 + 34_560 + 8 + (-34_560 % 256)
    assert made(lambda: flags.mode(1)) == [2, 16, 10_000, counted, found, counted, found]
    assert made(lambda: flags[:, :2048].contiguous().mode(1))[1:] == [2, 16]


def test_medians_let_go_of_the_places_first() -> None:
    x = torch.zeros(100, 10, device="cuda").t()
    freed = [size for action, size in steps(x.median) if action != "alloc"]
    # Of the sort, where each stood; then the places, and the copy.
    assert freed[1:3] == [8000, 4000]
    freed = [size for action, size in steps(x.nanmedian) if action != "alloc"]
    # Then of flags made numbers; half of the number of others, that number and how many there are, the flags, and the place.
    assert freed[3:] == [8000, 4, 8, 8, 1000, 8, 4000]


def test_argsort_lets_go_of_the_values() -> None:
    x = torch.zeros(1 << 20, device="cuda")
    assert scratch(lambda: x.argsort()) == (1 << 20) * (4 + 8) + blocks(radix_bytes(1 << 20, 4, 8))


@given(st.integers(1, 300), st.integers(1, 20000), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_a_sort_holds_between_one_row_and_nine_copies(rows: int, row: int, item: int, by_last: bool) -> None:
    count = rows * row
    held, steps = sort_blocks(CUB, count, row, item, [] if by_last else [count * item, count * item, count * 8])
    most = sum(held) + max(map(sum, steps))
    assert all(size >= 0 for size in [*held, *(size for step in steps for size in step)])
    # What CUB takes beside the copies are tables: 4 MiB and 55 KiB for keys of two bytes.
    assert row * 8 <= most <= 9 * count * 8 + 4_500_000


# ---- choosing


def test_few_chosen_of_short_rows_need_nothing() -> None:
    x = torch.zeros(64, 7_999, device="cuda")
    assert scratch(lambda: x.topk(50)) == 0
    assert scratch(lambda: x.t().topk(50, dim=0)) == blocks(64 * 7_999 * 4)


@pytest.mark.parametrize(
    ("slices", "size", "shared"),
    [
        (1, 19_999, False), (1, 20_000, True), (20, 19_999, False), (21, 10_000, True), (40, 9_999, False), (41, 8_000, True),
        (80, 7_999, False), (81, 5_000, True), (199, 4_999, False), (200, 3_000, True), (799, 2_999, False), (800, 800, True),
        (4_000, 799, False), (4_001, 400, True), (4_001, 399, False),
    ],
)  # fmt: skip
def test_several_blocks_choose_from_one_long_row(slices: int, size: int, shared: bool) -> None:
    x = torch.zeros(slices, size, dtype=torch.float16, device="cuda")
    assert (len(made(lambda: x.topk(2))) > 2) is shared


# 108 multiprocessors run six blocks of 256 threads with 40 registers each. 8 x 128,000 elements are 6.2 for each of their 165,888
# threads, so seven; 72 blocks of 1792 for each slice. A histogram of two bytes for each digit and block; sums of four bytes.
CHOSEN = [8 * 50 * 4, 8 * 50 * 8]
COUNTED = [576 * 256 * 2, 576 * 4, 576 * 4]
# One tile of 2304 blocks, and 32 states before it: 16 bytes each, then its key's 4.
BY_KEY = [768 + 256 + 255] * 2


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("2.6", [32, 32, 32, 32]),
        ("2.7", [32, 32, 64, 64]),
        # No semaphores, but each digit's sum in each slice.
        ("2.11", [32, 64, 64]),
    ],
)
def test_what_blocks_that_choose_together_share(version: str, known: list[int]) -> None:
    gpu.turn_on(f"virtual:8GiB,context=0MiB,torch={version}")
    x = torch.zeros(8, 128_000, device="cuda")
    sums = [8 * 256 * 4] if version == "2.11" else []
    assert made(lambda: x.topk(50)) == [*CHOSEN, *known, COUNTED[0], *sums, *COUNTED[1:], *BY_KEY]


def test_many_chosen_are_put_in_order_by_a_sort() -> None:
    x = torch.zeros(100_000, device="cuda")
    k = 50_000
    assert scratch(lambda: x.topk(k)) == blocks(k * 8, k * 4, k * 8, radix_bytes(k, 4, 8))
    assert scratch(lambda: x.topk(k, sorted=False)) < 1 << 17


def test_unique_values() -> None:
    x = torch.empty(1 << 18, dtype=torch.int64, device="cuda")
    n = (1 << 18) * 8
    # The sorted copy, CUB's, the result, how many there are, and the tiles of 192 x 10 that choose those which differ from
    # the one before: 137 of 8 bytes, 32 before them, aligned to 256 twice.
    differing = 1536 + 256 + 255
    assert made(x.unique) == [n, radix_bytes(1 << 18, 8, 0), n, 8, differing]
    # With the inverse: the sorted copy, the places, where they were. Then where each goes, whether it is another than the one
    # before, and the sums of that: 69 tiles of 320 x 12, in four bytes each.
    assert made(lambda: x.unique(return_inverse=True)) == [
        n, n, n, radix_bytes(1 << 18, 8, 8), n, n, 1024 + 256 + 255, n, 8, differing
    ]  # fmt: skip
    # Counts instead: the runs are found in 342 tiles of 128 x 6, of 16 bytes.
    assert made(lambda: x.unique(return_counts=True)) == [n, radix_bytes(1 << 18, 8, 0), n, 8, n, 6144 + 255]


def test_unique_flags_are_counted() -> None:
    x = torch.empty(5000, dtype=torch.bool, device="cuda")
    # How many are true (eight blocks of 256 threads at a time on each multiprocessor, five times), the two values, how often
    # each comes, and what each is.
    counts = 4 * 108 * 8 * 5
    assert made(lambda: x.unique(return_inverse=True)) == [4, counts + 128 + 255, 2, 16, 40_000]


def test_a_permutation_sorts_by_random_keys() -> None:
    # The keys' range, numbers in order, keys, keys in order. 16 bits are enough for 100 of them; 100,000 take 36, in keys of
    # eight bytes and five passes: five histograms, 27 tiles of 3840, both lists again, five counters, and 255 bytes in front.
    assert made(lambda: torch.randperm(100, device="cuda")) == [800, 8, 800, 400, 400, 1]
    cub = 5 * 2048 + 27 * 1024 + 2 * 800_000 + 256 + 255
    assert made(lambda: torch.randperm(100_000, device="cuda")) == [800_000, 8, *[800_000] * 3, cub]


def test_neighbours_that_are_the_same() -> None:
    x = torch.rand(1000, device="cuda")
    # The values, how many there are, and one tile's state of eight bytes with 32 before it.
    assert made(lambda: torch.unique_consecutive(x)) == [4000, 8, 512 + 256 + 255]
    # Where each went, and before that whether it differs, in four bytes, and their sums; the counts at the end: two tiles.
    with_all = made(lambda: torch.unique_consecutive(x, return_inverse=True, return_counts=True))
    assert with_all == [8000, 4000, 512 + 256 + 255, 4000, 8, 8000, 768 + 255]


def test_rows_that_are_the_same() -> None:
    rows = torch.empty(100, 50, device="cuda")
    # Their numbers, a copy of them with 256 bytes in a block that starts at one, and 33 states of eight bytes twice in blocks.
    assert made(lambda: torch.unique(rows, dim=0)) == [800, 1535, 1535, 20_000]
    # Columns are laid out as rows first; places and where they go, then one place more than there are.
    found = made(lambda: torch.unique(rows, dim=1, return_inverse=True, return_counts=True))
    assert found == [20_000, 400, 1023, 400, 400, 255, 1279, 408, 1535, 400, 255, 20_000]


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
    assert made(lambda: torch.zeros(1, 2049, device="cuda").mode())[:4] == [2049 * 4, 4, 8, 2049 * 4]


def test_the_median_of_numbers_sorts_them_and_counts_those_that_are_none() -> None:
    x = torch.zeros(1000, device="cuda")
    # Sorted, with places, and places for a moment; which are none, their count (in eight bytes each), half of the rest.
    sort = [4000, 8000, 8000]
    assert made(x.nanmedian)[:3] == sort
    assert made(x.nanmedian)[3:] == [1000, 8, 8000, 8, 4, 8, 4]


def test_a_draw_from_a_distribution() -> None:
    weights = torch.ones(4, 5_000, device="cuda")
    one = blocks(4 * 5_000 * 4)
    assert scratch(lambda: torch.multinomial(weights, 20, replacement=True)) == 3 * one
    # One row is added up by CUB.
    alone = made(lambda: torch.multinomial(weights[0], 20, replacement=True))
    assert alone == [20 * 8, *[20_000] * 3, *made(lambda: weights[0].cumsum(0))[1:]]
    # The result. The lowest and the highest weight, whether they are allowed, and both. The sum of each row, whether it is
    # zero, whether any is, that none is. A draw for each weight; and the twenty highest quotients.
    checked = [4, 4, 1, 1, 1, 16, 4, 1, 1]
    assert made(lambda: torch.multinomial(weights, 1)) == [4 * 8, *checked, 80_000]
    assert made(lambda: torch.multinomial(weights, 20)) == [4 * 20 * 8, *checked, 80_000, 4 * 20 * 4]
    # One row needs no "any".
    assert made(lambda: torch.multinomial(weights[0], 1)) == [8, 4, 4, 1, 1, 1, 4, 1, 1, 20_000]


def test_older_draws_look_for_the_highest_first_and_read_the_answers() -> None:
    gpu.turn_on("virtual:8GiB,context=0MiB,torch=2.11")
    weights = torch.ones(4, 5_000, device="cuda")
    assert made(lambda: torch.multinomial(weights, 1)) == [32, 4, 1, 4, 1, 1, 16, 4, 1, 1, 80_000]
    gpu.turn_on("virtual:8GiB,context=0MiB,torch=2.4")
    weights = torch.ones(4, 5_000, device="cuda")
    assert made(lambda: torch.multinomial(weights, 1)) == [32, 4, 1, 4, 1, 1, 16, 4, 1, 80_000]


def test_bins_look_for_the_ends_first() -> None:
    x = torch.zeros(1000, dtype=torch.int64, device="cuda")
    y = torch.zeros(1000, device="cuda")
    assert made(lambda: x.bincount(minlength=16)) == [8, 8, 128]
    assert made(lambda: y.histc(16)) == [64, 4, 4]
    assert made(lambda: y.histc(16, 0, 1)) == [64]
    assert made(lambda: y[:0].histc(16)) == [64]
    # Up to 2.12 one after the other.
    gpu.turn_on("virtual:8GiB,context=0MiB,torch=2.12")
    x = torch.zeros(1000, dtype=torch.int64, device="cuda")
    ends = [("alloc", 8), ("free_requested", 8)]
    assert steps(lambda: x.bincount(minlength=16)) == [*ends, *ends, ("alloc", 128)]


# ---- what a mask chooses

# 256 x 1024 elements are counted by up to eight blocks of 256 threads on each of 108 multiprocessors, five times as many as run
# at a time, with a sum of four bytes each (17,280, rounded up to 256). Then 114 tiles of 384 x 6 are chosen, with states of
# eight bytes and 32 before them (1,280, with another 256 to align them in CUB 3).
COUNTING = [4, 17_408 + 255]
CHOOSING = 1_280 + 256 + 255


def test_a_masks_places_are_numbers_for_each_dimension() -> None:
    mask = torch.empty(256, 1024, dtype=torch.bool, device="cuda")
    x = torch.zeros(256, 1024, device="cuda")
    count = 256 * 1024
    places = count * 2 * 8
    assert made(lambda: x[mask]) == made(lambda: x.masked_select(mask)) == [*COUNTING, places, CHOOSING, count * 4]
    assert made(lambda: mask.nonzero()) == [*COUNTING, places, CHOOSING]
    # Those of one dimension lie together.
    assert mask.nonzero().stride() == (1, count)
    # What lies across, and a mask for several, are laid out first.
    assert made(lambda: mask.t().nonzero())[0] == made(lambda: x.masked_select(mask[:1]))[0] == count


def test_few_elements_are_counted_by_one_block() -> None:
    # 16 elements for each of 256 threads.
    assert made(torch.empty(4096, device="cuda").nonzero)[:2] == [4, 1]
    assert made(torch.empty(4097, device="cuda").nonzero)[:2] == [4, 17_408 + 255]
    assert made(torch.ones((), device="cuda").nonzero) == [4, 1]
    assert made(torch.empty(0, 3, device="cuda").nonzero) == [4, 1, 256 + 256 + 255]


def test_older_searches_keep_the_counts_storage_until_the_next_is_there() -> None:
    mask = torch.empty(100, dtype=torch.bool, device="cuda")
    count, sum_, places, choice = [("alloc", 4)], ("alloc", 1), ("alloc", 800), ("alloc", 512 + 255)
    back = {size: ("free_requested", size) for size in (4, 1, 512 + 255)}
    gpu.turn_on("virtual:8GiB,context=0MiB,torch=2.5")
    mask = torch.empty(100, dtype=torch.bool, device="cuda")
    assert steps(mask.nonzero) == [*count, sum_, places, choice, back[1], back[767], back[4]]
    gpu.turn_on("virtual:8GiB,context=0MiB,torch=2.6")
    mask = torch.empty(100, dtype=torch.bool, device="cuda")
    assert steps(mask.nonzero) == [*count, sum_, back[1], places, choice, back[767], back[4]]


def test_a_list_of_fixed_length_has_each_blocks_count() -> None:
    # 123 tiles of 8192, on 216 blocks at a time for flags and 108 for numbers: then two for each, so 62 blocks.
    flags = torch.empty(1_000_000, dtype=torch.bool, device="cuda")
    assert made(lambda: torch.nonzero_static(flags, size=10)) == [80, 123 * 4, 123 * 8]
    assert made(lambda: torch.nonzero_static(flags.float(), size=10))[1:] == [80, 62 * 4, 62 * 8]


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
    assert made(by_mask) == [4, 1, 1000 * 8, 512 + 256 + 255]
    # A number stays on the host.
    assert made(filled) == []


def test_a_mask_with_known_values_is_counted() -> None:
    target = torch.zeros(4096, 64, device="cuda")
    mask = (torch.arange(4096) < 16).cuda()
    rows = torch.zeros(16, 64, device="cuda")

    def write() -> None:
        target[mask] = rows

    assert made(write)[2] == 16 * 8


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
    # The counts, and the mask laid out for all of them; 1171 tiles of 896 with states of 16 bytes, and 32 before them.
    tiles = 19_456 + 256 + 255
    assert made(lambda: words.masked_scatter(mask, images)) == [count * 2, count * 8, count, tiles]
    whole = mask.expand_as(words).contiguous()
    assert made(lambda: words.masked_scatter(whole, images)) == [count * 2, count * 8, tiles]

    def in_place() -> None:
        words.masked_scatter_(whole, images)

    assert made(in_place) == [count * 8, tiles]


def test_numbers_that_are_assigned_stay_on_the_host() -> None:
    x = torch.zeros(100, 16, device="cuda")
    places = torch.zeros(10, dtype=torch.int64, device="cuda")

    def write(index: Any) -> Callable[[], None]:
        def assign() -> None:
            x[index] = 1.0

        return assign

    mask = x > 0
    assert made(write(3)) == made(write(slice(3, 5))) == made(write(mask)) == []
    # Through indices it comes to the device.
    assert made(write(places)) == made(write((slice(None), places))) == [4]


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


def test_the_most_frequent_of_long_rows_is_found_by_sorting_each() -> None:
    """As an H100 was asked with 2.11: a copy; the places, the sort, a sum, what there is and how often, the runs, the most, its
    place."""
    gpu.turn_on("H100,torch=2.11,context=0MiB")
    rows = torch.arange(200_000).reshape(2, -1).remainder(2).to(torch.int32).to("cuda")
    of_a_row = [800_000, 1_228_159, 21_507, 8, 16, 2047, 767, 84_751]
    assert made(lambda: torch.mode(rows, -1)) == [8, 16, rows.nbytes, *of_a_row, *of_a_row]
    # Where values are not known all may differ. Half precision has no radix sort there.
    one = torch.randn(1_000_000, dtype=torch.float64, device="cuda")
    of_one = [8_000_000, 16_240_127, 21_507, 8_000_000, 8_000_000, 8447, 85_503, 84_751]
    assert made(lambda: torch.mode(one)) == [8, 8, one.nbytes, *of_one]
    half = torch.randn(5000, dtype=torch.float16, device="cuda")
    assert made(lambda: torch.mode(half))[3:5] == [40_000, 50_943]


def test_of_short_rows_one_kernel_finds_the_most_frequent() -> None:
    rows = torch.randn(3, 2048, device="cuda")
    assert made(lambda: torch.mode(rows, -1)) == [12, 24]
    assert made(lambda: torch.mode(rows.t(), 0)) == [12, 24]
    assert made(lambda: torch.mode(rows, 0)) == [8192, 16_384, rows.nbytes]


def test_reductions_of_complex_doubles_share_among_smaller_blocks() -> None:
    """Of 90,000 numbers 22 blocks of 256 threads have a part (an H100, 2.11); a norm in another type converts first."""
    gpu.turn_on("H100,torch=2.11,context=0MiB")
    numbers = torch.zeros(300, 300, dtype=torch.complex128, device="cuda")
    assert made(numbers.mean) == [16, 352, 4]
    lower = torch.zeros(1_000_000, dtype=torch.bfloat16, device="cuda")
    assert made(lambda: torch.norm(lower, dim=-1, dtype=torch.float64)) == [8, 8_000_000, 984, 4]
    assert made(lambda: torch.linalg.vector_norm(lower, dtype=torch.float32)) == [4, 492, 4]
