"""Views of what was written to in place have the nodes, and their gradients the memory, that they have on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from asked_for import made
from torch.utils.checkpoint import checkpoint

from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.engine import tensors
from gpumem_magic.virtual.engine.views_anew import WRITTEN

COUNT = 1 << 16
BYTES = 4 * COUNT


@pytest.fixture(params=["A100-40GB", "A100-40GB,values=real"])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    gpu.turn_on(request.param)
    yield request.param
    gpu.turn_off()


def written_view(x: torch.Tensor) -> torch.Tensor:
    view = x.neg().view(-1)
    view.add_(1)
    return view


def activation_of_a_view(x: torch.Tensor) -> torch.Tensor:
    # (What `instance_norm` returns is a view.)
    return F.relu(F.instance_norm(x), inplace=True)


def views_of_views(x: torch.Tensor) -> torch.Tensor:
    view = x.neg().flatten()[4:].view(2, -1)[1].unsqueeze(0)
    view.mul_(2)
    return view.exp()


def turned(x: torch.Tensor) -> torch.Tensor:
    view = x.neg().transpose(0, 1)
    return view.mul_(3)


def twice(x: torch.Tensor) -> torch.Tensor:
    view = x.neg()[1:]
    view.add_(1)
    view.add_(2)
    return view


def another_view(x: torch.Tensor) -> torch.Tensor:
    whole = x.neg()
    one, other = whole[:1].view(-1), whole[1:].view(-1)
    one.add_(1)
    return torch.cat([one, other])


def base_written_to(x: torch.Tensor) -> torch.Tensor:
    whole = x.neg()
    view = whole[0].view(-1)
    whole.add_(1)
    return view * 2


def view_among_several(x: torch.Tensor) -> torch.Tensor:
    whole = x.neg()
    view = whole[0].view(-1)
    whole[1].fill_(1.0)
    return torch.stack([view, view])


def without_gradient(x: torch.Tensor) -> torch.Tensor:
    view = x.neg()[0].view(-1)
    with torch.no_grad():
        view.add_(1)
    return view


def assigned(x: torch.Tensor) -> torch.Tensor:
    whole = torch.zeros_like(x)
    whole[:, 0] = x[:, 1]
    return whole


def assigned_and_kept(x: torch.Tensor) -> torch.Tensor:
    whole = torch.zeros_like(x)
    view = whole[0].view(-1)
    view.copy_(x[1].reshape(-1))
    return view


def view_of_it_afterwards(x: torch.Tensor) -> torch.Tensor:
    view = x.neg()[1:]
    view.add_(1)
    return view[:, 0]


def of_another_type(x: torch.Tensor) -> torch.Tensor:
    view = torch.view_as_real(torch.complex(x, x))
    view.add_(1)
    return view


def with_a_hook(x: torch.Tensor) -> torch.Tensor:
    view = x.neg()
    view.register_hook(lambda gradient: gradient * 2)
    view = view.view(-1)
    view.add_(1)
    return view


def again_for_the_backward(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(written_view, x, use_reentrant=False)  # type: ignore[no-any-return]


PROGRAMS = [
    written_view, activation_of_a_view, views_of_views, turned, twice, another_view, base_written_to, view_among_several,
    without_gradient, assigned, assigned_and_kept, view_of_it_afterwards, of_another_type, with_a_hook, again_for_the_backward,
]  # fmt: skip


def nodes(tensor: torch.Tensor) -> list[str]:
    """The names of all nodes behind a tensor, in the order in which they are met."""
    waiting: list[Any] = [tensor.grad_fn]
    seen: dict[Any, str] = {}
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen[node] = node.name()
            waiting += [following for following, _ in node.next_functions]
    return list(seen.values())


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_the_nodes_are_those_of_plain_tensors(device: str, program: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.arange(48, dtype=torch.float32).view(2, 3, 2, 4).requires_grad_()
    y = x.detach().cuda().requires_grad_()
    on_host, out = program(x), program(y)
    assert nodes(out) == nodes(on_host)
    on_host.sum().backward()
    out.sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    assert (y.grad.shape, y.grad.stride()) == (x.grad.shape, x.grad.stride())
    if "real" in device:
        torch.testing.assert_close(y.grad.cpu(), x.grad)


def large(program: Callable[[], Any]) -> list[int]:
    """The bytes of the tensors of COUNT values and more that the program makes."""
    return [size for size in made(program) if size >= BYTES]


def test_the_gradient_of_such_a_view_lies_in_zeros_of_the_whole(device: str) -> None:
    x = torch.randn(4, COUNT, device="cuda", requires_grad=True)
    whole = x.neg()
    view = whole[1:3][0]
    view.add_(1)
    gradient = torch.ones(COUNT, device="cuda")
    # as_strided_backward: zeros. CopySlices: a copy of them, one of the view's part, and add_'s own gradient is what came. neg.
    # (With a node for each view there were zeros of 2 rows, too.)
    assert large(lambda: torch.autograd.grad(view, x, gradient)) == [4 * BYTES, 4 * BYTES, BYTES, 4 * BYTES]


def test_what_was_written_to_without_views_is_not_remembered(device: str) -> None:
    # (Other tests may have left some behind.)
    others = set(WRITTEN.before)
    x = torch.randn(4, 8, device="cuda", requires_grad=True)
    out = F.relu(x.neg(), inplace=True)
    assert not set(WRITTEN.before) - others
    view = out[0]
    out.mul_(2)
    assert set(WRITTEN.before) - others == {id(out)}
    del view, out
    assert not set(WRITTEN.before) - others


def test_a_refused_view_is_refused_in_the_same_words(device: str) -> None:
    words = []
    for place in ("cpu", "cuda"):
        whole = torch.randn(4, 8, device=place, requires_grad=True).neg()
        one, _ = whole.chunk(2)
        whole.add_(1)
        with pytest.raises(RuntimeError) as raised:
            one.exp()
        words.append(str(raised.value))
    assert words[0] == words[1]


@pytest.mark.usefixtures("device")
def test_nodes_are_not_asked_for_while_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """C++ takes a view's hooks away while it makes its node anew, and holds a lock on the node meanwhile: a function of C++ that
    PyTorch does not announce (scripts, `UndefinedGrad`) waited there for good."""
    weight = torch.ones(1, device="cuda", requires_grad=True)
    x = torch.ones(5, device="cuda")
    view, other = x.select(0, 1), x[2:]
    x.add_(weight)
    asked: list[Any] = []
    with monkeypatch.context() as seen:
        seen.setattr(tensors, "before_function", asked.append)
        view._backward_hooks = None
    assert asked == []
    assert "Undefined" in str(torch._C._functions.UndefinedGrad()(view).grad_fn)  # type: ignore[attr-defined]
    x.mul_(weight)
    assert (view + other).grad_fn is not None
