"""Tensors of which PyTorch knows that they are zero: no memory, until something wants their values."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from asked_for import made
from torch.autograd import forward_ad

from gpumem_magic.virtual import gpu

COUNT = 1000
BYTES = 4 * COUNT


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    gpu.turn_on("A100-80GB")
    yield
    gpu.turn_off()


def test_the_gradient_of_a_sign_takes_no_memory() -> None:
    # sgn_backward gives `_efficientzerotensor` for real numbers (FunctionsManual.cpp).
    x = torch.ones(COUNT, device="cuda", requires_grad=True)
    gradient = torch.ones(COUNT, device="cuda")
    signs = x.sgn()
    assert made(lambda: torch.autograd.grad(signs, x, gradient)) == []
    # Two looks alike, of which one has memory: the other's view is not taken for its.
    (zeros,) = torch.autograd.grad(x.sgn(), x, gradient)
    assert made(lambda: [gradient.view(10, 100).sin(), zeros.view(10, 100).sin()]) == [BYTES, 4, BYTES]


def test_what_wants_values_gets_one_zero_expanded() -> None:
    # zeroTensorFallback: at::zeros({}).expand(sizes), four bytes.
    x = torch.ones(COUNT, device="cuda", requires_grad=True)
    (zeros,) = torch.autograd.grad(x.sgn(), x, torch.ones(COUNT, device="cuda"))
    assert made(lambda: zeros.sin()) == [4, BYTES]
    assert made(lambda: zeros.double()) == [4, 2 * BYTES]


def test_a_sum_with_known_zeros_is_a_copy_of_the_other() -> None:
    # BinaryOps.cpp, `maybe_add_maybe_sub`: its shape is found with both on the meta device, where the known zeros are copied (one
    # zero), and then the other is copied. A product gives known zeros again, `mul_zerotensor`.
    x = torch.ones(COUNT, device="cuda", requires_grad=True)
    one = torch.ones(COUNT, device="cuda")
    (zeros,) = torch.autograd.grad(x.sgn(), x, one)
    assert made(lambda: zeros + one) == [4, BYTES]
    # (Its shape is found in the same way.)
    assert made(lambda: zeros * one) == [4]


def test_the_tangent_of_a_constant_has_none() -> None:
    # d(v * 2) = t * 2 + v * 0: of the latter nothing is made, and the sum is a copy.
    x, tangent = torch.ones(COUNT, device="cuda"), torch.ones(COUNT, device="cuda")
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent)
        assert made(lambda: dual * 2) == [BYTES, BYTES, 4, BYTES]
