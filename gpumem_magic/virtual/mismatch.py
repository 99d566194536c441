"""Tensors on different devices in one operator: PyTorch's own errors for them."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_aten = torch.ops.aten

# Operators which take tensors of several devices: copies, and index tensors that may stay on the host.
_MIXING = {
    _aten.copy_.default,
    _aten._to_copy.default,
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
    _aten._foreach_copy_.default,
    _aten.set_.source_Tensor,
    _aten.set_.source_Storage,
    _aten.set_.source_Storage_storage_offset,
    _aten._has_compatible_shallow_copy_type.default,
    _aten.is_same_size.default,
}

# (operator, argument) as CUDA's own kernels name them, where the outer operator only forwards the call.
_FORWARDED = {"embedding": ("index", "_index_select")}

# Kernels that are generated as structured ones: their wrapper has one underscore, all others have two.
_STRUCTURED = {
    "mm", "addmm", "bmm", "baddbmm", "addmv", "gather", "scatter", "scatter_add", "index_add", "linalg_cross",
    "nll_loss_forward", "cat",
}  # fmt: skip


def refuse_mixed_devices(func: Any, args: Any, kwargs: Any, *, sure: bool = False) -> None:
    """Raises PyTorch's RuntimeError if the tensors are not all on one device.

    A host tensor without dimensions counts as a number. `sure`: the fake mode has already found a mismatch.
    """
    if func in _MIXING and not sure:
        return
    named = list(_named_tensors(func, args, kwargs))
    on_device = [tensor.device for _, tensor in named if tensor.device.type == "cuda"]
    for name, tensor in named:
        if on_device and tensor.device != on_device[0] and not (tensor.dim() == 0 and tensor.device.type == "cpu"):
            _refuse(func, name, tensor.device, on_device[0])
    if sure:
        devices = list(dict.fromkeys(str(tensor.device) for _, tensor in named))
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{' and '.join(devices[:2])}!"
        )


def _refuse(func: Any, name: str, odd: torch.device, common: torch.device) -> None:
    # Element-wise kernels are checked by TensorIterator, all others by the wrapper that PyTorch's build generates.
    if torch.Tag.pointwise in getattr(func, "tags", ()):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {common} and {odd}!"
        )
    operator = func._schema.name.split("::")[-1]
    wrapper = operator if operator in _STRUCTURED else f"_{operator}"
    if operator in _FORWARDED:
        name, wrapper = _FORWARDED[operator]
    raise RuntimeError(
        f"Expected all tensors to be on the same device, but got {name} is on {odd}, different from other tensors on {common} "
        f"(when checking argument in method wrapper_CUDA_{wrapper})"
    )


def _named_tensors(func: Any, args: Any, kwargs: Any) -> Any:
    names = [argument.name for argument in func._schema.arguments] if hasattr(func, "_schema") else []
    for position, arg in enumerate(args):
        name = names[position] if position < len(names) else f"argument {position + 1}"
        for tensor in arg if isinstance(arg, (list, tuple)) else (arg,):
            if isinstance(tensor, FakeTensor):
                yield ("tensors" if isinstance(arg, (list, tuple)) else name), tensor
    for name, arg in (kwargs or {}).items():
        if isinstance(arg, FakeTensor):
            yield name, arg
