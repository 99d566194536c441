"""What PyTorch's own tests of CUDA do with tensors, and no program here had done: each with every kind of values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from asked_for import made
from torch import nn

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


def test_positions_are_written_where_they_shall_be() -> None:
    x = torch.tensor([1, 0, 2], device="cuda")
    grown, right, turned = (torch.empty(shape, dtype=torch.int64, device="cuda") for shape in (0, (2, 1), (1, 2)))
    assert torch.nonzero(x, out=grown) is grown
    assert grown.tolist() == [[0], [2]]
    assert len(made(lambda: torch.nonzero(x, out=right))) == len(made(lambda: torch.nonzero(x))) - 1
    assert torch.nonzero(x, out=turned.t()).tolist() == [[0], [2]]


@pytest.mark.parametrize("write", [lambda out: torch.arange(4, out=out), lambda out: torch.linspace(0, 3, 4, out=out)])
def test_what_is_made_in_order_keeps_the_shape_of_where_it_is_written(card_with_values: str, write: Any) -> None:
    whole = torch.zeros(2, 3, device="cuda")
    part = whole[:, 1:]
    # By way of a tensor in one piece.
    assert made(lambda: write(part)) == [16]
    assert part.shape == (2, 2)
    assert made(lambda: write(torch.zeros(4, device="cuda")))[1:] == []
    grown = torch.empty(0, device="cuda")
    write(grown)
    assert grown.shape == (4,)
    if "real" in card_with_values:
        assert grown.tolist() == [0.0, 1.0, 2.0, 3.0]
        assert whole.tolist() == [[0.0, 0.0, 1.0], [0.0, 2.0, 3.0]]


def test_asarray_copies_where_it_shall_and_only_there() -> None:
    x = torch.ones(3, device="cuda")
    assert torch.asarray(x).data_ptr() == torch.asarray(x, copy=False).data_ptr() == x.data_ptr()
    assert made(lambda: torch.asarray(x, copy=True)) == [12]
    with pytest.raises(ValueError, match="can't alias tensor with dtype 'Float' into dtype 'Double'"):
        torch.asarray(x, dtype=torch.float64, copy=False)
    with pytest.raises(ValueError, match="can't alias tensor from device 'cuda:0' to 'cpu'"):
        torch.asarray(x, device="cpu", copy=False)


def test_no_whole_numbers_are_drawn_as_shares() -> None:
    with pytest.raises(NotImplementedError, match="\"check_uniform_bounds\" not implemented for 'Long'"):
        torch.rand(3, dtype=torch.int64, device="cuda")


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_go_backward_again(kind: Any) -> None:
    layer = kind(4, 5, num_layers=2).cuda()
    x = torch.randn(3, 2, 4, device="cuda", requires_grad=True)
    out, _ = layer(x)
    for _ in range(2):
        out.sum().backward(retain_graph=True)
    first = x.grad
    assert first is not None
    out.sum().backward()
    assert torch.allclose(first, x.grad)  # type: ignore[arg-type]


def test_a_batch_norm_of_nothing_leaves_its_statistics() -> None:
    layer = nn.BatchNorm2d(3).cuda()
    x = torch.ones(0, 3, 2, 2, device="cuda", requires_grad=True)
    assert made(lambda: layer(x))[:3] == [12, 12]
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    assert layer.running_var.tolist() == [1.0] * 3
    assert F.batch_norm(
        torch.ones(0, device="cuda"), torch.zeros(3, device="cuda"), torch.ones(3, device="cuda")
    ).shape == (0,)


def test_a_margin_loss_of_one_sample_is_a_number() -> None:
    x, labels = torch.ones(4, device="cuda"), torch.zeros(4, dtype=torch.long, device="cuda")
    shapes = {F.multilabel_margin_loss(x, labels, reduction=kind).shape for kind in ("none", "mean", "sum")}
    assert shapes == {torch.Size([])}


def test_indices_and_offsets_of_bags_become_of_one_type() -> None:
    weight, shares = torch.randn(9, 4, device="cuda", requires_grad=True), torch.rand(6, device="cuda").requires_grad_()
    indices = torch.randint(9, (6,), device="cuda", dtype=torch.int32)
    offsets = torch.tensor([0, 3], device="cuda")

    def bags() -> torch.Tensor:
        return F.embedding_bag(indices, weight, offsets, mode="sum", per_sample_weights=shares)

    narrow = made(bags)
    bags().sum().backward()
    assert weight.grad is not None
    indices = indices.long()
    # The indices' copy comes first.
    assert narrow == [48, *made(bags)]


def test_no_places_are_scattered_to_in_any_order() -> None:
    """With fewer dimensions than what they are places in."""
    x, places = torch.ones(2, 2, device="cuda"), torch.empty(0, dtype=torch.int64, device="cuda")
    torch.use_deterministic_algorithms(True)
    try:
        assert made(lambda: x.scatter_(0, places, x.clone()))[1:] == []
        assert x.scatter_add(0, places, x).shape == (2, 2)
    finally:
        torch.use_deterministic_algorithms(False)


def test_ctc_takes_one_sequence_with_lengths_of_no_dimension() -> None:
    scores = torch.randn(50, 20, device="cuda").log_softmax(1)
    loss = F.ctc_loss(scores, torch.randint(1, 20, (30,), device="cuda"), torch.tensor(50), torch.tensor(30))
    assert loss.shape == ()


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
