"""Operators of CUDA for which PyTorch has no shape rule: what they return, from their source.

Found by asking of every operator with a CUDA kernel whether fake tensors can run it, and by PyTorch's own operator tests. The
rest of that list is out of a program's reach here: kernels of cuDNN and MIOpen (their layers run as PyTorch's own), quantised
and nested tensors, and parts of operators that come whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine.calls import copies_of
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.half_precision import accumulator
from gpumem_magic.virtual.engine.modes import pushed
from gpumem_magic.virtual.engine.rules import special
from gpumem_magic.virtual.engine.tensors import VirtualTensor
from gpumem_magic.virtual.operators.data_dependent import _placed


def empty_like(engine: Engine, tensor: Any, device: int, dtype: torch.dtype | None = None) -> Any:
    """A new tensor with the shape and memory format of another."""
    options = {} if dtype is None else {"dtype": dtype}
    return engine.run(_aten.empty_like.default, (tensor,), options, device)


def _returns_like(position: int) -> Callable[..., Any]:
    def handler(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
        return empty_like(engine, args[position], device)

    return handler


# Operators whose only result is like one of their arguments, by that argument's position.
_LIKE = (
    overloads("""
        _dirichlet_grad _standard_gamma _standard_gamma_grad binomial batch_norm_elemt glu_jvp _masked_softmax
        _masked_softmax_backward
    """),
    overloads("batch_norm_backward_elemt"),
)
for _position, _operators in enumerate(_LIKE):
    special(*_operators)(_returns_like(_position))


# Which arguments are copied, once the gradient is there, unless they lie in one piece.
_IN_ONE_PIECE: dict[Any, tuple[int, ...]] = {
    _aten.multi_margin_loss_backward.default: (1, 0, 2, 5),
    _aten.multilabel_margin_loss_backward.default: (1, 2, 4, 0),
    _aten.fractional_max_pool3d_backward.default: (),
}


@special(*_IN_ONE_PIECE)
def _in_one_piece(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """A gradient with the shape of the input (``MultiMarginLoss.cu``, ``MultiLabelMarginCriterion.cu``,
    ``FractionalMaxPool3d.cu``)."""
    out = engine.run(_aten.empty_like.default, (args[1],), {"memory_format": torch.contiguous_format}, device)
    asked = (args[place] for place in _IN_ONE_PIECE[func] if place < len(args))
    with engine.scratch(device, *copies_of(*(one for one in asked if one is not None))):
        return out


@special(_aten.bernoulli.out)
def _drawn_into(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """Into a tensor of any type, which PyTorch's rule wants to be one of the probabilities' (`bernoulli_out` in
    ``native/Distributions.cpp``)."""
    out = kwargs["out"]
    if out.shape != args[0].shape:
        engine.run(_aten.resize_.default, (out, args[0].shape), {}, device)
    return engine.run(_aten.bernoulli_.Tensor, (out, args[0]), {}, device)


@special(_aten._sample_dirichlet.default)
def _drawn_shares(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """What is drawn is divided by its sums in place (`_s_dirichlet_cuda` in ``cuda/Distributions.cpp``)."""
    out = empty_like(engine, args[0], device)
    with pushed(engine.mode):
        sums = out.sum(-1, keepdim=True)
    del sums
    engine.table.drain()
    return out


# ---- SyncBatchNorm: statistics of each channel, in float32 for half precision


@special(
    *overloads("batch_norm_stats batch_norm_update_stats batch_norm_gather_stats batch_norm_gather_stats_with_counts")
)
def _batch_norm_stats(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    shape = (args[0].shape[1],)
    return tuple(_placed(engine, shape, accumulator(args[0].dtype), device) for _ in range(2))


@special(_aten.batch_norm_backward_reduce.default)
def _batch_norm_reduce(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """Two sums for the input's gradient, and the gradients of weight and bias; those that nobody wants are empty."""
    source, weight, wanted = args[1], args[4], args[5:8]
    dtype = accumulator(source.dtype)
    kinds = (dtype, dtype, *[dtype if weight is None else weight.dtype] * 2)
    return tuple(
        _placed(engine, (source.shape[1],) if want else (0,), kind, device)
        for want, kind in zip((wanted[0], wanted[0], wanted[1], wanted[2]), kinds, strict=True)
    )


# ---- nothing new


@special(
    *overloads("_fused_sgd_ _fused_sgd_.tensor_lr _fused_adagrad_"),
    *[
        getattr(packet, "tensor_lr")  # noqa: B009 - not in every version
        for packet in (_aten._fused_adagrad_, _aten._fused_adam_, _aten._fused_adamw_)
        if "tensor_lr" in packet.overloads()
    ],
)
def _fused_step(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> None:
    """Everything is written in place."""


@special(_aten.is_set_to.default)
def _is_set_to(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> bool:
    one, other = args
    return (
        engine.locate(one) == engine.locate(other)
        and one.storage_offset() == other.storage_offset()
        and (one.shape, one.stride()) == (other.shape, other.stride())
    )


# ---- rules that PyTorch's fake tensors got after 2.9; they hold for all versions


@special(_aten._to_dense.default)
def _to_dense(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """Of a sparse tensor: PyTorch's rule came after 2.11."""
    source = args[0]
    if source.layout is not torch.sparse_coo:
        return engine.run(func, args, kwargs, device)
    return _placed(engine, tuple(source.shape), source.dtype, device)


@special(_aten._weight_norm_interface_backward.default)
def _weight_norm_backward(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """The gradients of direction and magnitude: PyTorch's rule came after 2.9."""
    _, saved_v, saved_g, *_ = args
    return empty_like(engine, saved_v, device), empty_like(engine, saved_g, device)


# ---- a number of the device for a tensor of the host: it is read


def _fills_on_device(engine: Engine, args: Any, kwargs: Any) -> bool:
    *before, value = args
    return any(isinstance(arg, VirtualTensor) for arg in before) or value.dim() > 0


@special(_aten.fill_.Tensor, plain=_fills_on_device, by_looks=True)
def _fill(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """(`masked_fill` refuses that: `masked_fill__cuda` in ``cuda/Indexing.cu``.)"""
    if _fills_on_device(engine, args, kwargs):
        return engine.run(func, args, kwargs, device)
    *before, value = args
    return _aten.fill_.Scalar(*before, value.item())


@special(
    *overloads("linspace.Tensor_Tensor linspace.Tensor_Scalar linspace.Scalar_Tensor"),
    *overloads("logspace.Tensor_Tensor logspace.Tensor_Scalar logspace.Scalar_Tensor"),
)
def _steps_between(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """Both ends are read (``RangeFactories.cpp``), and the result is on the host unless a device is asked for."""
    ends = [one.item() if isinstance(one, torch.Tensor) else one for one in args[:2]]
    by_numbers, args = func.overloadpacket.default, (*ends, *args[2:])
    there = kwargs.get("device")
    if there is None or there.type == "cpu":
        return by_numbers(*args, **kwargs)
    return engine.run(by_numbers, args, kwargs, device)


@special(_aten._scaled_mm.out)
def _scaled_into(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """Of 8-bit products PyTorch knows the form without `out`; compiled code takes this one."""
    out = kwargs["out"]
    engine.fake_call(_aten._scaled_mm.default, args, {name: value for name, value in kwargs.items() if name != "out"})
    engine.forget(out)
    engine.memory.after_operator(func, args, device)
    return out
