"""PyTorch's `flex_attention` on a virtual device.

Compiled, PyTorch's own compiler makes it. Here is what runs where nothing compiles it: PyTorch writes the scores out then. Where
the program compiled the code around and the compiler did not take it (a graph that runs operator by operator), it
is the kernel that the compiler would have made: it keeps its result and a float32 sum for each row of scores, and its backward
pass adds another such row. A device that computes writes the scores out there, too, as compiled code runs eagerly on it. After
`torch/_inductor/kernel/flex` and `torch/_higher_order_ops/flex_attention.py`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from gpumem_magic.failures import swallowed
from gpumem_magic.patching import Patches
from gpumem_magic.virtual.engine.tensors import VirtualTensor, engine_of

# Where the options lie among an operator's arguments, behind query, key and value; in the backward pass, what lies beside them.
_OPTIONS, _BUFFERS, _BESIDE = 3, 4, 9


def prepare(module: ModuleType, patches: Patches) -> None:
    operators = importlib.import_module("torch._higher_order_ops.flex_attention")
    forward, backward = type(module.flex_attention_hop), type(operators.flex_attention_backward)
    original, original_backward = forward.__call__, backward.__call__
    written_out = operators.FlexAttentionAutogradOp.backward.__code__

    def attend(operator: Any, query: Any, key: Any, value: Any, *more: Any) -> Any:
        if not isinstance(query, VirtualTensor):
            return original(operator, query, key, value, *more)
        if not engine_of(query).computes and _compiled():
            return _Kernel.apply(query, key, value, more[_OPTIONS])  # type: ignore[no-untyped-call]
        below = torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality)
        if below:
            return operators.sdpa_dense(query, key, value, *more)
        if torch.is_grad_enabled() and not any(more[_BUFFERS : _BUFFERS + 1]):
            more = _with_captured(query, more)
        return operators.flex_attention_autograd(query, key, value, *more)

    def attend_backward(operator: Any, query: Any, key: Any, value: Any, *more: Any) -> Any:
        if not isinstance(query, VirtualTensor):
            return original_backward(operator, query, key, value, *more)
        if any(code is written_out for code in _codes()):
            return operators.sdpa_dense_backward(query, key, value, *more)
        # Behind the two results, their gradients, two graphs, the mask, the scale and the options: what a score function uses.
        beside = more[_BESIDE] if len(more) > _BESIDE else ()
        return *_gradients(query, key, value), tuple(map(torch.empty_like, beside))

    # The compiler knows the operators by themselves, not by what calling them does.
    patches.set(forward, "__call__", attend)
    patches.set(backward, "__call__", attend_backward)


def _with_captured(query: torch.Tensor, more: tuple[Any, ...]) -> tuple[Any, ...]:
    """The options, where the score function uses tensors of its own that want a gradient: with one that is given them. (On a
    card Dynamo finds them.)"""
    score_mod = more[0]
    with FakeTensorMode(allow_non_fake_inputs=True):
        # (Of one element each: in the place of a single number a tensor of whole numbers is read when it is an index.)
        score = torch.zeros(1, dtype=query.dtype, device=query.device)
        indices = [torch.zeros(1, dtype=torch.int, device=query.device) for _ in range(4)]
        heard = _CapturedTensors()
        try:
            with heard:
                score_mod(score, *indices)
        except Exception as error:  # PyTorch's own call says what is wrong with it
            swallowed(error)
    captured = tuple(heard.captured.values())
    if not captured:
        return more

    def given_them(score: Any, batch: Any, head: Any, row: Any, column: Any, *buffers: Any) -> Any:
        with _OthersInstead({id(one): buffer for one, buffer in zip(captured, buffers, strict=True)}):
            return score_mod(score, batch, head, row, column)

    return given_them, *more[1:_BUFFERS], captured, *more[_BUFFERS + 1 :]


class _CapturedTensors(TorchFunctionMode):
    """Collects the device's tensors that functions are called with and that want a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.captured: dict[int, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for one in tree_leaves((args, kwargs)):
            if isinstance(one, VirtualTensor) and one.requires_grad:
                self.captured[id(one)] = one
        return func(*args, **(kwargs or {}))


class _OthersInstead(TorchFunctionMode):
    """Gives functions other tensors, by the `id` of those that they are called with."""

    def __init__(self, others: dict[int, Any]) -> None:
        super().__init__()
        self._others = others

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda one: self._others.get(id(one), one), (args, kwargs or {}))
        return func(*args, **kwargs)


def _compiled() -> bool:
    """Whether the program's own code around this call was compiled. (What PyTorch itself compiles is not: `Compiler.install`.)"""
    return any(code.co_name == "compile_wrapper" and code.co_filename.endswith("eval_frame.py") for code in _codes())


def _codes() -> Iterator[CodeType]:
    """Of the functions that are running, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def _like(query: torch.Tensor, size: int) -> torch.Tensor:
    """A result with a row for each query, its dimensions in the order in which the query's lie in memory."""
    shape = (*query.shape[:-1], size)
    order = sorted(range(query.dim()), key=query.stride, reverse=True)
    made = query.new_empty([shape[dim] for dim in order])
    return made.permute([order.index(dim) for dim in range(query.dim())])


def _gradients(query: Any, key: Any, value: Any) -> tuple[Any, ...]:
    """Of the compiled kernel's backward pass, which takes a sum for each row meanwhile."""
    delta = query.new_empty(query.shape[:-1], dtype=torch.float32)
    results = tuple(torch.empty_like(tensor) for tensor in (query, key, value))
    del delta
    return results


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], out: Any, sums: Any, highest: Any) -> Any:
    """The results, with what both ways keep for the backward pass."""
    ctx.save_for_backward(*inputs, out, sums)
    ctx.mark_non_differentiable(highest)
    ctx.set_materialize_grads(False)
    return out, sums, highest


class _Kernel(torch.autograd.Function):
    """The compiled kernel."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, options: dict[str, Any]) -> Any:
        out = _like(query, value.shape[-1])
        rows = query.shape[:-1] if options.get("OUTPUT_LOGSUMEXP", True) else (0,)
        sums = query.new_empty(rows, dtype=torch.float32)
        highest = query.new_empty(query.shape[:-1] if options.get("OUTPUT_MAX", False) else (0,), dtype=torch.float32)
        return _save_for_backward(ctx, (query, key, value), out, sums, highest)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (*_gradients(*ctx.saved_tensors[:3]), None)
