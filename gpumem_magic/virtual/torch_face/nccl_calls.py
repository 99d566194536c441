"""NCCL's collectives over several virtual devices in one process (`torch.cuda.nccl`), by which CUDA builds for Linux add up the
gradients of `torch.nn.DataParallel`, and libraries run the parts of a layer.

They write into tensors that are there; NCCL's own buffers are not PyTorch's. The checks, their order and their words are those of
``torch/csrc/cuda/nccl.cpp``, and what is said of an operation that it does not know is NCCL's own (``ncclGetErrorString``).
The names are those of `torch._C` in CUDA builds; CPU builds do not have them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from gpumem_magic.patching import Patches
from gpumem_magic.virtual.engine import values
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.refusals import refuse_device
from gpumem_magic.virtual.engine.tensors import VirtualTensor, engine_of

_Tensors = Sequence[Any]
_SUM, _PRODUCT, _LARGEST, _SMALLEST, _MEAN = range(5)  # ncclRedOp_t
_ADDING: dict[int, Callable[[Any, Any], Any]] = {
    _SUM: lambda total, one: total.add_(one),
    _PRODUCT: lambda total, one: total.mul_(one),
    _LARGEST: lambda total, one: total.maximum(one),
    _SMALLEST: lambda total, one: total.minimum(one),
    _MEAN: lambda total, one: total.add_(one),
}


def install(patches: Patches) -> None:
    patches.set(torch.cuda.nccl, "is_available", _is_available(torch.cuda.nccl.is_available))
    for name, function in {
        "_nccl_reduce": _reduce,
        "_nccl_all_reduce": _all_reduce,
        "_nccl_broadcast": _broadcast,
        "_nccl_all_gather": _all_gather,
        "_nccl_reduce_scatter": _reduce_scatter,
    }.items():
        patches.set(torch._C, name, function)


def connect(tensors: _Tensors, devices: Sequence[int]) -> None:
    """NCCL takes memory of its own on each device."""
    if tensors and isinstance(tensors[0], VirtualTensor) and len(devices) > 1:
        engine = cast(Engine, engine_of(tensors[0]))
        for index in devices:
            if not 0 <= index < engine.device_count:
                refuse_device(index, engine.device_count)
        engine.memory.communication.in_one_process(devices)


def _is_available(original: Any) -> Any:
    def is_available(tensors: Any) -> bool:
        if not any(isinstance(tensor, VirtualTensor) for tensor in tensors):
            return bool(original(tensors))
        devices = [tensor.device for tensor in tensors]
        fit = all(tensor.is_cuda and not tensor.is_sparse and tensor.is_contiguous() for tensor in tensors)
        return fit and len(set(devices)) == len(devices)

    return is_available


def _reduce(inputs: _Tensors, output: Any, root: int, op: int, *how: Any) -> None:
    ready = list(inputs)
    _check_root(root, ready)
    _begin(ready, [output if place == root else one for place, one in enumerate(ready)])
    _write([output], lambda hosts: [_together(hosts, op)], ready)


def _all_reduce(inputs: _Tensors, outputs: _Tensors, op: int, *how: Any) -> None:
    _begin(inputs, outputs)
    _write(outputs, lambda hosts: [_together(hosts, op)] * len(hosts), inputs)


def _broadcast(inputs: _Tensors, root: int, *how: Any) -> None:
    _check_root(root, inputs)
    _begin(inputs, inputs)
    others = [one for place, one in enumerate(inputs) if place != root]
    _write(others, lambda hosts: [hosts[root]] * len(others), inputs)


def _all_gather(inputs: _Tensors, outputs: _Tensors, *how: Any) -> None:
    _begin(inputs, outputs, larger=len(inputs))
    _write(outputs, lambda hosts: [torch.cat([one.flatten() for one in hosts])] * len(hosts), inputs)


def _reduce_scatter(inputs: _Tensors, outputs: _Tensors, op: int, *how: Any) -> None:
    _begin(inputs, outputs, smaller=len(inputs))
    _write(outputs, lambda hosts: _together(hosts, op).flatten().chunk(len(hosts)), inputs)


def _begin(inputs: _Tensors, outputs: _Tensors, larger: int = 1, smaller: int = 1) -> None:
    """larger, smaller: how many times as large as an input an output is, and the other way."""
    if not inputs:
        raise RuntimeError("input sequence can't be empty")
    if len(inputs) != len(outputs):
        raise RuntimeError(
            "inputs and outputs sequences have to be of the same length, "
            f"but got input of length {len(inputs)} and output of length {len(outputs)}"
        )
    first, devices = inputs[0], list[int]()
    for one, into in zip(inputs, outputs, strict=True):
        _check_one(one, first.dtype)
        if one.numel() != first.numel():
            raise RuntimeError("all inputs must have the same number of elements")
        _check_one(into, first.dtype)
        if one.get_device() != into.get_device():
            raise RuntimeError("input and output must be on the same device")
        if into.numel() * smaller != first.numel() * larger:
            raise RuntimeError("output must be of size input_size * size_multiplier")
        if one.get_device() in devices:
            raise RuntimeError("inputs must be on unique devices")
        devices.append(one.get_device())
    connect(inputs, devices)


def _check_root(root: int, inputs: _Tensors) -> None:
    if not 0 <= root < len(inputs):
        raise RuntimeError("invalid root")


def _check_one(tensor: Any, dtype: torch.dtype) -> None:
    if not tensor.is_cuda or tensor.is_sparse:
        raise RuntimeError("input and output elements have to be cuda dense Tensors")
    if tensor.dtype != dtype:
        raise RuntimeError("all inputs and outputs must be of the same Tensor dtype")
    if not tensor.is_contiguous():
        raise RuntimeError("all inputs and outputs have to be contiguous")


def _write(written: _Tensors, work_out: Callable[[list[Any]], Sequence[Any]], inputs: _Tensors) -> None:
    """The results' values, where they are computed, which need no memory on a device; else nobody knows them any more."""
    for one in written:
        values.forget(one)
    if written and engine_of(written[0]).computes:
        found = work_out([engine_of(one).host_of(one) for one in inputs])
        for one, result in zip(written, found, strict=True):
            into: Any = engine_of(one).host_of(one)
            into.copy_(result.reshape(into.shape))


def _together(hosts: Sequence[Any], op: int) -> Any:
    if op not in _ADDING:
        raise RuntimeError("NCCL Error 4: invalid argument (run with NCCL_DEBUG=WARN for details)")
    total = hosts[0].clone()
    for host in hosts[1:]:
        total = _ADDING[op](total, host)
    return total / len(hosts) if op == _MEAN else total
