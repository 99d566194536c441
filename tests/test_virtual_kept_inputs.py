"""`mean` and `softmax` on a device whose PyTorch keeps their input for backward, and on one whose does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from gpumem_magic.virtual import gpu

MEANS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    torch.mean,
    lambda x: x.mean((2, 3), keepdim=True),
    # These are put together with a mean by C++.
    lambda x: F.adaptive_avg_pool2d(x, 1),
    lambda x: F.margin_ranking_loss(x, x, torch.ones_like(x)),
]


@pytest.fixture(autouse=True)
def _off_again() -> Iterator[None]:
    yield
    gpu.turn_off()


def kept(mean: Callable[[torch.Tensor], torch.Tensor], version: str) -> tuple[int, int]:
    """What a mean of something that nothing else keeps holds until backward, and what is left of it after."""
    gpu.turn_on(f"A100-40GB,torch={version}")
    x = torch.zeros(2, 64, 32, 32, device="cuda", requires_grad=True)
    start = torch.cuda.memory_allocated()
    out = mean(x * 2)
    held = torch.cuda.memory_allocated() - start - 512
    out.sum().backward()
    assert x.grad is not None
    end = torch.cuda.memory_allocated() - start - 512 - x.grad.nbytes
    gpu.turn_off()
    return held, end


@pytest.mark.parametrize("mean", MEANS)
def test_the_devices_version_decides(mean: Callable[[torch.Tensor], torch.Tensor]) -> None:
    older, at_end = kept(mean, "2.1")
    newer, _ = kept(mean, "2.2")
    assert older - newer == 2 * 64 * 32 * 32 * 4
    assert at_end == 0


@pytest.mark.parametrize("of", [torch.softmax, torch.log_softmax])
def test_softmax_kept_its_input(of: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    size = 2 * 64 * 32 * 32 * 4
    older, at_end = kept(lambda x: of(x, -1), "1.10")
    newer, _ = kept(lambda x: of(x, -1), "1.11")
    # Its result is there in either case.
    assert (older, newer, at_end) == (2 * size - 512, size - 512, size - 512)


def test_one_call_of_backward_lets_go_unless_the_graph_is_kept() -> None:
    gpu.turn_on("A100-40GB,torch=2.1")
    x = torch.zeros(1 << 20, device="cuda", requires_grad=True)
    before = torch.cuda.memory_allocated()
    out = (x * 2).mean()
    for retain, left in ((True, x.nbytes), (False, 0)):
        torch.autograd.grad(out, x, retain_graph=retain)
        assert torch.cuda.memory_allocated() - before - 512 == left


def test_in_all_surroundings() -> None:
    gpu.turn_on("A100-40GB,torch=2.1")
    x = torch.zeros(8, 16, device="cuda", requires_grad=True)
    (gradient,) = torch.autograd.grad((x * x).mean(), x, create_graph=True)
    gradient.mean().backward()
    assert x.grad is not None
    with torch.inference_mode():
        assert x.mean(0).shape == (16,)
    start = torch.cuda.memory_allocated()
    with torch.no_grad():
        out = (x * 2).mean(0)
    assert torch.cuda.memory_allocated() - start == 512
    assert out.grad_fn is None
    with torch.autocast("cuda"):
        assert (x @ x.T).mean(dtype=torch.float32).dtype == torch.float32
    checkpoint(lambda tensor: (tensor * 2).mean(), x, use_reentrant=False).backward()
    assert torch.func.vmap(torch.mean)(x).shape == (8,)
    assert torch.func.grad(torch.mean)(x.detach()).shape == x.shape
    assert torch.func.jvp(torch.mean, (x.detach(),), (x.detach(),))[1].shape == ()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        assert torch.autograd.forward_ad.unpack_dual(dual.mean()).tangent is not None


def test_a_saved_tensors_hook_is_given_the_input() -> None:
    gpu.turn_on("A100-40GB,torch=2.1")
    x = torch.zeros(1 << 20, device="cuda", requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        out = (x * 2).mean()
        assert torch.cuda.memory_allocated() - x.nbytes == 512
    out.backward()
    assert x.grad is not None
    assert torch.linspace(0, 1, 5).mean() == 0.5
