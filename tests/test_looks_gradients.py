"""Looks at the gradients of a model's parameters, on a machine where a tensor's address on the host is its place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recording_fakes import FakeMachine
from torch import nn

from gpumem_magic.recording.identity import Witness


class OnTheHost(FakeMachine):
    """is_plain: whether places are told at once, as a GPU's are, or only by `locate`."""

    def __init__(self, is_plain: bool) -> None:
        super().__init__()
        self.is_plain = is_plain

    def plain_place(self, tensor: Any) -> tuple[int, int] | None:
        return self.locate(tensor) if self.is_plain else None

    def locate(self, tensor: Any) -> tuple[int, int] | None:
        return 0, tensor.untyped_storage().data_ptr()


class Looking:
    """A witness, and what it has seen since it was last asked."""

    def __init__(self, is_plain: bool) -> None:
        self.position = 0
        self.witness = Witness(OnTheHost(is_plain), lambda device: self.position)

    def seen(self) -> list[tuple[str, str | None, int, int]]:
        """(Role, name, position, address of the parameter) of each look."""
        found = [(look.role, look.name, look.position, look.of) for look in self.witness.sightings]
        self.witness.sightings.clear()
        return found


@pytest.fixture(params=[True, False], ids=["plain places", "located"])
def looking(request: pytest.FixtureRequest) -> Looking:
    return Looking(request.param)


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def backward(net: nn.Module, looking: Looking) -> None:
    net(torch.ones(1, 2)).sum().backward()
    looking.position += 1
    looking.witness.backward_ended()


def test_a_parameter_under_two_names_has_one_gradient_under_the_first(looking: Looking) -> None:
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    net[1].weight = net[0].weight
    inner = net[1]
    for module in (net, inner):
        looking.witness.forward_begins(module, ())
    looking.seen()
    backward(net, looking)
    expected = [("gradient", "0.weight", 1, address(net[0].weight))]
    assert looking.seen() == expected
    # At the end of each backward again: there may be other gradients then.
    backward(net, looking)
    assert looking.seen() == [("gradient", "0.weight", 2, address(net[0].weight))]


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_twice_in_an_optimizer_has_one_gradient(looking: Looking) -> None:
    weight, bias = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight, bias, weight], lr=0.1)
    (weight.sum() + bias.sum()).backward()
    looking.witness.step_begins(optimizer)
    where = {"parameter 0": address(weight), "parameter 1": address(bias), "parameter 2": address(weight)}
    found = looking.seen()
    assert [look[:2] for look in found if look[0] == "parameter"] == [("parameter", name) for name in where]
    assert [(look[1], look[3]) for look in found if look[0] == "gradient"] == list(where.items())
    looking.witness.backward_ended()
    # At the end of a backward each parameter counts once.
    assert [look[1] for look in looking.seen()] == ["parameter 0", "parameter 1"]


def test_a_step_looks_at_no_gradient_that_the_backward_has_seen(looking: Looking) -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    looking.witness.forward_begins(net, ())
    looking.witness.step_begins(optimizer)
    looking.seen()
    backward(net, looking)
    assert [look[1] for look in looking.seen()] == ["weight", "bias"]
    looking.witness.step_begins(optimizer)
    assert looking.seen() == []
    net.bias.grad = torch.ones(2)
    looking.witness.step_begins(optimizer)
    assert [look[1] for look in looking.seen()] == ["bias"]


def test_parameters_that_come_later_have_their_names_at_the_next_backward(looking: Looking) -> None:
    net = nn.Sequential(nn.Linear(2, 2, bias=False))
    looking.witness.forward_begins(net, ())
    backward(net, looking)
    looking.seen()
    net.add_module("head", nn.Linear(2, 1, bias=False))
    backward(net, looking)
    assert [look[1] for look in looking.seen()] == ["0.weight", "head.weight"]
    net[0].weight = nn.Parameter(torch.ones(2, 2))
    backward(net, looking)
    assert [look[1:] for look in looking.seen()] == [
        ("0.weight", 3, address(net[0].weight)),
        ("head.weight", 3, address(net.head.weight)),
    ]
