"""Writing through a list of indices where algorithms are deterministic, worked out by hand from the source."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from asked_for import made

from gpumem_magic.virtual import gpu

# The lowest and the highest index, each compared with what is allowed.
ENDS = [8, 8, 1, 1]
# An arange begins with no element, and grows: one of eight bytes is filled.
GROWN = 8


@pytest.fixture(autouse=True)
def machine() -> Iterator[None]:
    gpu.turn_on("A100-40GB,torch=2.13")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    gpu.turn_off()


def sorted_places(count: int, cub: int = 1) -> list[int]:
    """The places in order, where each stood, and their numbers, which CUB sorts: few in one tile."""
    listed = count * 8
    return [listed, listed, listed, GROWN, cub]


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device="cuda")


def test_what_is_added_by_index_is_multiplied_and_sorted() -> None:
    rows, index, values = zeros(100, 16), zeros(50, dtype=torch.int64), zeros(50, 16)
    one = [*ENDS, 400, 400, *sorted_places(50)]
    assert made(lambda: rows.index_add(0, index, values)) == [6400, 3200, *one]
    assert made(lambda: rows.index_add_(0, index, values, alpha=2)) == [3200, *one]
    # Indices of 32 bits are widened first.
    assert made(lambda: rows.index_add_(0, index.int(), values)) == [200, 400, 3200, *one]
    assert made(lambda: rows.index_copy(0, index, values)) == [6400, *one]
    torch.use_deterministic_algorithms(False)
    assert made(lambda: rows.index_add(0, index, values)) == [6400]
    assert made(lambda: rows.index_copy_(0, index, values)) == []


def test_the_bits_that_are_sorted_are_those_of_the_dimensions_before() -> None:
    target, index, values = zeros(10, 100, 4), zeros(5000, dtype=torch.int64), zeros(10, 5000, 4)
    # 1000 places have ten bits: two passes, with 2048 bytes each, two tiles of 1024, both lists again and a block of 256.
    cub = 2 * 2048 + 2 * 1024 + 2 * 40192 + 256 + 255
    assert made(lambda: target.index_copy_(1, index, values)) == [*ENDS, 40000, 40000, *sorted_places(5000, cub)]


Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.mark.filterwarnings("ignore:The reduce argument")
@pytest.mark.parametrize(
    "way",
    [
        lambda target, index, source: target.scatter_add_(0, index, source),
        lambda target, index, source: target.scatter_(0, index, source),
        lambda target, index, source: target.scatter_(0, index, source, reduce="add"),
        lambda target, index, source: target.scatter_reduce_(0, index, source, "sum"),
    ],
)
def test_a_scatter_has_an_index_for_each_dimension(way: Way) -> None:
    target, index, source = zeros(100, 16), zeros(50, 16, dtype=torch.int64), zeros(50, 16)
    listed = 50 * 16 * 8
    # The other dimension's places are an arange, which is laid out to find its ends.
    found = [16 * 8, GROWN, *ENDS, listed, listed, 8, 8, listed, 1, 1, listed, listed]
    assert made(lambda: way(target, index, source)) == [*found, *sorted_places(800)]
    flat, places, values = zeros(100), zeros(50, dtype=torch.int64), zeros(50)
    assert made(lambda: way(flat, places, values)) == [*ENDS, 400, 400, *sorted_places(50)]


@pytest.mark.parametrize("version", ["2.6", "2.8"])
def test_older_ones_have_one_list_of_all_places(version: str) -> None:
    gpu.turn_off()
    gpu.turn_on(f"A100-40GB,torch={version}")
    target, index, source = zeros(100, 16), zeros(50, 16, dtype=torch.int64), zeros(50, 16)
    listed = 50 * 16 * 8
    # Two coordinates for each place, filled dimension by dimension; times the strides, which come from the host; and added up.
    placed = [2 * listed, 16 * 8, GROWN, 2 * 8, 2 * listed, listed]
    # Each end is looked for by itself.
    one = [8, 1, 8, 1, listed, listed, *sorted_places(800)]
    assert made(lambda: target.scatter_add_(0, index, source)) == [*placed, *one]


def test_a_mean_counts_in_the_same_way() -> None:
    target, index, source = zeros(100), zeros(50, dtype=torch.int64), zeros(50)
    one = [*ENDS, 400, 400, *sorted_places(50)]
    # A one for each value, how many there are of each place, and where there are none.
    assert made(lambda: target.scatter_reduce_(0, index, source, "mean")) == [*one, 200, 400, *one, 100]
    assert made(lambda: target.scatter_reduce_(0, index, source, "amax")) == []
    torch.use_deterministic_algorithms(False)
    assert made(lambda: target.scatter_reduce_(0, index, source, "mean")) == [200, 400, 100]


def test_one_number_for_all_places_is_not_sorted_since_2_8() -> None:
    rows, index = zeros(100, 16), zeros(50, dtype=torch.int64)

    def write() -> None:
        rows[index] = 0.0

    assert made(write) == [4]
    for version in ("2.6", "2.7"):
        gpu.turn_off()
        gpu.turn_on(f"A100-40GB,torch={version}")
        rows, index = zeros(100, 16), zeros(50, dtype=torch.int64)
        assert made(write) == [4, 8, 1, 8, 1, 400, 400, 3200, *sorted_places(50)]


def test_blocks_share_the_ends_of_many_indices() -> None:
    torch.use_deterministic_algorithms(False)
    for version, ends in (
        ("2.3", [8, 200, 4] * 2),
        ("2.4", [8, 200, 4, 1] * 2),
        ("2.12", [8, 200, 4, 1] * 2),
        ("2.13", [8, 8, 400, 4, 1, 1]),
    ):
        gpu.turn_off()
        gpu.turn_on(f"A100-40GB,torch={version}")
        rows, index, values = zeros(100, 4), zeros(200_000, dtype=torch.int64), zeros(200_000, 4)
        found = made(lambda rows=rows, i=index, v=values: rows.index_put_((i,), v, accumulate=True))  # type: ignore[misc]
        assert found[: len(ends)] == ends


def test_indices_across_each_other_are_laid_out_for_their_ends_only() -> None:
    torch.use_deterministic_algorithms(False)
    rows, down, along = zeros(300, 40), zeros(50, 1, dtype=torch.int64), zeros(40, dtype=torch.int64)
    listed = 50 * 40 * 8
    ends = [8, 8, listed, 1, 1, listed, listed]
    values = zeros(50, 40)
    # 2000 places are one tile.
    wanted = [*ends, *ends, listed, listed, listed, 1]
    assert made(lambda: rows.index_put_((down, along), values, accumulate=True)) == wanted


def test_gradients_of_what_is_gathered_are_sorted_too() -> None:
    rows = zeros(100, 16).requires_grad_()
    index = zeros(50, dtype=torch.int64)
    picked = rows.index_select(0, index)
    gradient = zeros(50, 16)
    asked = made(lambda: picked.backward(gradient))
    assert asked == [6400, 3200, *ENDS, 400, 400, *sorted_places(50)]
