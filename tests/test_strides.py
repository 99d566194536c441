"""What is made number by number lies as its operands do, dimensions of one included: the host runs the same `TensorIterator`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.engine import strides

aten = torch.ops.aten


@pytest.fixture(autouse=True, scope="module")
def device() -> Iterator[None]:
    gpu.turn_on("A100-40GB")
    yield
    gpu.turn_off()


@st.composite
def operands(draw: st.DrawFn, count: int | None = None) -> list[torch.Tensor]:
    """Tensors that go together: the first is the largest, others may have a dimension of one, or one less, instead. count: None,
    one to three."""
    shape = draw(st.lists(st.sampled_from([1, 1, 2, 3, 4]), min_size=2, max_size=5))
    found = []
    for number in range(count or draw(st.integers(1, 3))):
        its = [1 if number and draw(st.booleans()) and draw(st.booleans()) else length for length in shape]
        its = its[1:] if number and draw(st.booleans()) and draw(st.booleans()) else its
        last = [0, *range(2, len(its)), 1] if len(its) > 2 else [*range(len(its))]
        order = draw(st.one_of(st.permutations(range(len(its))), st.just([*range(len(its))]), st.just(last)))
        one = torch.ones([its[dim] for dim in order]).permute([order.index(dim) for dim in range(len(its))])
        if draw(st.booleans()):
            # No element depends on the stride of a dimension of one.
            any_stride = st.sampled_from([1, 2, 7, its[-1], one.numel()])
            odd = [draw(any_stride) if length == 1 else held for length, held in zip(its, one.stride(), strict=True)]
            one = one.as_strided(its, odd)
        if draw(st.booleans()) and draw(st.booleans()) and its[-1] > 1:
            one = torch.cat([one, one], -1)[..., ::2]
        found.append(one)
    return found


def on_the_device(host: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device="cuda")


def agree(call: Callable[..., Any], *hosts: torch.Tensor) -> None:
    expected, found = call(*hosts), call(*map(on_the_device, hosts))
    assert (found.shape, found.stride()) == (expected.shape, expected.stride())


@given(operands())
def test_the_rule_says_as_the_host_does(given: list[torch.Tensor]) -> None:
    one, *others = given
    called: Any = {0: torch.neg, 1: torch.add, 2: torch.addcmul}[len(others)]
    expected = called(one, *others)
    assert strides.of_operands(expected.shape, [(part.shape, part.stride()) for part in given]) == expected.stride()


_OF_ONE = [
    torch.neg, torch.relu, torch.tanh, torch.square, lambda x: x + 1, lambda x: x / 2, lambda x: 1 - x, lambda x: x > 0,
    lambda x: x.clamp(0, 1), lambda x: torch.nan_to_num(x), torch.nn.functional.hardtanh, torch.nn.functional.silu,
    torch.empty_like, torch.zeros_like, torch.clone, lambda x: x.half(), lambda x: x.flip(0), torch.tril,
    lambda x: torch.softmax(x, 0), lambda x: torch.log_softmax(x, 1), lambda x: torch.sort(x, 0)[1],
    lambda x: aten.native_dropout(x, 0.5, True)[0] if x.is_cuda else torch.empty_like(x),
    torch.deg2rad, torch.rot90, lambda x: torch.rot90(x, -1, (-1, 0)), lambda x: torch.rot90(x, 2), lambda x: torch.rot90(x, 4),
    lambda x: torch.renorm(x, 2, 0, 1), lambda x: torch.linalg.vector_norm(x, dim=1, keepdim=True),
    lambda x: torch.layer_norm(x, x.shape[-1:]), lambda x: torch.conj_physical(x.to(torch.complex64)),
]  # fmt: skip
_OF_TWO = [
    torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.atan2, torch.eq, torch.floor_divide,
    lambda x, y: torch.rsub(x, y), lambda x, y: torch.lerp(x, y, 0.5), lambda x, y: torch.where(x > 0, y, 0.0),
    lambda x, y: x.masked_fill(y > 0, 0), lambda x, y: torch.xlogy(x, y), lambda x, y: torch.clamp(x, y),
]  # fmt: skip
_OF_THREE = [torch.addcmul, torch.addcdiv, torch.lerp, lambda x, y, z: torch.where(x > 0, y, z), torch.clamp]
# Of a gradient, and of what it belongs to.
_GRADIENTS = [
    lambda g, x: aten.threshold_backward(g, x, 0), lambda g, x: aten.leaky_relu_backward(g, x, 0.1, False),
    lambda g, x: aten.silu_backward(g, x), lambda g, x: aten.gelu_backward(g, x), lambda g, x: aten.tanh_backward(g, x),
    lambda g, x: aten.sigmoid_backward(g, x), lambda g, x: aten.hardswish_backward(g, x),
    lambda g, x: aten.softplus_backward(g, x, 1, 20), lambda g, x: aten.softshrink_backward(g, x, 0.5),
]  # fmt: skip


@given(operands(1), st.sampled_from(range(len(_OF_ONE))))
def test_of_one(given: list[torch.Tensor], which: int) -> None:
    agree(_OF_ONE[which], *given)


@given(operands(2), st.sampled_from(range(len(_OF_TWO))))
def test_of_two(given: list[torch.Tensor], which: int) -> None:
    agree(_OF_TWO[which], *given)


@given(operands(3), st.sampled_from(range(len(_OF_THREE))))
def test_of_three(given: list[torch.Tensor], which: int) -> None:
    agree(_OF_THREE[which], *given)


@given(operands(2), st.sampled_from(range(len(_GRADIENTS))))
def test_of_a_gradient(given: list[torch.Tensor], which: int) -> None:
    x, other = given
    agree(_GRADIENTS[which], other.expand(x.shape), x)


def test_an_image_of_a_batch_of_one_that_attention_gives_goes_on_in_the_plain_layout() -> None:
    # As in a diffusion model's attention block: what is turned back and added to lies as the first does, and its batch's stride
    # is none of an image with the channels last. (The rule in Python gave 2048, with which convolutions have them last.)
    tokens, skipped = torch.randn(1, 64, 32, device="cuda"), torch.randn(1, 32, 8, 8, device="cuda")
    image = (tokens.transpose(-1, -2).reshape(1, 32, 8, 8) + skipped) / 1.0
    assert image.stride() == (32, 1, 256, 32)
    assert torch.conv2d(image, torch.randn(4, 32, 3, 3, device="cuda"), padding=1).is_contiguous()
