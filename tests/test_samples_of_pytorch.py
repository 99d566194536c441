"""`benchmarks/samples_of_pytorch.py` tells what differs, of operators of its own here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from project_scripts import load

from gpumem_magic.virtual import gpu

samples_of_pytorch = load(Path(__file__).parents[1] / "benchmarks" / "samples_of_pytorch.py")


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    gpu.turn_on("T4,values=real")
    yield
    gpu.turn_off()


def differing(function: Callable[[torch.Tensor], Any], kind: str = "calls") -> set[str]:
    """The ways in which a function gives something else on the device."""
    operator = SimpleNamespace(
        op=function,
        inplace_variant=None,
        supports_autograd=True,
        supported_dtypes=lambda device: {torch.float64},
        supported_backward_dtypes=lambda device: {torch.float64},
        sample_inputs=lambda device, dtype, requires_grad: iter(
            [SimpleNamespace(input=torch.ones(2, 3, dtype=dtype, requires_grad=requires_grad), args=(), kwargs={})]
        ),
    )
    found = list(samples_of_pytorch._compared(operator, kind, [torch.float64], True))
    assert found
    return {what.partition(" float64")[0] for what, difference in found if difference}


def test_what_is_the_same_is_not_told() -> None:
    assert differing(lambda x: x.cumsum(0)) == set()
    assert differing(lambda x: x.cumsum(0), "inference") == set()
    assert differing(lambda x: x.cumsum(0), "transforms") == set()


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda x: x + x.is_cuda, {"call"}),
        (lambda x: x * (1 + x.is_cuda), {"call", "gradient"}),
        (lambda x: x[:1] if x.is_cuda else x, {"call", "gradient"}),
        (lambda x: x.float() if x.is_cuda else x, {"call"}),
        (lambda x: x.detach() if x.is_cuda else x, {"call", "gradient"}),
        (lambda x: x.cpu(), {"call"}),
        (lambda x: x.view(5) if x.is_cuda else x, {"call", "gradient"}),
    ],
)
def test_what_differs_is_told(function: Callable[[torch.Tensor], Any], told: set[str]) -> None:
    assert told <= differing(function)


class Scaled(torch.nn.Module):
    """Goes wrong where it is told to, on the device alone."""

    def __init__(self, wrong: str) -> None:
        super().__init__()
        self.wrong = wrong
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        off = x.is_cuda
        self.calls += 1 + (off and self.wrong == "state")
        if off and self.wrong == "inference" and torch.is_inference_mode_enabled():
            return x
        return x * self.weight * (1 + (off and self.wrong == "call")) + (
            x.detach() if off and self.wrong == "call" else x
        )


@pytest.mark.parametrize("wrong", ["", "call", "state", "inference"])
def test_layers_are_compared_in_each_of_their_ways(wrong: str) -> None:
    def inputs(module: Any, *, device: str, dtype: Any, requires_grad: bool, training: bool) -> list[Any]:
        x = torch.full((2, 3), 2.0, dtype=dtype, requires_grad=requires_grad)
        return [
            SimpleNamespace(constructor_input=SimpleNamespace(args=(wrong,), kwargs={}), forward_input=one)
            for one in (SimpleNamespace(args=(x,), kwargs={}), None)
        ]

    module = SimpleNamespace(module_cls=Scaled, module_inputs_func=inputs)
    found = list(samples_of_pytorch._layers(module, "layers", [torch.float64], True))
    assert len(found) == 8
    told = {what.partition(" float64")[0] for what, difference in found if difference}
    assert {wrong} - {""} <= told
    assert bool(told) == bool(wrong)


class Halved(torch.optim.SGD):
    """Steps half as far on the device where it is `foreach`."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                share = 0.5 if one.is_cuda and group["foreach"] else 1.0
                one.data.add_(one.grad, alpha=-float(group["lr"]) * share)


@pytest.mark.parametrize(("kind", "told"), [(torch.optim.SGD, set()), (Halved, {"foreach"})])
def test_optimizers_are_compared_in_each_of_their_ways(kind: Any, told: set[str]) -> None:
    optimizer = SimpleNamespace(
        optim_cls=kind,
        supported_impls=("for", "foreach"),
        step_requires_closure=False,
        optim_inputs_func=lambda device: [SimpleNamespace(kwargs={"lr": 0.1}), SimpleNamespace(kwargs={"lr": 0.2})],
    )
    found = list(samples_of_pytorch._optimizers(optimizer, "optimizers", [torch.float64, torch.int64], True))
    assert len(found) == 4
    assert {what.split()[0] for what, difference in found if difference} == told
