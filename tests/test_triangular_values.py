"""Causal masks are known in any size: matrices with one element on and below a diagonal, and another above it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.transformer import _detect_is_causal_mask

from gpumem_magic.virtual import gpu

# (More than what is known of floats, and of flags, element by element.)
LONG, LONGER = 40, 600


@pytest.fixture(autouse=True)
def machine() -> Iterator[gpu.VirtualMachine]:
    yield gpu.turn_on("T4")
    gpu.turn_off()


def values(machine: gpu.VirtualMachine, tensor: Any) -> Any:
    found = machine.engine.known(tensor)
    return None if found is None else found.host


def masks(size: int) -> Iterator[Any]:
    ones = torch.ones(size, size)
    yield nn.Transformer.generate_square_subsequent_mask(size).cuda()
    yield nn.Transformer.generate_square_subsequent_mask(size, device=torch.device("cuda"))
    yield torch.log(torch.tril(ones)).cuda()
    upper = (torch.triu(torch.ones(size, size, device="cuda")) == 1).transpose(0, 1)
    yield upper.float().masked_fill(upper == 0, float("-inf")).masked_fill(upper == 1, 0.0)
    yield torch.full((size, size), float("-inf"), device="cuda").triu_(1)
    yield torch.where(ones.cuda().tril().bool(), 0.0, float("-inf"))


@pytest.mark.parametrize("size", [8, LONG, LONGER])
def test_a_causal_mask_is_found_to_be_one(machine: gpu.VirtualMachine, size: int) -> None:
    for mask in masks(size):
        assert _detect_is_causal_mask(mask, None, size)
        assert torch.equal(mask.cpu(), nn.Transformer.generate_square_subsequent_mask(size))
    assert not machine.reads.counts


@pytest.mark.parametrize("size", [LONG, LONGER])
def test_another_mask_is_found_to_be_none(machine: gpu.VirtualMachine, size: int) -> None:
    for other in (
        torch.full((size, size), 1.0).tril().cuda(),
        torch.full((size, size), -1e9, device="cuda").triu(1),
        torch.zeros(size, size, device="cuda"),
    ):
        assert not _detect_is_causal_mask(other, None, size)
    assert not machine.reads.counts
    # Two with other places are of three parts together.
    assert not _detect_is_causal_mask(torch.full((size, size), float("-inf")).triu(2).cuda(), None, size)
    assert machine.reads.counts


@pytest.mark.parametrize("diagonal", [-70, -60, -59, -3, 0, 5, 68, 69, 80])
@pytest.mark.parametrize("cut", [torch.tril, torch.triu])
def test_each_diagonal_of_a_matrix_that_is_no_square(machine: gpu.VirtualMachine, cut: Any, diagonal: int) -> None:
    host = cut(torch.full((60, 70), 3.0), diagonal)
    made = cut(torch.full((60, 70), 3.0, device="cuda"), diagonal)
    for tensor in (made, made[None, None], host.cuda()):
        assert torch.equal(values(machine, tensor), host.view(tensor.shape))
    for tensor in (made.t(), host.t().cuda(), made.t().clone(), made.T.contiguous()):
        assert torch.equal(values(machine, tensor), host.t())
    assert torch.equal(values(machine, (made + 1) * made.bool()), (host + 1) * host.bool())
    assert bool(made.bool().all()) == bool(host.bool().all())
    assert bool((made == 3).any()) == bool((host == 3).any())
    assert made.max().item() == host.max()


def test_what_is_no_triangle_any_more_is_unknown(machine: gpu.VirtualMachine) -> None:
    mask = torch.ones(LONG, LONG, device="cuda").tril()
    assert values(machine, mask[:, 1:]) is None
    assert values(machine, mask + mask.t()) is None
    assert values(machine, mask.amax(dim=1)) is None
    assert values(machine, mask.flip(0)) is None
    assert values(machine, torch.cat([mask, mask])) is None
    assert values(machine, mask * torch.rand(LONG, LONG, device="cuda")) is None
    row = mask[3]
    mask.masked_fill_(mask == 0, 2)
    assert values(machine, mask)[3, 2:6].tolist() == [1, 1, 2, 2]
    row.zero_()
    assert values(machine, mask) is None
    host = torch.ones(LONG, LONG).tril()
    host[20, 3] = 5
    assert values(machine, host.cuda()) is None
    signs = torch.where(torch.ones(LONG, LONG).tril().bool(), -0.0, 1.0)
    assert values(machine, signs.cuda()) is not None
    signs[20, 3] = 0.0
    assert values(machine, signs.cuda()) is None


def test_an_encoder_with_a_long_causal_mask_takes_attention_without_one() -> None:
    """``nn.TransformerEncoder`` tells the mask by its values, and its layers leave it out where it is causal: half precision
    takes a kernel that holds no mask of its own (``aten::_efficient_attention`` pads one to a multiple of eight)."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0), 1, enable_nested_tensor=False)
    encoder.cuda()
    tokens = torch.randn(37, 2, 32, device="cuda")
    encoder(tokens, nn.Transformer.generate_square_subsequent_mask(37).cuda())
    torch.cuda.memory._record_memory_history()
    encoder(tokens, nn.Transformer.generate_square_subsequent_mask(37).cuda())
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    sizes = [event["size"] for event in events if event["action"] == "alloc"]
    torch.cuda.memory._record_memory_history(enabled=None)
    assert 37 * 40 * 4 not in sizes
    assert 37 * 37 * 4 in sizes


def test_a_mask_with_nothing_in_front_of_it_is_put_together() -> None:
    """(As language models do for the first tokens, when their cache is empty.)"""
    mask = torch.full((LONGER, LONGER), float("-inf"), device="cuda").triu(1)
    assert torch.hstack([torch.zeros(LONGER, 0, device="cuda"), mask]).type(torch.half).shape == mask.shape
