"""RNNs, LSTMs and GRUs as cuDNN runs them: one kernel for all steps and layers, forward and backward.

Tensors are made as in ``ATen/native/cudnn/RNN.cpp``: the results, a workspace for each call, and the *reserve*, which is kept for
backward. Only cuDNN knows how large the last two are; both are estimates here, from PyTorch 2.8 on by what cuDNN 9.19 took on an
H100 for 2,474 calls (torch 2.11.0+cu130, driver 580.159, November 2026). Of 1,774 reserves 1,768 are met to the byte. A
workspace has parts for the steps and for the states, which begin at multiples of 32 bytes; of 680 calls in the tests' data 640
are met to the byte (475 before the parts were told apart). Layers in bfloat16 are never kept on the chip. Other cards are taken
to be alike.

Before, a published pair of measurements (PyTorch issue 2895: 4 layers of 320 units on a P100, 25,000 steps in all) is met to the
byte for the reserve of an LSTM and a GRU; the workspace is put together from the weights once more and a few states for each
layer, and meets the same two to the byte if the batch there was 100. Dropout between layers is not counted there.

The weights lie in one buffer, as `flatten_parameters` puts them: all matrices, layer by layer, then all biases, for which there
is room in layers without them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.backends.cudnn.rnn as cudnn_rnn

from gpumem_magic.patching import Patches
from gpumem_magic.private import aten as _aten
from gpumem_magic.units import MIB, round_up
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.modes import origin, pushed
from gpumem_magic.virtual.engine.rules import special
from gpumem_magic.virtual.engine.tensors import VirtualTensor
from gpumem_magic.virtual.operators import cells

# cuDNN's numbers for the kinds of cells (`cudnnRNNMode_t`).
_RELU, _TANH, _LSTM, _GRU = range(4)
_MODES = {"rnn_relu": _RELU, "rnn_tanh": _TANH, "lstm": _LSTM, "gru": _GRU}
_GATES = {_RELU: 1, _TANH: 1, _LSTM: 4, _GRU: 3}
# What is kept for backward, for each step, layer and unit: gates and, for an LSTM, the cell; for a GRU its gates' parts.
_KEPT = {_RELU: 1, _TANH: 1, _LSTM: 5, _GRU: 6}
# Beside two numbers for each gate, the states that a layer works on: hidden, cell, their gradients.
_STATES = {_RELU: 1, _TANH: 1, _LSTM: 3, _GRU: 2}
_DTYPES = (torch.float32, torch.float16, torch.float64, torch.bfloat16)
# Since when cuDNN takes bfloat16 (pull request 164411): before, `cudnn_is_acceptable` names the other types only. The build of
# 2.8 goes cell by cell.
_BFLOAT16_FROM = (2, 10)


# The first PyTorch for which the recorded calls stand (cuDNN 9.10).
_AS_RECORDED_FROM = (2, 8)
_OF_EACH_LAYER = 8 * MIB
_HEAD, _ALIGNMENT = 256, 32
_OF_EACH_SEQUENCE = 8
# The widest layers that cuDNN is asked to keep on the chip (`use_rnn_persist_small_h`), on the way forward and back, and of
# which types.
_SMALL = {_RELU: (384, 256), _TANH: (384, 256), _LSTM: (192, 128), _GRU: (192, 128)}
_DTYPES_ON_THE_CHIP = (torch.float32, torch.float16)


class _PerStep(NamedTuple):
    """Parts that cuDNN works in, as a fit to recorded calls: of each step so many of the units' width, of the input's, of the
    wider of both and of the projection's; of each sequence's state in each layer so many of the units' width and of the
    projection's."""

    units: int
    widths: int
    widest: int
    states: int
    projected: int = 1
    projected_states: int = 2


