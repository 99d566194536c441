"""What kernels take that write into `out=`, or in place: the sizes are those of the results that the operator would return."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from asked_for import made, steps

from gpumem_magic.virtual import gpu


@pytest.fixture(autouse=True)
def machine() -> Iterator[Any]:
    yield gpu.turn_on("H100,torch=2.11")
    gpu.turn_off()


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device="cuda")


@pytest.mark.parametrize("function", [torch.cummax, torch.cummin])
def test_extremes_so_far_are_written_where_they_shall_be(function: Any) -> None:
    source, out = zeros(4, 6), (zeros(4, 6), zeros(4, 6, dtype=torch.int64))
    assert made(lambda: function(source, 1, out=out)) == []
    # Results that do not lie side by side are made so, and copied.
    turned = zeros(6, 4).t(), zeros(6, 4, dtype=torch.int64).t()
    assert made(lambda: function(source, 1, out=turned)) == [96, 192]
    # Tensors of another size are given theirs.
    small = zeros(0), zeros(0, dtype=torch.int64)
    assert made(lambda: function(source, 1, out=small)) == [96, 192]
    assert small[0].shape == small[1].shape == (4, 6)


def test_the_most_frequent_is_written_where_it_shall_be() -> None:
    source, out = zeros(4, 6), (zeros(4), zeros(4, dtype=torch.int64))
    assert made(lambda: torch.mode(source, 1, out=out)) == []
    assert made(lambda: torch.mode(source.t(), 0, out=out)) == []
    # The dimension is brought to the end, in a copy.
    assert made(lambda: torch.mode(source, 0, out=(zeros(6), zeros(6, dtype=torch.int64))))[-1] == 96
    small = zeros(0), zeros(0, dtype=torch.int64)
    torch.mode(source, 1, keepdim=True, out=small)
    assert small[0].shape == small[1].shape == (4, 1)


def test_what_has_no_shape_rule_has_that_of_what_it_returns() -> None:
    source, channels = zeros(2, 3), [zeros(3) for _ in range(4)]
    out = zeros(0), zeros(3), zeros(3)
    normed: Any = torch._native_batch_norm_legit  # type: ignore[attr-defined]
    assert made(lambda: normed(source, *channels, True, 0.1, 1e-5, out=out)) == [24]
    assert out[0].shape == (2, 3)


def test_counts_are_made_and_copied() -> None:
    source, out = zeros(50), zeros(7)
    assert steps(lambda: torch.histc(source, 7, 0, 1, out=out)) == [("alloc", 28), ("free_requested", 28)]


def test_a_sum_of_products_makes_what_it_is_added_to_as_large() -> None:
    target, left, right = zeros(1), zeros(5, 5, 5), zeros(5, 5, 10)
    assert made(lambda: target.addbmm_(left, right))[:1] == [200]
    assert target.shape == (5, 10)
    with pytest.raises(RuntimeError, match="expanded size"):
        zeros(3).addbmm_(left, right)


def test_a_number_that_is_summed_up_in_place_is_copied() -> None:
    number, integer = zeros(), zeros(dtype=torch.int64)
    assert made(lambda: number.cumsum_(0)) == [4]
    assert made(lambda: integer.cumprod_(0)) == [8]
    assert made(lambda: number.cumsum(0)) == [4]
