"""Looks at the program's objects, whatever happens meanwhile."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from gpumem_magic.looks import tensors
from gpumem_magic.looks.objects import attributes, items


def test_a_dictionary_that_changes_as_garbage_is_collected_is_read() -> None:
    table: dict[Any, int] = {number: number for number in range(3000)}

    class Leaves:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            table[len(table)] = 0

    before = gc.get_threshold()
    gc.collect()
    for _ in range(3):
        Leaves()
    gc.set_threshold(50, 1, 1)
    try:
        found = items(table)
    finally:
        gc.set_threshold(*before)
    assert len(found) in (3000, 3003)
    assert found[:3000] == [(number, number) for number in range(3000)]


def test_a_view_that_pytorch_refuses_to_differentiate_has_no_node() -> None:
    """As FSDP's views of its flat parameter are."""
    base = torch.ones(4, requires_grad=True) * 1
    with torch.no_grad():
        view = base[:2]
    base.mul_(2)
    assert tensors.grad_fn(view) is None
    assert tensors.is_leaf(view) is False


def test_gradients_are_read_of_leaves_alone_whatever_else_is_among_them() -> None:
    weight, other = (nn.Parameter(torch.ones(4)) for _ in range(2))
    (weight * 2).sum().backward()
    assert tensors.grads_of_leaves([weight, other]) == [weight.grad, None]
    computed = torch.ones(4, requires_grad=True) * 1
    with torch.no_grad():
        refused = computed[:2]
    kept = weight * 3
    kept.retain_grad()
    kept.sum().backward()
    # (What is no leaf is not asked, of which PyTorch would warn, and has no gradient of a parameter's.)
    assert tensors.grads_of_leaves([computed, weight, kept]) == [None, weight.grad, None]
    computed.mul_(2)
    assert tensors.grads_of_leaves([weight, refused, other]) == [weight.grad, None, None]
    assert tensors.grads_of_leaves([]) == []


class SaysItsOwnDictionary(nn.Linear):
    """A class with another answer for what its objects hold."""

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        return {"_parameters": {"false": nn.Parameter(torch.ones(1))}, "_modules": {}}


def says_its_own_dictionary() -> nn.Module:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    # (Made as another, as a module could not be made so.)
    net[0].__class__ = SaysItsOwnDictionary
    return net


class Watchful(dict[str, Any]):
    """A dictionary whose reads run the program's code."""

    def get(self, key: str, default: Any = None) -> Any:
        raise AssertionError("asked")


def held_by_its_own_dictionary() -> nn.Module:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net.__dict__ = Watchful(net.__dict__)
    return net


def with_gaps() -> nn.Module:
    """Names under which nothing is, a module in itself, and what is no module."""
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2))
    net.register_module("nothing", None)
    net[1].add_module("outside", net)
    net._modules["text"] = "no module"  # type: ignore[assignment]
    net._parameters["text"] = "no tensor"  # type: ignore[assignment]
    return net


def tied() -> nn.Module:
    net = nn.Sequential(nn.Embedding(4, 2), nn.ModuleDict({"twice": nn.Linear(2, 4, bias=False)}), nn.BatchNorm1d(2))
    net[1]["twice"].weight = net[0].weight
    net.add_module("again", net[1])
    return net


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        # (PyTorch would rather have it compiled.)
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.Sequential(nn.Linear(2, 2)))


@pytest.mark.parametrize(
    "module",
    [
        tied(),
        nn.Linear(2, 2, bias=False),
        nn.ReLU(),
        nn.LSTM(2, 2, 2),
        says_its_own_dictionary(),
        held_by_its_own_dictionary(),
        with_gaps(),
        torch.jit.script(nn.Sequential(nn.Linear(2, 2))),
    ],
    ids=lambda module: type(module).__name__,
)
def test_parameters_without_names_are_those_with_names(module: nn.Module) -> None:
    with tensors.no_functions(), tensors.no_dispatch():
        named = list(tensors.tensors_of(module, tensors.PARAMETERS))
        assert not any("false" in name for name, _ in named)
        assert [id(one) for one in tensors.nameless_parameters(module)] == [id(one) for _, one in named]


def test_an_objects_own_dictionary_is_read_past_what_its_class_says() -> None:
    class Says:
        @property
        def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
            raise AssertionError("asked")

    class Plain:
        pass

    for _ in range(2):
        assert attributes(Says()) == {}
        one = Plain()
        one.field = 1  # type: ignore[attr-defined]
        assert attributes(one) == {"field": 1}
    assert attributes(3) == {}
