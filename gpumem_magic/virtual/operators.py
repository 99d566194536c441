"""Operators whose result on a virtual device is not just a shape: copies across, values, and sizes that depend on values."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from gpumem_magic.virtual.engine import Engine, special
from gpumem_magic.virtual.modes import origin
from gpumem_magic.virtual.tensors import VirtualTensor

_aten = torch.ops.aten


# ---- values


def stand_in(dtype: torch.dtype) -> complex | bool:
    """The value that a virtual device gives where a program reads one: zero, in the type that the program expects."""
    if dtype.is_complex:
        return 0j
    if dtype.is_floating_point:
        return 0.0
    return False if dtype == torch.bool else 0


@special(_aten._local_scalar_dense.default)
def _read_scalar(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    engine.count_stand_in()
    return stand_in(args[0].dtype)


@special(_aten.equal.default)
def _equal(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> bool:
    engine.count_stand_in()
    return False


@special(_aten._assert_async.default, _aten._assert_async.msg)
def _assert_nothing(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> None:
    """A check of values, of which there are none."""


# ---- copies


@special(_aten._to_copy.default)
def _to_copy(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    source = args[0]
    target = kwargs.get("device")
    if not isinstance(source, VirtualTensor):
        if target is None or target.type == "cpu":
            return func(*args, **kwargs)
        meta = _aten.empty_like.default(
            source, dtype=kwargs.get("dtype"), device=torch.device("meta"), memory_format=kwargs.get("memory_format")
        )
        with origin("host_copy"):
            return engine.wrap(meta, device if target.index is None else target.index)
    if target is None or target.type in ("cuda", "meta"):
        return engine.run(func, args, kwargs, device)
    shape = engine.fake_call(func, args, {**kwargs, "pin_memory": None})
    engine.count_stand_in()
    return host_zeros(shape)


def host_zeros(like: FakeTensor) -> torch.Tensor:
    """A real host tensor of zeros with the fake tensor's shape, strides and dtype."""
    blank: torch.Tensor = _aten.empty_strided.default(
        like.size(), like.stride(), dtype=like.dtype, device=torch.device("cpu")
    )
    return blank.zero_()


@special(_aten.copy_.default)
def _copy(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    target = args[0]
    if isinstance(target, VirtualTensor):
        return engine.run(func, args, kwargs, device)
    engine.count_stand_in()
    return target.zero_()


# ---- sizes that depend on values: the largest that there can be


def _blank(engine: Engine, shape: tuple[int, ...], dtype: torch.dtype, device: int) -> FakeTensor:
    """A fake tensor on the device, without memory yet."""
    meta = _aten.empty.memory_format(shape, dtype=dtype, device=torch.device("meta"))
    tensor: FakeTensor = FakeTensor.__new__(FakeTensor, engine.fake, meta, torch.device("cuda", device))
    return tensor


def _placed(engine: Engine, shape: tuple[int, ...], dtype: torch.dtype, device: int) -> Any:
    tensor = _blank(engine, shape, dtype, device)
    engine.settle(tensor)
    return tensor


@special(_aten.nonzero.default)
def _nonzero(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    engine.largest_sizes["nonzero"] += 1
    return _placed(engine, (args[0].numel(), args[0].dim()), torch.int64, device)


@special(_aten.masked_select.default)
def _masked_select(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    engine.largest_sizes["masked_select"] += 1
    elements = torch.broadcast_shapes(args[0].shape, args[1].shape).numel()
    with engine.scratch(device, elements * 8):
        return _placed(engine, (elements,), args[0].dtype, device)


@special(_aten._unique2.default)
def _unique(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    engine.largest_sizes["unique"] += 1
    source = args[0]
    flags = dict(zip(("sorted", "return_inverse", "return_counts"), args[1:], strict=False)) | kwargs
    elements = source.numel()
    inverse = tuple(source.shape) if flags.get("return_inverse") else (0,)
    return (
        _placed(engine, (elements,), source.dtype, device),
        _placed(engine, inverse, torch.int64, device),
        _placed(engine, (elements if flags.get("return_counts") else 0,), torch.int64, device),
    )


@special(_aten.unique_consecutive.default, _aten.unique_dim.default)
def _unique_along(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    engine.largest_sizes["unique"] += 1
    source = args[0]
    by_dim = func is _aten.unique_dim.default
    dim = args[1] if by_dim else (args[3] if len(args) > 3 else kwargs.get("dim"))
    shape = (source.numel(),) if dim is None else tuple(source.shape)
    count = source.numel() if dim is None else source.shape[dim]
    return (
        _placed(engine, shape, source.dtype, device),
        _placed(engine, tuple(source.shape) if dim is None else (count,), torch.int64, device),
        _placed(engine, (count,), torch.int64, device),
    )


@special(_aten.repeat_interleave.Tensor)
def _repeat_interleave(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    size = kwargs.get("output_size")
    if size is None:
        # There is no largest size here; every element once is what a program with stand-in counts can go on with.
        engine.largest_sizes["repeat_interleave (each element once)"] += 1
        size = args[0].numel()
    return _placed(engine, (size,), torch.int64, device)


@special(_aten.index.Tensor)
def _index(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    source, indices = args[0], list(args[1])
    if not isinstance(source, VirtualTensor):
        raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
    expanded: list[Any] = []
    scratch = 0
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            expanded.append(index)
        elif isinstance(index, VirtualTensor):
            # CUDA finds the positions first, in memory that it gives back after.
            engine.largest_sizes["boolean mask"] += 1
            scratch += index.numel() * index.dim() * 8
            expanded += [_blank(engine, (index.numel(),), torch.int64, device) for _ in range(index.dim())]
        else:
            expanded += list(index.nonzero(as_tuple=True))
    with engine.scratch(device, scratch):
        return engine.run(func, (source, expanded), kwargs, device)
