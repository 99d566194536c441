"""Operators that are one kernel on CUDA and several on the host: what they hold is CUDA's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gpumem_magic.virtual import gpu

COUNT = 1 << 18
GATED = [(F.silu, torch.ops.aten.silu_backward.default), (F.mish, torch.ops.aten.mish_backward.default)]


@pytest.fixture
def machine() -> Iterator[gpu.VirtualMachine]:
    yield gpu.turn_on("virtual:1GiB,context=0MiB")
    gpu.turn_off()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("gate", "backward"), GATED)
def test_the_gradient_of_a_gate_takes_itself_and_nothing_more(
    machine: gpu.VirtualMachine, gate: Callable[..., Any], backward: Any, dtype: torch.dtype
) -> None:
    x = torch.zeros(COUNT, dtype=dtype, device="cuda", requires_grad=True)
    seed = torch.ones_like(x)
    y = gate(x)
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y.backward(seed)
    assert torch.cuda.max_memory_allocated() - start == x.nbytes
    with torch.inference_mode():
        held = backward(seed, x.detach())
    assert torch.cuda.memory_allocated() - start == x.nbytes + held.nbytes


@pytest.mark.parametrize(("gate", "backward"), GATED)
def test_its_gradient_has_a_gradient(machine: gpu.VirtualMachine, gate: Callable[..., Any], backward: Any) -> None:
    x = torch.zeros(8, device="cuda", requires_grad=True)
    (gradient,) = torch.autograd.grad(gate(x).sum(), x, create_graph=True)
    gradient.sum().backward()
    assert x.grad is not None
    called = backward(torch.ones_like(x), x)
    assert called.requires_grad
    called.sum().backward()


@pytest.mark.parametrize(("gate", "backward"), GATED)
def test_the_smaller_operators_are_the_same_function(gate: Callable[..., Any], backward: Any) -> None:
    from gpumem_magic.virtual import composites

    ours = {"silu": composites.silu_backward, "mish": composites.mish_backward}[gate.__name__]
    x = torch.linspace(-4, 4, 33, dtype=torch.float64, requires_grad=True)
    seed = torch.linspace(1, 2, 33, dtype=torch.float64)
    torch.testing.assert_close(ours(seed, x), backward(seed, x))
    with torch.no_grad():
        torch.testing.assert_close(ours(seed, x), backward(seed, x))


def test_hosts_gradients_are_untouched_while_the_device_is_on(machine: gpu.VirtualMachine) -> None:
    x = torch.linspace(-2, 2, 5, requires_grad=True)
    F.silu(x).sum().backward()
    gate = torch.sigmoid(x.detach())
    torch.testing.assert_close(x.grad, gate * (1 + x.detach() * (1 - gate)))
