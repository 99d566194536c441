"""Nested tensors in the jagged layout (`torch.jagged`): classes of PyTorch's own, in Python, which wrap their values and offsets.

Their operators are PyTorch's own, in terms of operators on values and offsets, and so is what they ask of the allocator. What is
here stands for what they ask of C++: which kernel takes their attention, and a number for a length that differs from row to row.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from gpumem_magic.patching import Patches
from gpumem_magic.virtual.engine.tensors import VirtualTensor
from gpumem_magic.virtual.operators.attention import CUDNN, EFFICIENT, FLASH, Chooser, fitting, unmet

_CAN_USE = {
    FLASH: "can_use_flash_attention",
    EFFICIENT: "can_use_efficient_attention",
    CUDNN: "can_use_cudnn_attention",
}


def install(patches: Patches, gpu_of: Callable[[int], Chooser]) -> None:
    patches.set(VirtualTensor, "get_nested_int", _get_nested_int)
    attention = importlib.import_module("torch.nested._internal.sdpa")
    for kernel, name in _CAN_USE.items():
        patches.set(attention, name, _can_use(getattr(attention, name), kernel, gpu_of))


def moved(tensor: Any, index: int, args: Any, kwargs: Any) -> Any:
    """``tensor.to(device, ...)`` of one on the host: its values and offsets there, in rows as long as before.

    (PyTorch's own would hand on what only traces have: `torch.nested._internal.ops.to_copy_default`.)
    """
    device = torch.device("cuda", index)
    further = {name: value for name, value in kwargs.items() if name != "device"}
    offsets, lengths = (None if one is None else one.to(device) for one in (tensor.offsets(), tensor.lengths()))
    known = _numbers()
    before, after = (tensor.offsets(), offsets) if lengths is None else (tensor.lengths(), lengths)
    if before in known:
        known[after] = known[before]
    values = tensor.values().to(device, *args[1:], **further)
    return torch.nested.nested_tensor_from_jagged(
        values, offsets, lengths=lengths, jagged_dim=tensor._ragged_idx,
        min_seqlen=tensor._maybe_min_seqlen, max_seqlen=tensor._maybe_max_seqlen,
    )  # fmt: skip


def _numbers() -> Any:
    """By the tensor of offsets or lengths, the number that stands for its rows' length."""
    return importlib.import_module("torch.nested._internal.nested_tensor")._tensor_symint_registry


def _get_nested_int(self: VirtualTensor, *, coeff: int = 1) -> torch.SymInt:
    """As for a device's tensor (`torch.nested._internal.nested_tensor.get_tensor_symint`); a fake tensor's is of a trace."""
    module: Any = importlib.import_module("torch.nested._internal.nested_tensor")
    known = _numbers()
    found: torch.SymInt | None = known.get(self)
    if found is None:
        found = known[self] = torch.SymInt(module.NestedIntNode(module._tensor_id_counter, coeff))
        module._tensor_id_counter += 1
    return found


def _can_use(original: Callable[..., bool], kernel: str, gpu_of: Callable[[int], Chooser]) -> Callable[..., bool]:
    @functools.wraps(original)
    def can_use(params: Any, debug: bool = False) -> bool:
        if params.query.device.type != "cuda":
            return original(params, debug)
        given = (params.query, params.key, params.value, params.attn_mask, params.is_causal, params.enable_gqa)
        return kernel in fitting(unmet(gpu_of(params.query.device.index), *given))

    return can_use
