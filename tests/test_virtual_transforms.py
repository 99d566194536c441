"""`torch.func` on a virtual GPU: what the transforms give, beside the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import func

from gpumem_magic.virtual import gpu


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    yield
    gpu.turn_off()


def _places(like: torch.Tensor) -> torch.Tensor:
    return torch.tensor([0, 2], device=like.device)


def _assigned(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[[0, 1]] = 5.0
    return y.sum() + (y[[1, 2]] ** 2).sum()


INDEXED: dict[str, Callable[[torch.Tensor], Any]] = {
    "rows": lambda t: func.vmap(lambda x: x[[0, 2]])(t),
    "places": lambda t: func.vmap(lambda x: x[[0, 2], [1, 1]])(t),
    "a range and a list": lambda t: func.vmap(lambda x: x[1:, [1, 1]])(t),
    "their gradient": lambda t: func.grad(lambda x: (x[[0, 2]] ** 2).sum())(t),
    "their tangent": lambda t: func.jvp(lambda x: x[[0, 2]], (t,), (torch.ones_like(t),))[1],
    "an assignment": lambda t: func.vmap(func.grad(_assigned))(t),
}
PER_SAMPLE: dict[str, Callable[[torch.Tensor], Any]] = {
    "index_select": lambda x: (x.index_select(0, _places(x)) ** 2).sum(),
    "index": lambda x: x[_places(x)].sum(),
    "embedding": lambda x: torch.nn.functional.embedding(_places(x), x).sum(),
    "gather": lambda x: x.gather(0, _places(x)[:, None].expand(2, 5)).sum(),
    "cummax": lambda x: x.cummax(0)[0].sum(),
    "max": lambda x: x.max(0)[0].sum(),
    "sort": lambda x: x.sort(0)[0][1].sum(),
    "topk": lambda x: x.topk(2, 0)[0].sum(),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 0).sum(),
}
CALLS = {
    **INDEXED,
    **{name: lambda t, loss=loss: func.vmap(func.grad(loss))(t) for name, loss in PER_SAMPLE.items()},
    "jacobian": lambda t: func.jacrev(lambda x: x[:, 0, 0].index_select(0, _places(x)))(t),
    "hessian": lambda t: func.hessian(lambda x: (x.index_select(0, _places(x)) ** 3).sum())(t[0, 0]),
}


@pytest.mark.parametrize("values", ["", ",values=auto", ",values=real"])
@pytest.mark.parametrize("name", CALLS)
def test_transforms_give_what_they_give_on_the_host(name: str, values: str) -> None:
    """A list by which a wrapped tensor was indexed had no values, and one sample's zeros were taken for those of all."""
    gpu.turn_on(f"T4{values}")
    given = torch.randn(5, 5, 5)
    expected, found = CALLS[name](given), CALLS[name](given.cuda())
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    if values == ",values=real":
        torch.testing.assert_close(found.cpu(), expected)


def test_an_index_that_is_too_large_is_the_programs_own_error() -> None:
    gpu.turn_on("T4,values=real")
    with pytest.raises(IndexError, match="index 9 is out of bounds for dimension 0 with size 5"):
        func.vmap(lambda x: x[[9]])(torch.ones(5, 5, device="cuda"))
