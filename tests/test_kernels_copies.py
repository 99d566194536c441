"""What enlarging and looking up rows take beside their results, worked out by hand from the source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from asked_for import made

from gpumem_magic.virtual import gpu


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    gpu.turn_on("RTX3090")
    yield
    gpu.turn_off()


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_enlarging_takes_its_result_alone(dims: int, mode: str, inference: bool) -> None:
    x = torch.zeros(2, 8, *[16] * dims, device="cuda")
    with torch.inference_mode(inference):
        assert made(lambda: F.interpolate(x, scale_factor=2, mode=mode)) == [x.nbytes * 2**dims]


def test_three_dimensions_with_channels_last_are_enlarged_plainly() -> None:
    x = torch.zeros(2, 4, 4, 4, 16, device="cuda").permute(0, 4, 1, 2, 3)
    result = F.interpolate(x, scale_factor=2)
    assert not result.is_contiguous()
    assert made(lambda: F.interpolate(x, scale_factor=2)) == [x.nbytes * 8, x.nbytes * 8, x.nbytes]


@pytest.mark.parametrize("channels", [3, 4])
def test_two_dimensions_have_a_kernel_for_four_channels_last(channels: int) -> None:
    x = torch.zeros(2, channels, 16, 16, device="cuda").to(memory_format=torch.channels_last)
    beside = [] if channels == 4 else [x.nbytes * 4, x.nbytes]
    assert made(lambda: F.interpolate(x, scale_factor=2)) == [x.nbytes * 4, *beside]


def test_a_gradient_with_channels_last_is_made_by_their_kernel() -> None:
    x = torch.zeros(2, 8, 16, 16, device="cuda", requires_grad=True)
    gradient = torch.zeros(2, 8, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    call = torch.ops.aten.upsample_nearest2d_backward
    plain = made(lambda: call(gradient.contiguous(), [32, 32], x.shape, 2.0, 2.0))
    assert plain == [gradient.nbytes, x.nbytes]
    assert made(lambda: call(gradient, [32, 32], x.shape, 2.0, 2.0)) == [x.nbytes]


def test_indices_that_do_not_lie_in_a_row_are_copied_before_they_are_looked_up() -> None:
    rows = torch.zeros(100, 64, device="cuda")
    one = torch.zeros(1, 512, dtype=torch.int64, device="cuda")
    assert made(lambda: F.embedding(one, rows)) == [512 * 256]
    assert made(lambda: F.embedding(one.expand(8, 512), rows)) == [8 * 512 * 8, 8 * 512 * 256]
    assert made(lambda: F.embedding(one.view(16, 32).t(), rows)) == [512 * 8, 512 * 256]
    # Every second of a list can be looked up as it lies.
    assert made(lambda: F.embedding(one[0, ::2].view(2, 128), rows)) == [256 * 256]


def test_where_algorithms_are_deterministic_an_element_fills_the_rows() -> None:
    rows = torch.zeros(100, 64, device="cuda", dtype=torch.float16)
    indices = torch.zeros(512, dtype=torch.int64, device="cuda")
    settings: Any = torch.utils.deterministic
    torch.use_deterministic_algorithms(True)
    try:
        assert made(lambda: rows.index_select(0, indices)) == [512 * 128, 2]
        settings.fill_uninitialized_memory = False
        assert made(lambda: rows.index_select(0, indices)) == [512 * 128]
    finally:
        settings.fill_uninitialized_memory = True
        torch.use_deterministic_algorithms(False)
