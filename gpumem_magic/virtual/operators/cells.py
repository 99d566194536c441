"""One step of an LSTM or a GRU, and layers of them where cuDNN does not run them: CUDA's fused kernels, step by step.

Two products, and a kernel that makes what its gradient needs and then the states (``RNN.cpp`` in ATen/native, ``cuda/RNN.cu``).
C++ asks its tensors ``is_cuda`` and would take the host's way here, with seven or eight smaller operators for each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gpumem_magic.patching import Patches
from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.modes import pushed
from gpumem_magic.virtual.engine.rules import special
from gpumem_magic.virtual.engine.tensors import VirtualTensor

# Beside the three gates, a GRU keeps its state, and what of it goes into the new one.
_KEPT_BY_GRU, _GATES_OF_GRU = 5, 3


def _lstm_step(input: Any, states: tuple[Any, Any], weights: Sequence[Any]) -> tuple[Any, Any]:
    """weights: of the input and of the state, both biases (or None), and the projection (or None)."""
    by_input, by_state, input_bias, state_bias, projection = weights
    gates = torch.matmul(input, by_input.t()), torch.matmul(states[0], by_state.t())
    hidden, cell, _ = _aten._thnn_fused_lstm_cell.default(*gates, states[1], input_bias, state_bias)
    return hidden if projection is None else torch.matmul(hidden, projection.t()), cell


def _gru_step(input: Any, state: Any, weights: Sequence[Any]) -> Any:
    by_input, by_state, input_bias, state_bias, _ = weights
    gates = torch.matmul(input, by_input.t()), torch.matmul(state, by_state.t())
    return _aten._thnn_fused_gru_cell.default(*gates, state, input_bias, state_bias)[0]


def _simple_step(bent: Callable[[Any], Any]) -> Callable[..., Any]:
    def step(input: Any, state: Any, weights: Sequence[Any]) -> Any:
        by_input, by_state, input_bias, state_bias, _ = weights
        sums = torch.nn.functional.linear(state, by_state, state_bias)
        of_input = torch.nn.functional.linear(input, by_input, input_bias)
        out = bent(sums.add_(of_input))
        del of_input  # (C++ lets go of it first.)
        return out

    return step


_STEPS: dict[str, Callable[..., Any]] = {
    "lstm": _lstm_step,
    "gru": _gru_step,
    "rnn_tanh": _simple_step(torch.tanh),
    "rnn_relu": _simple_step(torch.relu),
}


def run_layers(
    kind: str, input: Any, states: Any, weights: Sequence[Any], has_biases: bool, layers: int, dropout: float, train: bool,
    bidirectional: bool, batch_first: bool,
) -> Any:  # fmt: skip
    """One of `_STEPS` for sequences of one length. states: as the operator takes them. What C++ holds until the end of a function
    is held here, and given back in its order."""
    step, is_lstm = _STEPS[kind], kind == "lstm"
    each = len(weights) // (layers * (1 + bidirectional))
    groups = [_group(weights[start : start + each], has_biases) for start in range(0, len(weights), each)]
    hidden = list(zip(*(one.unbind(0) for one in states), strict=True)) if is_lstm else list(states.unbind(0))
    last: list[Any] = []
    x = input.transpose(0, 1) if batch_first else input
    for layer in range(layers):
        steps, outputs, held = x.unbind(0), [], []
        for backwards in range(1 + bidirectional):
            place = layer * (1 + bidirectional) + backwards
            state, made = hidden[place], []
            for one in reversed(steps) if backwards else steps:
                state = step(one, state, groups[place])
                made.append(state[0] if is_lstm else state)
            if backwards:
                made.reverse()
            outputs.append(torch.stack(made))
            held.append(made)
            last.append(state)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        del state, made, one, steps
        while held:
            outputs.pop()
            _let_go(held.pop())
        if dropout and train and layer < layers - 1:
            x = torch.dropout(x, dropout, train)
    x = x.transpose(0, 1) if batch_first else x
    if not is_lstm:
        final = torch.stack(last)
        _let_go(last)
        return x, final
    # C++ works out its arguments from the last one on.
    parts = [list(one) for one in zip(*last, strict=True)]
    last.clear()
    cell, final = torch.stack(parts[1]), torch.stack(parts[0])
    _let_go(parts[1])
    _let_go(parts[0])
    return x, final, cell


def _let_go(tensors: list[Any]) -> None:
    """From the first one on, as a vector does; a list begins at its end."""
    while tensors:
        del tensors[0]


def _group(weights: Sequence[Any], has_biases: bool) -> list[Any]:
    matrices, rest = list(weights[:2]), list(weights[2:])
    biases = [rest.pop(0) for _ in range(2)] if has_biases else [None, None]
    return [*matrices, *biases, rest[0] if rest else None]


def is_on_a_device(input: Any) -> bool:
    return isinstance(input, VirtualTensor) and not torch._C._are_functorch_transforms_active()


def _check_cell(input: Any, states: Sequence[Any], by_input: Any, by_state: Any) -> None:
    """`check_rnn_cell_forward_input` and `check_rnn_cell_forward_hidden` in ``RNN.cpp``."""
    if input.shape[1] != by_input.shape[1]:
        raise RuntimeError(f"input has inconsistent input_size: got {input.shape[1]} expected {by_input.shape[1]}")
    for number, state in enumerate(states):
        if input.shape[0] != state.shape[0]:
            raise RuntimeError(
                f"Input batch size {input.shape[0]} doesn't match hidden{number} batch size {state.shape[0]}"
            )
        if state.shape[1] != by_state.shape[1]:
            raise RuntimeError(
                f"hidden{number} has inconsistent hidden_size: got {state.shape[1]}, expected {by_state.shape[1]}"
            )


def _lstm_cell(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    if not is_on_a_device(input):
        return _aten.lstm_cell.default.decompose(input, hx, w_ih, w_hh, b_ih, b_hh)
    _check_cell(input, hx, w_ih, w_hh)
    return _lstm_step(input, tuple(hx), (w_ih, w_hh, b_ih, b_hh, None))


def _gru_cell(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    if not is_on_a_device(input):
        return _aten.gru_cell.default.decompose(input, hx, w_ih, w_hh, b_ih, b_hh)
    _check_cell(input, [hx], w_ih, w_hh)
    return _gru_step(input, hx, (w_ih, w_hh, b_ih, b_hh, None))


_WAYS = {_aten.lstm_cell.default: _lstm_cell, _aten.gru_cell.default: _gru_cell}


def install(patches: Patches) -> None:
    """Gives the cells CUDA's way for tensors of the virtual devices."""
    patches.kernels("AutogradCUDA", _WAYS.items())


