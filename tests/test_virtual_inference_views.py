"""Views that are made in inference mode, or of what was made in it, may be used as on the host."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from gpumem_magic.virtual import gpu

MODES = {"ordinary": torch.enable_grad, "without gradients": torch.no_grad, "inference": torch.inference_mode}
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view": lambda x: x.view(-1),
    "index": lambda x: x[1:],
    "transpose": lambda x: x.t(),
    "detach": lambda x: x.detach(),
    "chunk": lambda x: x.chunk(2)[0],
    "narrow": lambda x: x.narrow(0, 0, 1),
    "reshape": lambda x: x.reshape(2, -1),
    "flatten": lambda x: x.flatten(),
    "unflatten": lambda x: x.unflatten(0, (-1, 1)),
    "expand_as": lambda x: x[:, :, None].expand_as(x[:, :, None]),
    "hsplit": lambda x: x.hsplit(2)[0],
    "movedim": lambda x: x.movedim(0, 1),
    "copy": lambda x: x.t().reshape(-1),
}
WRITING: dict[str, Callable[[torch.Tensor], Any]] = {
    "nothing": lambda view: None,
    "add_": lambda view: view.add_(1),
    "an item": lambda view: view.__setitem__(0, 2.0),
    "out": lambda view: torch.add(view, 1, out=view),
}


@pytest.fixture(params=["H100", "H100,values=real"])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    gpu.turn_on(request.param)
    yield "cuda"
    gpu.turn_off()


def told(device: str, view: Any, write: Any, modes: tuple[str, str, str]) -> Any:
    """What there is to be seen of a view, or the error."""
    first, second, third = (MODES[name] for name in modes)
    with first():
        base = torch.ones(4, 4, device=device, requires_grad=first is torch.enable_grad and view is not VIEWS["detach"])
    try:
        with second():
            made = view(base)
        with third():
            write(made)
    except RuntimeError as error:
        return str(error)[:60]
    versions = [None if one.is_inference() else one._version for one in (base, made)]
    return made.is_inference(), made._is_view(), made.requires_grad, versions, made.shape, made.stride()


@pytest.mark.parametrize("view", VIEWS)
def test_views_and_inference_mode(device: str, view: str) -> None:
    every = [modes for modes in itertools.product(MODES, repeat=3) if "inference" in modes]
    for writing, modes in itertools.product(WRITING, every):
        given = VIEWS[view], WRITING[writing], modes
        assert told(device, *given) == told("cpu", *given), (writing, modes)


def test_a_view_is_repeated_by_a_number(device: str) -> None:
    """In inference mode an operator comes whole, with the number where its other overload takes counts."""
    with torch.inference_mode():
        view = torch.ones(4, 3).to(device)[:2].view(2, 3)
        assert view.repeat_interleave(2, dim=1).shape == (2, 6)
        assert torch.repeat_interleave(view, repeats=3).shape == (18,)
