"""Convolutions as CUDA runs them: copies into the kernel's layout, cuDNN's scratch memory, and columns without cuDNN.

After ``Convolution.cpp`` and ``cudnn/ConvShared.cpp`` of ATen. cuDNN runs in one layout (`convolution_layouts`): a tensor in
another is copied for the call, such as a plain weight for an input with channels last. The gradient of the input comes first,
then the weight's, then the bias's, which is a sum of PyTorch's own; the result's gradient is copied once for the first two where
its strides are like those of another layout, and for each where they are like none's. What cuDNN itself takes is estimated in
`cudnn`.

Where cuDNN is off, or can't (before torch 2.6 for single samples of more than 2^31 values, and in 2.9 in three dimensions for
half precision), PyTorch spreads each sample out into columns: as many times its values as the kernel has points. A published
request of 108.21 GiB (pytorch issue 95024) is met to the printed digit.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from math import prod
from typing import Any

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine.alike import Kernels
from gpumem_magic.virtual.engine.calls import bytes_of
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.half_precision import HALF
from gpumem_magic.virtual.engine.memory import Convolution
from gpumem_magic.virtual.engine.modes import pushed
from gpumem_magic.virtual.engine.rules import BESIDE, TRACED, special
from gpumem_magic.virtual.operators.convolution_layouts import (
    Look,
    forward_runs_with_last,
    look_of,
    look_of_input,
    of_backward,
)

_DIMENSIONS_OF_SEQUENCES, _DIMENSIONS_OF_VOLUMES = 3, 5
_MOST_INDEXED = 2**31 - 1


def _copy_bytes(tensor: torch.Tensor, look: Look, last: bool) -> int:
    """What a copy in the layout takes; 0 where the tensor has it."""
    return 0 if look.is_in(last) else bytes_of(tensor)


def _is_by_depth(fine: Any, weight: Any, groups: int, transposed: bool, last: bool) -> bool:
    grouped = not transposed and groups > 1 and groups == fine.shape[1] and weight.shape[0] % groups == 0
    return bool(grouped and not last)


class _Call:
    """A convolution's arguments, and who runs it."""

    def __init__(
        self, engine: Engine, device: int, fine: Any, weight: Any, coarse: Any, stride: Any, padding: Any, dilation: Any,
        transposed: bool, groups: int, last: bool,
    ) -> None:  # fmt: skip
        self.engine = engine
        self.device = device
        self.weight = weight
        self.transposed = transposed
        sizes = tuple(weight.shape[2:])
        self.points = prod(sizes)
        self.needs_columns = self.points > 1 or set(stride) != {1} or set(padding) != {0} or transposed
        # A transposed convolution is the gradient of one whose input has its result's shape.
        self.fine, self.coarse = tuple(fine.shape), tuple(coarse.shape)
        self.by_depth = _is_by_depth(fine, weight, groups, transposed, last)
        self.groups = groups
        self.stride: tuple[int, ...] = tuple(stride)
        self.padding: tuple[int, ...] = tuple(padding)
        self.dilation: tuple[int, ...] = tuple(dilation)

    def by_cudnn(self) -> bool:
        if not torch.backends.cudnn.enabled or self.by_depth:
            return False
        version = self.engine.memory.torch_version(self.device)
        if version < (2, 6):
            one = max(prod(self.fine), prod(self.coarse)) // max(1, self.fine[0])
            if one > _MOST_INDEXED:
                return False
        return not (version == (2, 9) and len(self.fine) == 5 and self.weight.dtype in HALF and self.points > 1)

    def run(self, way: str, last: bool) -> None:
        """The memory that a kernel holds and gives back. Raises out of memory only for what PyTorch itself asks for.

        last: whether cuDNN runs it with the channels last.
        """
        if self.by_cudnn():
            shapes = (self.fine, tuple(self.weight.shape), self.coarse)
            how = (self.stride, self.padding, self.dilation)
            call = Convolution(way, *shapes, *how, self.groups, self.weight.dtype, last)
            self.engine.memory.convolve(self.device, call)
        elif not self.by_depth and self.needs_columns:
            with self.engine.scratch(self.device, self._column_bytes()):
                # The columns are multiplied with the weight.
                self.engine.memory.after_operator(_aten.mm.default, (), self.device)

    def _column_bytes(self) -> int:
        return int(self.fine[1] * self.points * prod(self.coarse[2:]) * self.weight.element_size())


