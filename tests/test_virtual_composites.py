"""Operators that are one kernel on CUDA and several on the host: what they hold is CUDA's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from asked_for import made, steps
from torch import nn
from torch.utils.checkpoint import checkpoint

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
    from gpumem_magic.virtual.operators import composites

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


# ---- norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_by_squares_keeps_one_number_for_each_row(machine: gpu.VirtualMachine, dtype: torch.dtype) -> None:
    x = torch.zeros(1024, 1024, device="cuda", dtype=dtype, requires_grad=True)
    norm = nn.RMSNorm(1024, device="cuda", dtype=dtype)
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = norm(x)
    assert torch.cuda.memory_allocated() - start == y.nbytes + 1024 * 4
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()
    seed = torch.zeros_like(y)
    start = torch.cuda.memory_allocated()
    y.backward(seed)
    # Both gradients are there when the kernel ends; what forward kept goes then.
    assert torch.cuda.max_memory_allocated() - start == x.nbytes + 1024 * dtype.itemsize
    assert norm.weight.grad is not None


# Of an input of 100 x 64 numbers in half precision: that in float32, its squares, their means, the factors and the product.
BYTES = 100 * 64 * 2
NORMED = [2 * BYTES, 2 * BYTES, 100 * 4, 100 * 4, 2 * BYTES]


@pytest.mark.parametrize("surrounding", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize(
    ("torch_version", "weights", "steps", "result"),
    [
        # That in bfloat16, and times the weight, whose type decides: seen in the CUDA build of 2.6.
        ("2.6", torch.bfloat16, [BYTES, BYTES], torch.bfloat16),
        ("2.6", torch.float32, [BYTES, 2 * BYTES], torch.float32),
        # Times the weight, and in bfloat16 (``layer_norm.cpp`` since pull request 147203).
        ("2.8", torch.bfloat16, [2 * BYTES, BYTES], torch.bfloat16),
        ("2.8", torch.float32, [2 * BYTES, BYTES], torch.bfloat16),
        # Where the weight has another type there is no kernel.
        ("2.11", torch.float32, [2 * BYTES, BYTES], torch.bfloat16),
    ],
)
def test_a_norm_by_squares_is_several_operators_before_2_9_and_for_two_types(
    torch_version: str, weights: torch.dtype, steps: list[int], result: torch.dtype, surrounding: Callable[[], Any]
) -> None:
    gpu.turn_on(f"A100-40GB,torch={torch_version}")
    try:
        x = torch.zeros(100, 64, dtype=torch.bfloat16, device="cuda")
        weight = torch.zeros(64, dtype=weights, device="cuda", requires_grad=True)
        with surrounding():
            assert made(lambda: F.rms_norm(x, (64,), weight)) == NORMED + steps
            assert F.rms_norm(x, (64,), weight).dtype == result
            with pytest.raises(RuntimeError, match="normalized_shape"):
                F.rms_norm(x, (32,), weight)
    finally:
        gpu.turn_off()


@pytest.mark.parametrize(
    ("torch_version", "asked"),
    [("2.5", [61440, 80, 80, 61440]), ("2.6", [122880, 122880, 160, 160, 122880, 61440])],
)
def test_before_2_6_a_norm_by_squares_stays_in_half_precision(torch_version: str, asked: list[int]) -> None:
    """As the builds of 2.4, 2.5 and 2.6 have it."""
    gpu.turn_on(f"A100-40GB,torch={torch_version}")
    try:
        x = torch.zeros(40, 768, dtype=torch.bfloat16, device="cuda")
        assert made(lambda: F.rms_norm(x, (768,))) == asked
    finally:
        gpu.turn_off()


@pytest.mark.parametrize(
    ("version", "asked", "result"),
    [
        # x and its squares in float32, their means, one by the roots; all that follows is float32.
        ("2.4", [8192, 8192, 128, 128, 8192, 8192], torch.float32),
        ("2.6", [8192, 8192, 128, 128, 8192, 4096, 8192], torch.float32),
    ],
)
def test_autocast_has_the_squares_of_a_norm_in_float32_before_2_6(
    version: str, asked: list[int], result: torch.dtype
) -> None:
    """As the build of 2.4 has it."""
    gpu.turn_on(f"A100-40GB,torch={version}")
    try:
        norm = nn.RMSNorm(64, device="cuda")
        x = torch.zeros(2, 16, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert made(lambda: norm(x)) == asked
            assert norm(x).dtype == result
        assert made(lambda: F.rms_norm(x.detach(), (64,)))[0] == (4096 if version == "2.4" else 8192)
    finally:
        gpu.turn_off()


def test_what_a_norm_by_squares_divided_by_goes_before_its_result_is_made_narrow() -> None:
    """As the build of 2.7 has it."""
    gpu.turn_on("A100-40GB,torch=2.7")
    try:
        x = torch.zeros(40, 768, dtype=torch.bfloat16, device="cuda")
        assert steps(lambda: F.rms_norm(x, (768,)))[-5:] == [
            ("alloc", 122880),
            ("free_requested", 160),
            ("free_requested", 122880),
            ("alloc", 61440),
            ("free_requested", 122880),
        ]
    finally:
        gpu.turn_off()


def test_a_norm_by_squares_in_all_surroundings(machine: gpu.VirtualMachine) -> None:
    x = torch.zeros(16, 64, device="cuda", requires_grad=True)
    norm = nn.RMSNorm(64, device="cuda")
    (gradient,) = torch.autograd.grad(norm(x).sum(), x, create_graph=True)
    gradient.sum().backward()
    assert x.grad is not None
    with torch.no_grad():
        assert F.rms_norm(x, (64,)).shape == x.shape
    with torch.inference_mode():
        assert norm(x).shape == x.shape
    checkpoint(norm, x, use_reentrant=False).sum().backward()
    assert torch.func.vmap(norm)(x).shape == x.shape
    assert torch.func.grad(lambda tensor: norm(tensor).sum())(x.detach()).shape == x.shape


@pytest.mark.parametrize("weight", [None, torch.linspace(1, 2, 8, dtype=torch.float64)])
@pytest.mark.parametrize("eps", [None, 1e-3])
def test_the_smaller_operators_are_the_same_norm(weight: torch.Tensor | None, eps: float | None) -> None:
    from gpumem_magic.virtual.operators import composites

    x = torch.linspace(-4, 4, 32, dtype=torch.float64).view(4, 8)
    out, _ = composites._by_smaller_operators(x, (8,), weight, eps)
    torch.testing.assert_close(out, F.rms_norm(x, (8,), weight, eps))


@pytest.mark.parametrize(("torch_version", "wrapped"), [("2.6", []), ("2.9", []), ("2.11", [24_000])])
@pytest.mark.parametrize("surrounding", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_what_is_taken_along_a_dimension_has_indices_of_its_own_since_2_11(
    torch_version: str, wrapped: list[int], surrounding: Callable[[], Any]
) -> None:
    gpu.turn_on(f"A100-40GB,torch={torch_version}")
    try:
        x = torch.zeros(1000, 8, device="cuda", requires_grad=True)
        indices = torch.zeros(1, 3, dtype=torch.long, device="cuda")
        with surrounding():
            assert made(lambda: torch.take_along_dim(x, indices.expand(1000, 3), 1)) == [*wrapped, 12_000]
            assert torch.take_along_dim(x, indices, -1).shape == (1000, 3)
            out = torch.empty(1000, 3, device="cuda")
            assert made(lambda: torch.take_along_dim(x.detach(), indices, 1, out=out)) == wrapped
            assert torch.take_along_dim(x, indices).shape == (3,)
            for args in ((indices[0], 1), (indices.int(), 1), (indices.expand(7, 3), 1), (indices, 2)):
                with pytest.raises((RuntimeError, IndexError), match=r"imension|Long"):
                    torch.take_along_dim(x, *args)
        torch.take_along_dim(x, indices, 1).sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape
    finally:
        gpu.turn_off()


def test_what_is_taken_along_a_dimension_is_the_hosts() -> None:
    gpu.turn_on("A100-40GB,torch=2.6,values=real")
    try:
        x, indices = torch.randn(1, 5, 4), torch.randint(0, 5, (3, 2, 1))
        for dim in (1, -2):
            expected = torch.take_along_dim(x, indices, dim)
            assert torch.equal(torch.take_along_dim(x.cuda(), indices.cuda(), dim).cpu(), expected)
    finally:
        gpu.turn_off()
