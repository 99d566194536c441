"""What sorting by a comparison of one's own takes: distinct rows and sparse elements, worked out by hand from the source."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from asked_for import made

from gpumem_magic.virtual import gpu

ROWS = 100_000


@pytest.fixture(autouse=True)
def machine() -> Iterator[None]:
    gpu.turn_on("A100-40GB,torch=2.13")
    yield
    gpu.turn_off()


def up(size: int) -> int:
    return -(-size // 256) * 256


def sorted_rows(lists: int, offset: int = 4) -> int:
    """Copies of so many lists, and a place for each tile of 2048 and one more."""
    return lists * up(ROWS * 8) + up((-(-ROWS // 2048) + 1) * offset) + 255


def found(tile: int, is_newest: bool = True) -> int:
    """How many there are, and a state of eight bytes for each tile and 32 more; blocks in blocks, one more since CUB 3.0."""
    states = up(8 * (-(-ROWS // tile) + 32)) + (256 if is_newest else 0)
    return 256 + states + 256 + 255


def rows() -> torch.Tensor:
    return torch.rand(ROWS, 3).cuda()


def test_numbers_of_rows_are_sorted_and_those_that_differ_picked() -> None:
    table = rows()
    listed = ROWS * 8
    picked = [found(64 * 5), ROWS * 3 * 4]
    assert made(lambda: table.unique(dim=0)) == [listed, sorted_rows(1), *picked]
    # In order by itself there is nothing to sort.
    assert made(lambda: table.unique_consecutive(dim=0)) == [listed, *picked]
    # The inverse: where rows differ, and its sums, in tiles of 288 x 11 with 16 bytes each, in two blocks.
    sums = up(16 * (-(-ROWS // 3168) + 32)) + 256 + 255
    with_inverse = [listed, sorted_rows(1), listed, listed, 255, sums, *picked]
    assert made(lambda: table.unique(dim=0, return_inverse=True)) == with_inverse
    # Counts are differences of the numbers at which rows begin, picked by CUB in tiles of 192 x 7.
    counted = [listed, sorted_rows(1), listed + 8, found(192 * 7), listed, 255, ROWS * 3 * 4]
    assert made(lambda: table.unique(dim=0, return_counts=True)) == counted


def test_older_ones_have_longer_offsets_and_thrusts_kernel_for_counts_too() -> None:
    gpu.turn_off()
    gpu.turn_on("A100-40GB,torch=2.6")
    table = rows()
    listed = ROWS * 8
    plain = found(64 * 5, is_newest=False)
    wanted = [listed, sorted_rows(1, 8), listed + 8, plain, listed, 255, ROWS * 3 * 4]
    assert made(lambda: table.unique(dim=0, return_counts=True)) == wanted


@pytest.mark.parametrize(("card", "tile"), [("A100-40GB", 192 * 7), ("H100", 448 * 11), ("T4", 64 * 5)])
def test_sparse_elements_are_sorted_by_their_places(card: str, tile: int) -> None:
    gpu.turn_off()
    gpu.turn_on(f"{card},torch=2.13")
    indices = torch.zeros(1, ROWS, dtype=torch.int64, device="cuda")
    sparse = torch.sparse_coo_tensor(indices, torch.zeros(ROWS, 4, device="cuda"), (50, 4))
    # The places, where each stood and where each begins, the sort of both, and at most fifty elements.
    listed = ROWS * 8
    lists = [listed, listed, listed, sorted_rows(2), found(tile)]
    assert made(sparse.coalesce) == [*lists, 50 * 4 * 4]
    two = torch.sparse_coo_tensor(indices.expand(2, ROWS), torch.zeros(ROWS, device="cuda"), (5, 10))
    # Of several dimensions each place has its numbers again.
    assert made(two.coalesce) == [*lists, 50 * 4, 2 * 50 * 8]


def test_what_a_dense_tensor_has_at_sparse_places_is_multiplied_by_one() -> None:
    dense = torch.zeros(50, 4, device="cuda")
    indices = torch.zeros(1, 10, dtype=torch.int64, device="cuda")
    mask = torch.sparse_coo_tensor(indices, torch.zeros(10, 4, device="cuda"), (50, 4))
    assert made(lambda: dense.sparse_mask(mask)) == [4, 160, 80, 160]
