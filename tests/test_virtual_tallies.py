"""Masks whose values are stand-ins: what is counted of them and what is selected by them is the same number."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from gpumem_magic.virtual import gpu

ROWS = 2000


@pytest.fixture(autouse=True, params=["T4", "T4,values=auto"])
def device(request: pytest.FixtureRequest) -> Iterator[gpu.VirtualMachine]:
    yield gpu.turn_on(request.param)
    gpu.turn_off()


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(ROWS, 3, device="cuda"), torch.randn(ROWS, device="cuda")


def counted_and_then_selected() -> tuple[int, int]:
    x, scores = rows()
    keep = scores > 0.5
    count = keep.sum().item()
    return int(count), len(x[keep])


def counted_by_the_function() -> tuple[int, int]:
    x, scores = rows()
    keep = (scores > 0) & (scores < 1)
    count = int(torch.count_nonzero(keep))
    return count, torch.masked_select(x, keep[:, None]).numel() // 3


def selected_and_then_counted() -> tuple[int, int]:
    x, scores = rows()
    keep = scores < 0
    chosen = next(x[where] for where in (keep,))
    return int(keep.sum()), len(chosen)


def counted_first_and_read_last() -> tuple[int, int]:
    x, scores = rows()
    keep = scores < 0
    count = keep.sum()
    chosen = next(x[where] for where in (keep,))
    return int(count), len(chosen)


def shaped_by_the_count() -> tuple[int, int]:
    x, scores = rows()
    keep = scores > 1e-4
    count = keep.sum()
    if count == 0:
        return 0, 0
    return int(count), len(x[keep].view(count, 1, 3))


def gone_on_with_where_some_are_left() -> tuple[int, int]:
    x, scores = rows()
    keep = scores > 0
    if keep.sum() > 0 and keep.any():
        return len(x[keep]), int(keep.sum())
    return -1, ROWS


@pytest.mark.parametrize(
    "program",
    [
        counted_and_then_selected,
        counted_by_the_function,
        selected_and_then_counted,
        counted_first_and_read_last,
        shaped_by_the_count,
        gone_on_with_where_some_are_left,
    ],
)
def test_a_masks_count_is_what_it_selects(program: Callable[[], tuple[int, int]]) -> None:
    counted, selected = program()
    assert counted == selected == ROWS


def test_a_count_ends_where_the_mask_is_written_to() -> None:
    gpu.turn_off()
    gpu.turn_on("T4")
    x, scores = rows()
    keep = scores > 0
    chosen = next(x[where] for where in (keep,))
    keep.logical_and_(scores < -1)
    number = keep.sum()
    assert (len(chosen), int(number)) == (ROWS, 0)


def test_a_mask_selects_as_many_each_time() -> None:
    """(Of what is known and of what is not: the first mask was shown to be true everywhere, so the other is nowhere.)"""
    steps = torch.linspace(0, 1, 40).cuda().expand(10, 40).contiguous()
    heights, bounds = torch.randn(10, 40, device="cuda"), torch.zeros(10, 40, device="cuda")
    low = heights <= steps
    bounds[low] = heights[low]
    others = ~low & (heights + steps > 0)
    found = [len(one[others]) for one in (heights, steps, heights, bounds)]
    assert len(set(found)) == 1
    bounds[others] = 2.0 * heights[others].sqrt() / steps[others]


def test_what_is_only_counted_stays_a_stand_in() -> None:
    """(Or all answers would be said to be right.)"""
    gpu.turn_off()
    gpu.turn_on("T4")
    answers, labels = torch.randn(ROWS, device="cuda"), torch.randn(ROWS, device="cuda")
    right = answers.round() == labels.round()
    assert int(right.sum()) == 0


@pytest.mark.parametrize("is_none", [torch.isnan, torch.isinf])
def test_a_search_for_what_is_no_number_finds_nothing(is_none: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x, scores = rows()
    wrong = is_none(scores)
    if wrong.any():
        raise AssertionError(x[wrong])
    assert int(wrong.sum()) == 0