@special(_aten._convolution.default)
def _inner(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    return _forward(engine, _aten.convolution.default, args[:9], kwargs, device)


@special(_aten.convolution.default)
def _forward(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    if kwargs or len(args) < 9 or not _is_plain_call(args[0], args[1]):
        return engine.run(func, args, kwargs, device)
    input, weight, _, stride, padding, dilation, transposed, _, groups = args[:9]
    last = forward_runs_with_last(input, weight)
    with ExitStack() as held:
        held.enter_context(engine.scratch(device, _copy_bytes(input, look_of(input), last)))
        copied = engine.scratch(device, _copy_bytes(weight, look_of(weight), last))
        if _is_by_depth(input, weight, groups, transposed, last) and input.dim() < _DIMENSIONS_OF_VOLUMES:
            # Both are plain before a depthwise one has its result (`conv_depthwise2d_cuda_out` in ``DepthwiseConv2d.cu``, which
            # sequences go through as images of one row).
            held.enter_context(copied)
            return engine.run(func, args, kwargs, device)
        out = engine.run(func, args, kwargs, device)
        held.enter_context(copied)
        fine, coarse = (out, input) if transposed else (input, out)
        call = _Call(engine, device, fine, weight, coarse, stride, padding, dilation, transposed, groups, last)
        call.run("input" if transposed else "forward", last)
        return out


@special(_aten.convolution.default, table=TRACED)
def _traced(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """A trace has the operator that this one calls in C++, and not it (``DONT_RECORD_TRACE`` in gen_trace_type.py)."""
    cudnn, tracer = torch.backends.cudnn, torch._C.DispatchKeySet(torch._C._dispatch_key_parse("Tracer"))
    flags = cudnn.benchmark, cudnn.deterministic, cudnn.enabled, cudnn.allow_tf32
    included, kept_out = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with pushed(engine.mode), torch._C._ForceDispatchKeyGuard(included | tracer, kept_out - tracer):
        return _aten._convolution.default(*args[:9], *flags)


@special(_aten.convolution_backward.default)
def _backward(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    if kwargs or len(args) < 11 or not _is_plain_call(args[1], args[2]):
        return engine.run(func, args, kwargs, device)
    gradient, input, weight, _, stride, padding, dilation, transposed, _, groups, wanted = args[:11]
    results = engine.fake_call(func, args, kwargs)
    of_input, of_weight, of_bias = results
    fine, coarse = (gradient, input) if transposed else (input, gradient)
    last = forward_runs_with_last(input, weight)
    call = _Call(engine, device, fine, weight, coarse, stride, padding, dilation, transposed, groups, last)
    with ExitStack() as throughout:
        if input.dim() == _DIMENSIONS_OF_SEQUENCES:
            # (They are images of one row, made plain before anything else.)
            throughout.enter_context(engine.scratch(device, _copy_bytes(input, look_of(input), last=False)))
        if call.by_cudnn():
            _by_cudnn(call, args, of_input, of_weight, last)
        else:
            gradient = _without_cudnn(call, args, of_input, of_weight, throughout)
        if wanted[2]:
            engine.settle(of_bias)
            _sum_up(engine, gradient, of_bias, device)
    return results


def _by_cudnn(call: _Call, args: Any, of_input: Any, of_weight: Any, forward_last: bool) -> None:
    """The gradients of the input and the weight (`cudnn_convolution_backward` and `cudnn_convolution_transpose_backward`).

    forward_last: whether the forward runs with the channels last.
    """
    engine, device = call.engine, call.device
    gradient, input, weight = args[:3]
    transposed, wanted = args[7], args[10]
    lying = of_backward(gradient, input, weight, transposed, wanted[1])

    def copied(tensor: torch.Tensor, look: Look, last: bool) -> AbstractContextManager[None]:
        return engine.scratch(device, _copy_bytes(tensor, look, last))

    with ExitStack() as held:
        if wanted[1]:
            held.enter_context(copied(input, look_of_input(input), forward_last))
        held.enter_context(engine.scratch(device, bytes_of(gradient) if lying.is_gradient_copied else 0))
        if wanted[0]:
            last = lying.for_input
            engine.settle(of_input)
            with copied(weight, look_of(weight), last), copied(gradient, lying.gradient, last):
                call.run("forward" if transposed else "input", last)
        if wanted[1]:
            last = lying.for_weight
            first, second = copied(gradient, lying.gradient, last), copied(input, lying.input, last)
            if transposed:
                first, second = second, first
            with first, second:
                engine.settle(of_weight)
                call.run("weight", last)


def _without_cudnn(call: _Call, args: Any, of_input: Any, of_weight: Any, throughout: ExitStack) -> torch.Tensor:
    """The same by PyTorch's own kernels, which want everything plain. Gives back the gradient that the bias's is made of."""
    engine, device = call.engine, call.device
    gradient: torch.Tensor = args[0]
    input, weight = args[1:3]
    transposed, wanted = args[7], args[10]
    of_plain_input = engine.scratch(device, _copy_bytes(input, look_of_input(input), last=False))
    of_plain_weight = engine.scratch(device, _copy_bytes(weight, look_of(weight), last=False))
    of_plain_gradient = engine.scratch(device, _copy_bytes(gradient, look_of(gradient), last=False))
    if call.by_depth and len(call.fine) < _DIMENSIONS_OF_VOLUMES:
        # Of a depthwise one the weight's comes first, made of a plain input (``DepthwiseConv2d.cu``).
        with of_plain_gradient:
            with of_plain_input if wanted[1] else nullcontext():
                engine.settle(of_weight)
            with of_plain_weight if wanted[0] else nullcontext():
                engine.settle(of_input)
        return gradient
    with ExitStack() as held:
        stack = held if call.by_depth else throughout
        stack.enter_context(of_plain_gradient)
        if wanted[1]:
            stack.enter_context(of_plain_input)
        if wanted[0]:
            engine.settle(of_input)
            with of_plain_weight:
                call.run("forward" if transposed else "input", last=False)
        if wanted[1]:
            engine.settle(of_weight)
            call.run("weight", last=False)
    if call.by_depth:
        return gradient
    plain: torch.Tensor = engine.fake_call(_aten.clone.default, (gradient,), {"memory_format": torch.contiguous_format})
    return plain


def _sum_up(engine: Engine, gradient: torch.Tensor, of_bias: Any, device: int) -> None:
    """What the kernel takes that adds up a bias's gradient: the result's, over all but the channels."""
    func = _aten.sum.dim_IntList
    places = [place for place in range(gradient.dim()) if place != 1]
    kernels = BESIDE[func](engine, func, (gradient, places), {}, of_bias, device)
    assert isinstance(kernels, Kernels)
    engine.run_kernels(kernels, device)


def _is_plain_call(input: Any, weight: Any) -> bool:
    return isinstance(input, torch.Tensor) and input.dim() >= 3 and input.numel() > 0 and weight.numel() > 0
