"""Arguments that PyTorch refuses on every device are refused on the virtual one, in the same words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpumem_magic.virtual import gpu

# By name: what is right, and what is refused.
CALLS: dict[str, tuple[Callable[[str], Any], Callable[[str], Any]]] = {
    "more samples than there are": (
        lambda device: torch.multinomial(torch.ones(4, device=device), 4),
        lambda device: torch.multinomial(torch.ones(4, device=device), 5),
    ),
    "no samples": (
        lambda device: torch.ones(2, 4, device=device).multinomial(5, replacement=True),
        lambda device: torch.ones(2, 4, device=device).multinomial(0),
    ),
    "samples by integers": (
        lambda device: torch.ones(4, device=device).multinomial(1),
        lambda device: torch.ones(4, device=device, dtype=torch.int64).multinomial(1),
    ),
    "samples of three dimensions": (
        lambda device: torch.ones(2, 4, device=device).multinomial(1),
        lambda device: torch.ones(2, 3, 4, device=device).multinomial(1),
    ),
    "ends of a range": (
        lambda device: torch.empty(2, device=device).uniform_(-1, 3),
        lambda device: torch.empty(2, device=device).uniform_(3, -1),
    ),
    "ends of a range of integers": (
        lambda device: torch.empty(2, device=device).random_(1, 3),
        lambda device: torch.empty(2, device=device).random_(3, 1),
    ),
    "a probability": (
        lambda device: torch.bernoulli(torch.ones(2, device=device), p=0.5),
        lambda device: torch.bernoulli(torch.ones(2, device=device), p=2),
    ),
    "parts of complex numbers": (
        lambda device: torch.complex(torch.ones(2, device=device), torch.ones(2, device=device)),
        lambda device: torch.complex(torch.ones(2, device=device), torch.ones(2, device=device).double()),
    ),
    "lengths and angles": (
        lambda device: torch.polar(torch.ones(2, device=device), torch.ones(2, device=device)),
        lambda device: torch.polar(torch.ones(2, device=device), torch.ones(2, device=device).double()),
    ),
    "boundaries": (
        lambda device: torch.bucketize(torch.ones(2, device=device), torch.ones(2, device=device)),
        lambda device: torch.bucketize(torch.ones(2, device=device), torch.ones(2, 2, device=device)),
    ),
}


@pytest.mark.parametrize("values", ["stand-in", "auto", "real"])
@pytest.mark.parametrize("name", CALLS)
def test_what_the_host_refuses_is_refused(name: str, values: str) -> None:
    right, wrong = CALLS[name]
    with pytest.raises((RuntimeError, NotImplementedError)) as expected:
        wrong("cpu")
    gpu.turn_on(f"A100,values={values}")
    try:
        right("cuda")
        with pytest.raises(type(expected.value)) as found:
            wrong("cuda")
        right("cuda")
    finally:
        gpu.turn_off()
    assert str(found.value) == str(expected.value)
