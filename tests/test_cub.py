"""What CUB takes, worked out by hand from its policies: threads times items are a tile, and a tile has a state."""

from __future__ import annotations

import pytest
import torch
from asked_for import made

from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.operators.cub import Cub, cub_of

OLD, TOOLKIT_12_4, TOOLKIT_12_6, TOOLKIT_12_8, THREE = (2, 0), (2, 3), (2, 5), (2, 7), (3, 0)
TURING, AMPERE, ADA, HOPPER, BLACKWELL = (7, 5), (8, 0), (8, 9), (9, 0), (10, 0)
COUNT = 40_000_000
# Of a hundred multiprocessors.
SM = 100


def cub(version: tuple[int, int], capability: tuple[int, int]) -> Cub:
    return Cub(version, capability, (SM, 1024 if capability == TURING else 1536 if capability == ADA else 2048))


def up(size: int) -> int:
    return -(-size // 256) * 256


def states(tile: int, each: int, count: int = COUNT) -> int:
    """One block of a state for each tile, and 32 before them."""
    return up((-(-count // tile) + 32) * each) + 255


def test_a_scan_has_tiles_of_fifteen_items_of_four_bytes_on_every_card() -> None:
    for capability in (TURING, AMPERE, ADA, HOPPER, BLACKWELL):
        for version in (OLD, TOOLKIT_12_4, TOOLKIT_12_8):
            one = cub(version, capability)
            # A sum and whether it is there, in one word of twice the size; seven items of eight bytes.
            assert one.scan(COUNT, 4) == states(128 * 15, 8)
            assert one.scan(COUNT, 8) == states(128 * 7, 16)
            assert one.scan(COUNT, 2) == states(128 * 30, 4)
        # Aligned twice.
        assert cub(THREE, capability).scan(COUNT, 4) == states(128 * 15, 8) + 256


def test_sums_of_a_class_lie_apart_from_whether_they_are_there() -> None:
    count = -(-COUNT // (128 * 30)) + 32
    # In a byte, later in four; each tile's own sum and the sum up to it; one block inside another.
    assert cub(OLD, AMPERE).scan(COUNT, 2, is_number=False) == up(up(count) + 2 * up(2 * count) + 255) + 255
    inner = up(4 * count) + 2 * up(2 * count) + 255
    assert cub(TOOLKIT_12_4, AMPERE).scan(COUNT, 2, is_number=False) == up(inner) + 255
    assert cub(THREE, AMPERE).scan(COUNT, 2, is_number=False) == up(inner) + 255


def test_cubs_own_sums_have_policies() -> None:
    assert cub(OLD, AMPERE).scan(COUNT, 4, by_sum=True) == states(128 * 15, 8)
    assert cub(TOOLKIT_12_4, AMPERE).scan(COUNT, 4, by_sum=True) == states(320 * 12, 8)
    assert cub(TOOLKIT_12_4, ADA).scan(COUNT, 4, by_sum=True) == states(128 * 15, 8)
    assert cub(TOOLKIT_12_4, HOPPER).scan(COUNT, 4, by_sum=True) == states(128 * 24, 8)
    assert cub(THREE, BLACKWELL).scan(COUNT, 4, by_sum=True) == states(128 * 24, 8) + 256


@pytest.mark.parametrize(
    ("version", "capability", "tile"),
    [
        (OLD, AMPERE, 128 * 5),
        (OLD, HOPPER, 128 * 5),
        (TOOLKIT_12_4, TURING, 128 * 5),
        (TOOLKIT_12_4, AMPERE, 384 * 6),
        (TOOLKIT_12_4, ADA, 128 * 5),
        (TOOLKIT_12_4, HOPPER, 384 * 11),
        # Known to CUB 3 only.
        (TOOLKIT_12_8, BLACKWELL, 384 * 11),
        (THREE, BLACKWELL, 320 * 11),
    ],
)
def test_places_are_chosen_by_tiles_of_the_generation(
    version: tuple[int, int], capability: tuple[int, int], tile: int
) -> None:
    assert cub(version, capability).flagged(COUNT, 8) == states(tile, 8) + (256 if version == THREE else 0)


def test_those_that_differ_from_the_one_before_have_other_tiles() -> None:
    assert cub(TOOLKIT_12_4, ADA).differing(COUNT, 4) == states(128 * 10, 8)
    assert cub(TOOLKIT_12_4, AMPERE).differing(COUNT, 4) == states(256 * 18, 8)
    assert cub(TOOLKIT_12_4, AMPERE).differing(COUNT, 8) == states(192 * 10, 8)
    assert cub(TOOLKIT_12_4, HOPPER).differing(COUNT, 4) == states(384 * 17, 8)
    assert cub(THREE, BLACKWELL).differing(COUNT, 4) == states(384 * 15, 8) + 256
    assert cub(THREE, BLACKWELL).differing(COUNT, 8) == states(384 * 11, 8) + 256
    # A class, which no policy is for.
    assert cub(THREE, HOPPER).differing(COUNT, 2, is_number=False) == states(128 * 10, 8) + 256


def test_the_first_of_each_key() -> None:
    assert cub(OLD, AMPERE).first_of_each(COUNT, 8, 4) == states(64 * 5, 8)
    assert cub(TOOLKIT_12_4, AMPERE).first_of_each(COUNT, 8, 4) == states(256 * 7, 8)
    assert cub(TOOLKIT_12_4, AMPERE).first_of_each(COUNT, 4, 4) == states(256 * 11, 8)
    assert cub(TOOLKIT_12_4, HOPPER).first_of_each(COUNT, 8, 4) == states(640 * 7, 8)
    # Counted in eight bytes.
    for version in (TOOLKIT_12_6, TOOLKIT_12_8):
        assert cub(version, AMPERE).first_of_each(COUNT, 8, 4) == states(256 * 7, 16)
    assert cub(THREE, AMPERE).first_of_each(COUNT, 8, 8) == states(192 * 7, 16) + 256


def test_elements_that_differ_take_their_values_along_by_cubs_kernel_since_2_5() -> None:
    """As 2.7's and 2.9's CUDA builds ask for 1,000,000 of them (`unique` with counts, `coalesce`)."""
    assert cub(TOOLKIT_12_4, AMPERE).unique_by_key(1_000_000) == 26_111
    for version in (TOOLKIT_12_6, TOOLKIT_12_8):
        assert cub(version, AMPERE).unique_by_key(1_000_000) == 7_167
        assert cub(version, AMPERE).unique_by_key(100_000) == 1_791


def test_a_sum_has_one_for_each_block_that_may_run() -> None:
    for capability, at_a_time in ((TURING, 4), (AMPERE, 8), (ADA, 6), (HOPPER, 8)):
        assert cub(THREE, capability).sum(COUNT) == up(4 * SM * at_a_time * 5) + 255


def sorted_in(tile: int, passes: int, key: int, value: int, count: int = 1_000_000) -> int:
    copies = up(count * key) + up(count * value) if passes > 1 else 0
    return passes * 2048 + -(-count // tile) * 1024 + copies + 256 + 255


@pytest.mark.parametrize(
    ("version", "capability", "key", "value", "tile"),
    [
        # 23 items of four bytes: eleven of eight, or with keys and values of four twice as many.
        (THREE, TURING, 4, 8, 256 * 11),
        (THREE, TURING, 8, 8, 256 * 11),
        (THREE, TURING, 4, 4, 256 * 46),
        # 17 of keys of four bytes, else 21.
        (THREE, AMPERE, 4, 8, 384 * 8),
        (THREE, AMPERE, 4, 4, 384 * 17),
        (THREE, AMPERE, 8, 8, 384 * 10),
        (THREE, AMPERE, 8, 0, 384 * 10),
        (THREE, ADA, 8, 8, 384 * 10),
        # Policies of Hopper's own came after 2.0.
        (OLD, HOPPER, 4, 8, 384 * 8),
        (THREE, HOPPER, 4, 8, 384 * 14),
        (THREE, HOPPER, 8, 8, 384 * 12),
        (THREE, HOPPER, 8, 0, 384 * 15),
        (THREE, HOPPER, 2, 8, 512 * 11),
        (THREE, BLACKWELL, 4, 8, 384 * 14),
    ],
)
def test_a_sort_passes_over_eight_bits_at_a_time(
    version: tuple[int, int], capability: tuple[int, int], key: int, value: int, tile: int
) -> None:
    assert cub(version, capability).radix_sort(1_000_000, key, value) == sorted_in(tile, key, key, value)


def test_fewer_bits_are_fewer_passes_and_one_needs_no_copy() -> None:
    assert cub(THREE, AMPERE).radix_sort(1_000_000, 8, 8, 9) == sorted_in(384 * 10, 2, 8, 8)
    assert cub(THREE, AMPERE).radix_sort(1_000_000, 8, 8, 8) == sorted_in(384 * 10, 1, 8, 8)
    # 19 items of four bytes for each of 256 threads are sorted at once.
    assert cub(THREE, AMPERE).radix_sort(256 * 9, 8, 8) == 1
    assert cub(THREE, AMPERE).radix_sort(256 * 19 + 1, 4, 0) > 1


def test_floats_alone_have_an_item_less_on_hopper() -> None:
    assert cub(THREE, HOPPER).radix_sort(1_000_000, 4, 0) == sorted_in(384 * 19, 4, 4, 0)
    assert cub(THREE, HOPPER).radix_sort(1_000_000, 4, 0, floats=True) == sorted_in(384 * 18, 4, 4, 0)
    # With values they have as many, and before Hopper, too.
    assert cub(THREE, HOPPER).radix_sort(1_000_000, 4, 8, floats=True) == cub(THREE, HOPPER).radix_sort(1_000_000, 4, 8)
    assert cub(THREE, AMPERE).radix_sort(1_000_000, 4, 0, floats=True) == cub(THREE, AMPERE).radix_sort(1_000_000, 4, 0)


def test_small_keys_are_counted_in_a_table_before_hopper() -> None:
    copies = up(2_000_000) + up(8_000_000)
    # One block on each multiprocessor, five times, with 128 digits; and a tile of 512 x 11, in eight bytes.
    table = up(8 * (SM * 5 * 128 + 512 * 11))
    assert cub(THREE, AMPERE).radix_sort(1_000_000, 2, 8) == table + copies + 255
    # Two blocks, and 32 digits.
    table = up(8 * (SM * 2 * 5 * 32 + 512 * 11))
    assert cub(THREE, ADA).radix_sort(1_000_000, 1, 8) == table + up(1_000_000) + up(8_000_000) + 255


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("A100-40GB,torch=2.4", (OLD, AMPERE, (108, 2048))),
        ("T4,torch=2.5", (TOOLKIT_12_4, TURING, (40, 1024))),
        ("A100-40GB,torch=2.10", (TOOLKIT_12_8, AMPERE, (108, 2048))),
        ("H100,torch=2.11", (THREE, HOPPER, (132, 2048))),
    ],
)
def test_the_devices_pytorch_has_a_cub(spec: str, expected: Cub) -> None:
    machine = gpu.turn_on(spec)
    try:
        assert cub_of(machine.engine, 0) == expected
    finally:
        gpu.turn_off()


def test_positions_from_a_mask() -> None:
    gpu.turn_on("A100-40GB,total=1GiB,context=0MiB,torch=2.6")
    try:
        mask = torch.ones(1, 300, dtype=torch.int64, device="cuda")
        # One row alone is CUB's: one tile of 896, of 16 bytes, and 32 before it.
        assert made(lambda: mask.cumsum(-1)) == [2400, 768 + 255]
        assert made(lambda: mask.t().cumsum(0)) == [2400, 768 + 255]
        assert made(lambda: mask.expand(2, -1).contiguous().cumsum(-1))[1:] == [4800]
        assert made(lambda: mask[0].cumsum_(0)) == [768 + 255]
        # In the result's type first.
        assert made(lambda: (mask[0] > 0).cumsum(0))[1:] == [2400, 2400, 768 + 255]
        assert made(lambda: mask[0].half().cumprod(0))[1:] == [600, 256 + 256 + 256 + 256 + 255]
        assert made(lambda: mask[0].float().logcumsumexp(0))[1:] == [1200, 512 + 255]
        assert made(lambda: mask[0, 0].cumsum(0)) == [8]
        torch.use_deterministic_algorithms(True)
        # Sums of floating numbers, of each of two blocks of 8192.
        assert made(lambda: torch.ones(10_000, device="cuda").cumsum(0))[1:] == [40_000, 8]
        assert made(lambda: mask.cumsum(-1))[-1] == 768 + 255
    finally:
        torch.use_deterministic_algorithms(False)
        gpu.turn_off()
