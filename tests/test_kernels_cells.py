"""LSTMs and GRUs as CUDA's fused kernels run them, step by step: single cells, and layers without cuDNN."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from asked_for import made, steps
from torch import nn

from gpumem_magic.virtual import gpu

BATCH, INPUT, HIDDEN = 4, 5, 10
STATE = BATCH * HIDDEN * 4
OF_LSTM, OF_GRU = 4 * STATE, 3 * STATE
KINDS: tuple[tuple[Any, dict[str, Any]], ...] = (
    (nn.LSTM, {"num_layers": 2, "bidirectional": True, "dropout": 0.1}),
    (nn.LSTM, {"proj_size": 3, "batch_first": True}),
    (nn.GRU, {"num_layers": 2, "bias": False}),
    (nn.RNN, {"num_layers": 2, "bidirectional": True}),
    (nn.RNN, {"nonlinearity": "relu", "batch_first": True}),
)


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    # (Of this version, whichever is installed: before 2.12 products with a bias keep a workspace more.)
    gpu.turn_on("A100-40GB,torch=2.13")
    # cuBLAS's workspaces come with the first products, forward and backward, and stay.
    one = zeros(8, 8, grad=True)
    torch.mm(one, one).sum().backward()
    yield
    gpu.turn_off()


def zeros(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.zeros(*shape, device="cuda", requires_grad=grad)


def test_a_step_of_an_lstm_is_two_products_and_a_kernel_that_keeps_the_gates() -> None:
    cell = nn.LSTMCell(INPUT, HIDDEN, device="cuda")
    x, states = zeros(BATCH, INPUT), (zeros(BATCH, HIDDEN), zeros(BATCH, HIDDEN))
    assert made(lambda: cell(x, states)) == [OF_LSTM, OF_LSTM, OF_LSTM, STATE, STATE]
    with torch.inference_mode():
        assert made(lambda: cell(x, states)) == [OF_LSTM, OF_LSTM, OF_LSTM, STATE, STATE]


def test_the_gradient_of_a_step_is_one_kernel() -> None:
    cell = nn.LSTMCell(INPUT, HIDDEN, bias=False, device="cuda")
    x, states = zeros(BATCH, INPUT), (zeros(BATCH, HIDDEN), zeros(BATCH, HIDDEN))
    out = cell(x, states)[0]
    ones = torch.ones_like(out)
    # Of the gates, of the cell's state (which nobody wants), and then of both matrices.
    found = made(lambda: out.backward(ones))
    assert sorted(found) == sorted([OF_LSTM, STATE, 4 * HIDDEN * INPUT * 4, 4 * HIDDEN * HIDDEN * 4])
    assert found[:2] == [OF_LSTM, STATE]


def test_a_step_of_a_gru() -> None:
    cell = nn.GRUCell(INPUT, HIDDEN, device="cuda")
    x, state = zeros(BATCH, INPUT), zeros(BATCH, HIDDEN)
    assert made(lambda: cell(x, state)) == [OF_GRU, OF_GRU, 5 * STATE, STATE]
    out = cell(x, state)
    ones = torch.ones_like(out)
    of_biases = [3 * HIDDEN * 4] * 2
    assert made(lambda: out.backward(ones))[:5] == [OF_GRU, OF_GRU, STATE, *of_biases]


@pytest.mark.parametrize(("kind", "way"), KINDS)
def test_layers_without_cudnn_give_what_the_host_gives(kind: Any, way: dict[str, Any]) -> None:
    found = []
    with torch.backends.cudnn.flags(enabled=False):
        for device in ("cpu", "cuda"):
            layer = kind(INPUT, HIDDEN, **way, device=device)
            x = torch.zeros(3, BATCH, INPUT, device=device, requires_grad=True)
            out, last = layer(x)
            out.sum().backward()
            every = [out, x.grad, *(last if isinstance(last, tuple) else [last]), *(p.grad for p in layer.parameters())]
            found.append([(tuple(one.shape), one.dtype) for one in every])
    assert found[0] == found[1]


@pytest.mark.parametrize(("kind", "way"), KINDS)
def test_layers_without_cudnn_compute_what_the_host_computes(kind: Any, way: dict[str, Any]) -> None:
    gpu.turn_off()
    gpu.turn_on("A100-40GB,values=real")
    layer, x = kind(INPUT, HIDDEN, **{**way, "dropout": 0.0}), torch.randn(3, BATCH, INPUT)
    wanted = layer(x)[0]
    with torch.backends.cudnn.flags(enabled=False):
        out = layer.cuda()(x.cuda())[0]
    assert torch.allclose(out.detach().cpu(), wanted.detach(), atol=1e-5)


def test_a_layer_without_cudnn_takes_its_steps_one_by_one() -> None:
    with torch.backends.cudnn.flags(enabled=False):
        layer = nn.GRU(INPUT, HIDDEN, device="cuda")
        x, state = zeros(2, BATCH, INPUT), zeros(1, BATCH, HIDDEN)
        step = [OF_GRU, OF_GRU, 5 * STATE, STATE]
        # Two steps, all outputs, the last state.
        assert made(lambda: layer(x, state)) == [*step, *step, 2 * STATE, STATE]
        with torch.no_grad():
            # What each step keeps goes at its end, and its outputs when they are together.
            freed = [size for action, size in steps(lambda: layer(x, state)) if action == "free_requested"]
    assert freed == [5 * STATE, OF_GRU, OF_GRU] * 2 + [STATE, STATE]


def test_both_directions_are_put_together_at_the_end() -> None:
    with torch.backends.cudnn.flags(enabled=False):
        layer = nn.RNN(INPUT, HIDDEN, bidirectional=True, device="cuda")
        x, state = zeros(2, BATCH, INPUT), zeros(2, BATCH, HIDDEN)
        # A step: of the state, of the input (added to it), and bent. Each direction's steps, then both, and the last states.
        direction = [STATE] * 3 * 2 + [2 * STATE]
        assert made(lambda: layer(x, state)) == [*direction, *direction, 4 * STATE, 2 * STATE]
