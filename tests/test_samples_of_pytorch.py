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
    found = list(samples_of_pytorch._compared(operator, kind, True))
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
