"""What PyTorch's own tests of CUDA do with tensors, and no program here had done: each with every kind of values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from asked_for import made

pytestmark = pytest.mark.usefixtures("card_with_values")


def test_a_number_is_copied() -> None:
    x = torch.ones(3, device="cuda")
    assert made(lambda: x.copy_(2.5)) == []  # type: ignore[arg-type]
    assert x.tolist() == [2.5] * 3


def test_shifts_are_broadcast_as_other_operators() -> None:
    """`__lshift__` is not one that works in place, whatever its name ends with."""
    one, two = torch.ones((), dtype=torch.int64, device="cuda"), torch.full((2,), 3, device="cuda")
    assert (one << two).shape == (two >> one).shape == (2,)
    assert (one << two).tolist() == [8, 8]


def test_draws_are_written_into_tensors_of_any_type() -> None:
    odds = torch.full((100,), 0.5, device="cuda")
    out = torch.full((100,), 7, dtype=torch.uint8, device="cuda")
    assert torch.bernoulli(odds, out=out) is out
    grown = torch.empty(0, dtype=torch.int64, device="cuda")
    torch.bernoulli(odds, out=grown)
    assert grown.shape == (100,)
    assert grown.dtype == torch.int64


def test_nothing_is_drawn_of_nothing() -> None:
    nothing = torch.zeros(0, 3, device="cuda")
    for again in (False, True):
        assert made(lambda again=again: torch.multinomial(nothing, 2, replacement=again)) == []  # type: ignore[misc]
    assert torch.multinomial(nothing, 2).shape == (0, 2)


def test_what_a_mask_selects_is_written_where_it_shall_be() -> None:
    x, mask = torch.arange(5.0, device="cuda"), torch.tensor([True, False, True, False, True], device="cuda")
    grown, right = torch.empty(0, device="cuda"), torch.empty(3, device="cuda")
    assert torch.masked_select(x, mask, out=grown) is grown
    assert grown.tolist() == [0.0, 2.0, 4.0]
    new = made(lambda: torch.masked_select(x, mask))
    # All but the result itself, which is there.
    assert made(lambda: torch.masked_select(x, mask, out=right)) == new[:-1]


@pytest.mark.parametrize("card_with_values", ["T4,values=real"], indirect=True)
def test_cudnns_operators_are_computed_by_their_own_names() -> None:
    x, weight, turned = (torch.rand(shape) for shape in ((2, 3, 8, 8), (4, 3, 3, 3), (3, 4, 3, 3)))
    grid, theta = torch.rand(2, 5, 5, 2) * 2 - 1, torch.rand(2, 2, 3)
    flags = False, False, True
    library: Any = torch

    def near(ours: torch.Tensor, wanted: torch.Tensor) -> bool:
        return torch.allclose(ours.cpu(), wanted, atol=1e-5)

    x_there, grid_there = x.cuda(), grid.cuda()
    found = library.cudnn_convolution(x_there, weight.cuda(), (1, 1), (2, 2), (1, 1), 1, *flags)
    assert near(found, F.conv2d(x, weight, None, 2, 1))
    found = library.cudnn_convolution_transpose(x_there, turned.cuda(), (1, 1), (1, 1), (2, 2), (1, 1), 1, *flags)
    assert near(found, F.conv_transpose2d(x, turned, None, 2, 1, 1))
    assert near(library.cudnn_grid_sampler(x_there, grid_there), F.grid_sample(x, grid, align_corners=True))
    found = library.cudnn_affine_grid_generator(theta.cuda(), 2, 3, 4, 5)
    assert near(found, F.affine_grid(theta, [2, 3, 4, 5], align_corners=True))