@special(*_WAYS)
def _whole(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """In inference mode the operators come whole, below the key that they are registered for."""
    return _WAYS[func](*args, **kwargs)


@special(_aten._thnn_fused_lstm_cell.default)
def _lstm(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """The workspace, from which the gradient is made, comes before the states."""
    gates, _, cell = args[:3]
    with pushed(engine.mode):
        workspace = torch.empty_like(gates, memory_format=torch.contiguous_format)
        return torch.empty_like(cell), torch.empty_like(cell), workspace


@special(_aten._thnn_fused_lstm_cell_backward_impl.default)
def _lstm_backward(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    _, _, before, _, workspace, has_bias = args
    with pushed(engine.mode):
        gates = torch.empty_like(workspace, memory_format=torch.contiguous_format)
        return gates, torch.empty_like(before), gates.sum(0) if has_bias else None


@special(_aten._thnn_fused_gru_cell.default)
def _gru(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    state = args[2]
    with pushed(engine.mode):
        workspace = state.new_empty(state.shape[0], state.shape[1] * _KEPT_BY_GRU)
        return torch.empty_like(state), workspace


@special(_aten._thnn_fused_gru_cell_backward.default)
def _gru_backward(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    gradient, workspace, has_bias = args
    with pushed(engine.mode):
        width = workspace.shape[1] // _KEPT_BY_GRU * _GATES_OF_GRU
        gates = [workspace.new_empty(workspace.shape[0], width) for _ in range(2)]
        of_state = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        biases = [one.sum(0) for one in gates] if has_bias else [None, None]
    return *gates, of_state, *biases