@dataclass(frozen=True)
class Sizes:
    """A call of cuDNN's. steps: of all sequences together, padded: as if they were all as long as the longest; batch: the
    sequences; weights: numbers in all matrices; width: of each step of the input; small: whether layers are kept on the chip;
    packed: whether the sequences are packed."""

    mode: int
    steps: int
    batch: int
    hidden: int
    layers: int
    directions: int
    weights: int
    bytes_each: int
    width: int = 0
    projected: int = 0
    padded: int = 0
    dropout: bool = False
    train: bool = True
    small: bool = False
    packed: bool = False

    def reserve(self, version: tuple[int, int]) -> int:
        """Bytes kept from forward to backward: what each layer's cells keep, what goes from layer to layer, and what was dropped
        there, a bit for each number."""
        numbers = _KEPT[self.mode] * self.layers + self.layers - 1
        kept = self.hidden * numbers + (self.layers * (self.hidden + self.projected) if self.projected else 0)
        kept *= self.steps * self.directions * self.bytes_each
        if version < _AS_RECORDED_FROM:
            return kept
        bits = self.padded * self.hidden * self.directions**2 if self.dropout else 0
        return round_up(kept, _ALIGNMENT) + _HEAD + (self.layers - 1) * round_up(-(-bits // 8), _ALIGNMENT)

    def workspace(self, version: tuple[int, int]) -> int:
        """Bytes that a call holds while it runs."""
        if version < _AS_RECORDED_FROM:
            states = 2 * _GATES[self.mode] + _STATES[self.mode]
            states *= self.batch * self.hidden * self.directions * self.layers
            return (self.weights + states) * self.bytes_each
        rows = max(self._rows_of(plan) for plan in self._plans())
        of_batch = 0 if self.packed else round_up(_OF_EACH_SEQUENCE * self.batch, _ALIGNMENT)
        beside = _OF_EACH_LAYER * self.layers * self.directions + _HEAD + of_batch
        return beside + round_up(self.weights * self.bytes_each, _ALIGNMENT) + rows

    def _rows_of(self, plan: _PerStep) -> int:
        """Bytes of a plan's parts, each of which begins at a multiple; those of two directions lie together."""
        widest, states = max(self.hidden, self.width), self.layers * self.batch
        parts = [
            (plan.units, self.steps * self.hidden, self.directions),
            (plan.widths, self.steps * self.width, 1),
            (plan.widest, self.steps * widest, plan.widest),
            (plan.states, states * self.hidden, self.directions),
        ]
        if self.projected:
            each = ((plan.projected, self.steps), (plan.projected_states, states))
            parts += [(count * self.directions, of * self.projected, 1) for count, of in each]
        return sum(
            round_up(min(together, count - first) * numbers * self.bytes_each, _ALIGNMENT)
            for count, numbers, together in parts
            for first in range(0, count, max(1, together))
        )

    def _plans(self) -> list[_PerStep]:
        """What is worked on; the way that takes most counts. What is dropped out, and what a layer without gates gives to the
        next one, is kept apart."""
        two, deep, dropped = self.directions == 2, self.layers > 1, self.dropout and self.train
        if self.packed:
            return self._packed_plans(two, deep, dropped)
        if self.mode == _LSTM:
            return self._plans_of_lstm(two, deep, dropped)
        if self.mode == _GRU:
            apart = dropped and deep
            if self.small:
                if not self.train:
                    return [_PerStep(24, 1, 0, 10) if two else _PerStep(16, 1, 0, 4)]
                return [_PerStep(20 + 2 * deep, 2, 4, 14) if two else _PerStep(17 + deep, 2, 1, 6)]
            if two:
                return [_PerStep(8, 2, 4, 14) if self.train and deep else _PerStep(12, 1, 0, 14)]
            if not self.train:
                return [_PerStep(4, 1, 0, 5)]
            return [_PerStep(5, 1, 0, 5) if apart else _PerStep(3, 2, 1, 5)]
        if self.small:
            if not self.train:
                return [_PerStep(12, 1, 0, 10) if two else _PerStep(6, 1, 0, 4)]
            return [_PerStep(15 + 2 * deep, 2, 4, 14) if two else _PerStep(12 + deep, 2, 1, 6)]
        if not self.train:
            return [_PerStep(8, 1, 0, 10) if two else _PerStep(2, 1, 0, 3)]
        return [_PerStep(6 + 2 * deep, 2, 4, 14) if two else _PerStep(3, 2, 1, 5)]

    def _plans_of_lstm(self, two: bool, deep: bool, dropped: bool) -> list[_PerStep]:
        if self.projected:
            ahead, back = (_PerStep(14, 1, 0, 20), _PerStep(4 + 2 * deep, 2, 4, 18, 2, 4)) if two else (
                _PerStep(5, 1, 0, 8), _PerStep(2, 2, 1, 7, 2, 4)
            )  # fmt: skip
            return [ahead, back] if self.train else [ahead]
        if self.small:
            ahead, back = (_PerStep(30, 1, 0, 18), _PerStep(18 + 2 * deep, 2, 4, 26)) if two else (
                _PerStep(21 + dropped, 1, 0, 8), _PerStep(15 + dropped, 3, 0, 12)
            )  # fmt: skip
        else:
            ahead, back = (_PerStep(14, 1, 0, 24), _PerStep(6 + 2 * deep, 2, 4, 26)) if two else (
                _PerStep(5 + dropped, 1, 0, 10), _PerStep(3, 2, 1, 11)
            )  # fmt: skip
        return [ahead, back] if self.train else [ahead]

    def _packed_plans(self, two: bool, deep: bool, dropped: bool) -> list[_PerStep]:
        """Where sequences are packed."""
        if self.mode in (_LSTM, _GRU):
            units, states = (4, 6) if self.mode == _LSTM else (3, 3)
            if two:
                units, states = 2 * units + 4, 2 * states + 4
            plans = [_PerStep(units + (dropped and not two), 0, 0, states)]
            return [*plans, _PerStep(0, 1, 0, states)] if self.train else plans
        if not self.train:
            return [_PerStep(6, 0, 0, 6) if two else _PerStep(1, 0, 0, 1)]
        if two:
            return [_PerStep(4 if deep else 2, 0, 4, 6)]
        return [_PerStep(2, 0, 0, 1), _PerStep(0, 1, 0, 1)] if deep else [_PerStep(1, 0, 1, 1)]


class _CastFlat(torch.autograd.Function):
    """Under autocast: all weights in one buffer of the lower type, and views of it; gradients are cast back one by one."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.dtypes = [one.dtype for one in weights]
        buffer = torch.empty(_numbers(weights), dtype=dtype, device=weights[0].device)
        return tuple(view.copy_(one) for view, one in zip(_views(buffer, weights), weights, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, *(one.to(dtype) for one, dtype in zip(gradients, ctx.dtypes, strict=True))


def _numbers(weights: Sequence[torch.Tensor]) -> int:
    """How many the buffer has. PyTorch asks cuDNN for two biases in each layer, whether they are used or not
    (`CUDNN_RNN_DOUBLE_BIAS`): 18 of 19 recorded layers without them, laid out anew, have room for them (H100, 2.11)."""
    held = sum(one.numel() for one in weights)
    if any(one.dim() == 1 for one in weights):
        return held
    # (All but those of projections, which have fewer rows.)
    rows = weights[0].shape[0]
    return held + sum(rows for one in weights if one.shape[0] == rows)


def _views(buffer: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of the buffer with the weights' shapes, where cuDNN looks for them: all matrices first, then all biases."""
    places = {}
    at = 0
    for wanted in (2, 1):
        for index, one in enumerate(weights):
            if one.dim() == wanted:
                places[index] = at
                at += one.numel()
    return [buffer.narrow(0, places[index], one.numel()).view(one.shape) for index, one in enumerate(weights)]


def _is_no_reserve(engine: Engine, args: Any, kwargs: Any) -> bool:
    return bool(args[0].dim() != 1 or args[0].dtype != torch.uint8)


@special(_aten.clone.default, plain=_is_no_reserve, by_looks=True)
def _clone(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """A backward that may come again (`retain_graph=True`) is given a copy of the reserve: where the host computes, what was kept
    for its gradient goes with that."""
    out = engine.run(func, args, kwargs, device)
    source, copy = (engine.table.find(one.untyped_storage()) for one in (args[0], out))
    if source is not None and copy is not None:
        copy.kept = source.kept
    return out


def _flat_buffer(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The buffer that holds all weights and nothing else, if they lie in one."""
    storage = weights[0].untyped_storage()
    total = _numbers(weights)
    if storage.nbytes() != total * weights[0].element_size():
        return None
    if any(one.untyped_storage()._cdata != storage._cdata for one in weights):
        return None
    with torch.no_grad():
        return weights[0].detach().as_strided((total,), (1,), 0)


def _call(
    mode: int, input: Any, batch_sizes: Any, states: Any, weights: Any, has_biases: bool, layers: int, dropout: float,
    train: bool, bidirectional: bool, batch_first: bool,
) -> Any:  # fmt: skip
    """One call of cuDNN's kernel. Returns the output and the last states."""
    hx, cx = states if mode == _LSTM else (states, None)
    hidden = (hx if cx is None else cx).shape[2]
    projected = hx.shape[2] if hx.shape[2] != hidden else 0
    if torch.is_autocast_enabled("cuda"):
        lower = torch.get_autocast_dtype("cuda")
        if any(one.dtype == torch.float32 for one in weights):
            weights = _CastFlat.apply(lower, *weights)  # type: ignore[no-untyped-call]
        input, hx, cx = (one if one is None else one.to(lower) for one in (input, hx, cx))
    each = (4 if has_biases else 2) + bool(projected)
    sizes = [] if batch_sizes is None else batch_sizes.tolist()
    out, hy, cy, *_ = _aten._cudnn_rnn.default(
        input, list(weights), each, _flat_buffer(weights), hx, cx, mode, hidden, projected, layers, batch_first, dropout,
        train, bidirectional, sizes, None,
    )  # fmt: skip
    return (out, hy) if cx is None else (out, hy, cy)


def _check(input: Any, states: Any, weights: Sequence[Any]) -> None:
    """All on one device (`check_attributes` in ``RNN.h`` of ATen/native)."""
    for name, tensors in (
        ("hidden", (states,) if isinstance(states, torch.Tensor) else states),
        ("parameter", weights),
    ):
        for one in tensors:
            if one.device != input.device:
                raise RuntimeError(
                    f"Input and {name} tensors are not at the same device, found input tensor at {input.device} and {name} "
                    f"tensor at {one.device}"
                )


def _plain(operator: Any, kind: str, mode: int) -> Callable[..., Any]:
    """For sequences of one length, in one tensor."""

    def kernel(input: Any, states: Any, weights: Any, *rest: Any) -> Any:
        _check(input, states, weights)
        if not _acceptable(input, weights):
            if cells.is_on_a_device(input) and input.numel():
                return cells.run_layers(kind, input, states, weights, *rest)
            return operator.decompose(input, states, weights, *rest)
        has_biases, layers, dropout, train, bidirectional, batch_first = rest
        return _call(mode, input, None, states, weights, has_biases, layers, dropout, train, bidirectional, batch_first)

    return kernel


def _packed(operator: Any, mode: int) -> Callable[..., Any]:
    """For packed sequences."""

    def kernel(data: Any, batch_sizes: Any, states: Any, weights: Any, *rest: Any) -> Any:
        _check(data, states, weights)
        if not _acceptable(data, weights):
            return operator.decompose(data, batch_sizes, states, weights, *rest)
        has_biases, layers, dropout, train, bidirectional = rest
        return _call(mode, data, batch_sizes, states, weights, has_biases, layers, dropout, train, bidirectional, False)

    return kernel


_WAYS: dict[Any, Callable[..., Any]] = {}
for _name, _mode in _MODES.items():
    _operators = getattr(_aten, _name)
    _WAYS[_operators.input] = _plain(_operators.input, _name, _mode)
    _WAYS[_operators.data] = _packed(_operators.data, _mode)


class _HasCudnn:
    """Of the devices that are on."""

    has_cudnn = False
    takes_bfloat16 = False


_HAS_CUDNN = _HasCudnn()


def _acceptable(input: torch.Tensor, weights: Sequence[torch.Tensor]) -> bool:
    return (
        _HAS_CUDNN.has_cudnn
        and torch.backends.cudnn.enabled
        and isinstance(input, VirtualTensor)
        and input.dtype in _DTYPES
        and (input.dtype != torch.bfloat16 or _HAS_CUDNN.takes_bfloat16)
        and bool(input.numel())
        and all(isinstance(one, VirtualTensor) for one in weights)
        # For vmap, forward derivatives and second derivatives PyTorch has no way through cuDNN's kernel.
        and not torch._C._are_functorch_transforms_active()
    )


def install(patches: Patches, has_cudnn: bool, version: tuple[int, int]) -> None:
    """Gives the operators cuDNN's way for tensors of the virtual devices. Cards without cuDNN run cell by cell.

    version: the oldest PyTorch of the devices."""
    acceptable: Any = torch.backends.cudnn.is_acceptable

    def is_acceptable(tensor: Any) -> bool:
        """What Python asks: of bfloat16, which C++ runs in cudnn, it thinks otherwise, and leaves its weights where they are."""
        if isinstance(tensor, VirtualTensor):
            known = torch.backends.cudnn.CUDNN_TENSOR_DTYPES
            return has_cudnn and torch.backends.cudnn.enabled and tensor.dtype in known
        return bool(acceptable(tensor))

    patches.set(_HAS_CUDNN, "has_cudnn", has_cudnn)
    patches.set(_HAS_CUDNN, "takes_bfloat16", version >= _BFLOAT16_FROM)

    patches.set(torch.backends.cudnn, "is_acceptable", is_acceptable)
    patches.kernels("AutogradCUDA", _WAYS.items())
    if not has_cudnn:
        return
    # Builds for the host have neither.
    patches.set(torch, "_use_cudnn_rnn_flatten_weight", lambda: True)
    patches.set(cudnn_rnn, "get_cudnn_mode", lambda mode: _MODES[mode.lower()])


@special(*_WAYS)
def _whole(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """In inference mode the operators come whole, below the key that they are registered for."""
    return _WAYS[func](*args, **kwargs)


@special(_aten._cudnn_rnn_flatten_weight.default)
def _flatten(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """Puts the weights into one buffer, and makes them views of it."""
    weights = args[0]
    with pushed(engine.mode):
        buffer = torch.zeros(_numbers(weights), dtype=weights[0].dtype, device=weights[0].device)
        for view, one in zip(_views(buffer, weights), weights, strict=True):
            view.copy_(one)
            one.set_(view)
    return buffer


def _sizes(
    input: Any, hx: Any, weights: Any, mode: int, hidden: int, layers: int, two: bool, batches: Sequence[int],
    dropout: float, train: bool, back: bool,
) -> Sizes:  # fmt: skip
    steps, batch = input.numel() // input.shape[-1], hx.shape[1]
    matrices = sum(one.numel() for one in weights if one.dim() == 2)
    projected = hx.shape[2] if hx.shape[2] != hidden else 0
    small = not projected and not batches and input.dtype in _DTYPES_ON_THE_CHIP and hidden <= _SMALL[mode][back]
    padded = len(batches) * batch if batches else steps
    return Sizes(
        mode, steps, batch, hidden, layers, 1 + two, matrices, input.element_size(), input.shape[-1], projected, padded,
        bool(dropout), train, small, bool(batches),
    )  # fmt: skip


@special(_aten._cudnn_rnn.default)
def _forward(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    (input, weights, _, buffer, hx, cx, mode, hidden, projected, layers, batch_first, dropout, train, two, batches,
     _) = args  # fmt: skip
    engine.memory.uses_cudnn(device)
    if train and dropout:
        engine.memory.drops_out_in_cudnn(device)
    sizes = _sizes(input, hx, weights, mode, hidden, layers, two, batches, dropout, train, back=False)
    version = engine.memory.torch_version(device)
    width = (projected or hidden) * (1 + two)
    with pushed(engine.mode):
        steps = input.transpose(0, 1) if batch_first and not batches else input
        x = steps.contiguous()
        output = x.new_empty((*x.shape[:-1], width))
        hy = torch.empty_like(hx, memory_format=torch.contiguous_format)
        cy = hx.new_empty(0) if cx is None else torch.empty_like(cx, memory_format=torch.contiguous_format)
        if buffer is None:
            buffer = x.new_empty(_numbers(weights))
    with (
        origin("recurrent_scratch"),
        engine.scratch(device, sizes.workspace(version)),
        origin("recurrent_kept"),
        pushed(engine.mode),
    ):
        reserve = torch.empty(sizes.reserve(version) if train else 0, dtype=torch.uint8, device=x.device)
    if steps is not input:
        with pushed(engine.mode):
            output = output.transpose(0, 1)
    return output, hy, cy, reserve, buffer


def refuse_in_evaluation(train: bool) -> None:
    """`_cudnn_rnn_backward_input` in ``cudnn/RNN.cpp``: what the gradient needs is kept in training alone."""
    if not train:
        raise RuntimeError("cudnn RNN backward can only be called in training mode")


@special(_aten._cudnn_rnn_backward.default)
def _backward(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """The gradients of input and states, then those of the weights: each lays out the input for itself."""
    (input, weights, _, buffer, hx, cx, output, of_output, of_hy, of_cy, mode, hidden, _, layers, batch_first, dropout, train,
     two, batches, _, _, wanted) = args  # fmt: skip
    if of_output is None and of_hy is None and of_cy is None:
        return None, None, None, [None] * len(weights)
    refuse_in_evaluation(train)
    engine.memory.uses_cudnn(device)
    sizes = _sizes(input, hx, weights, mode, hidden, layers, two, batches, dropout, train, back=True)
    workspace = sizes.workspace(engine.memory.torch_version(device))
    swapped = batch_first and not batches

    def plain(one: Any) -> Any:
        return (one.transpose(0, 1) if swapped else one).contiguous()

    with pushed(engine.mode):
        dy = torch.zeros_like(output) if of_output is None else of_output
        dhy = torch.zeros_like(hx) if of_hy is None else of_hy.contiguous()
        dcy = None if cx is None else torch.zeros_like(cx) if of_cy is None else of_cy.contiguous()
        x, plain_dy = plain(input), plain(dy)
        dx, dhx = torch.empty_like(x), torch.empty_like(dhy)
        dcx = None if dcy is None else torch.empty_like(dcy)
    with origin("recurrent_scratch"), engine.scratch(device, workspace):
        pass
    del x, plain_dy
    gradients: list[Any] = [None] * len(weights)
    if wanted[3]:
        with pushed(engine.mode):
            x = plain(input)
            of_all = torch.zeros_like(buffer)
        with origin("recurrent_scratch"), engine.scratch(device, workspace), pushed(engine.mode):
            if any(one.dim() == 1 for one in weights):
                gradients = _views(of_all, weights)
            else:
                # (Without biases there are other parts than the buffer has: PyTorch copies those that there are.)
                gradients = [of_all.new_empty(one.shape) for one in weights]
        del of_all
        engine.table.drain()
        del x
    if swapped:
        with pushed(engine.mode):
            dx = dx.transpose(0, 1)
    # C++ lets go of the last first.
    del dy, dcy, dhy
    return dx, dhx, dcx, gradients
