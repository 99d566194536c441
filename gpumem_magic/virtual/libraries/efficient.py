"""xformers' memory-efficient attention on a virtual device.

Source: `xformers/ops/fmha/dispatch.py` (0.0.20 to 0.0.35): flash-attn's kernel where it can be had (Ampere and newer, half
precision, no bias that is a tensor), else CUTLASS's, which is the kernel that PyTorch calls `_efficient_attention_forward`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from gpumem_magic.patching import Patches
from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine.half_precision import HALF
from gpumem_magic.virtual.libraries.flash import Lengths, attend
from gpumem_magic.virtual.libraries.loading import replace_function


def _attention(query: Any, key: Any, value: Any, bias: Any, p: float, scale: float | None, wanted: bool) -> Any:
    """(result, log-sum-exp) for tensors of the shape [batch, tokens, heads, size], [.., groups, heads, size] or without heads."""
    shape = (*query.shape[:-1], value.shape[-1])
    query, key, value = (_four(tensor) for tensor in (query, key, value))
    plain = not isinstance(bias, torch.Tensor)
    sizes = query.shape[-1] == value.shape[-1] <= 256
    if torch.cuda.get_device_capability(query.device) >= (8, 0) and query.dtype in HALF and plain and sizes:
        packed = getattr(getattr(bias, "q_seqinfo", None), "seqstart_py", None)
        if packed is None:
            out, sums = attend(Lengths(), query, key, value)
        else:
            out, sums = attend(Lengths(len(packed) - 1), *(tensor.flatten(0, 1) for tensor in (query, key, value)))
        return out.reshape(shape), sums
    heads = query.shape[2]
    if key.shape[2] != heads:
        key, value = (tensor.repeat_interleave(heads // tensor.shape[2], 2) for tensor in (key, value))
    if isinstance(bias, torch.Tensor):
        if bias.dim() == 3:
            bias = bias.unsqueeze(1)
        bias = bias.expand(query.shape[0], heads, query.shape[1], key.shape[1])
    else:
        # What a mask object leaves out is not written anywhere, whatever it is.
        bias = None
    found = _aten._efficient_attention_forward(
        query, key, value, bias, None, None, None, None, p, 0, wanted, scale=scale
    )
    return found[0].reshape(shape), found[1]


def _four(tensor: Any) -> Any:
    if tensor.dim() == 3:
        return tensor.unsqueeze(2)
    if tensor.dim() == 5:
        # Keys that all heads of a group share are expanded, not copied.
        return tensor[:, :, :, 0] if tensor.stride(3) == 0 else tensor.flatten(2, 3)
    return tensor


def _rule(with_gradients: bool, with_sums: bool) -> Callable[..., Any]:
    def rule(
        query: Any, key: Any, value: Any, attn_bias: Any = None, p: float = 0.0, scale: Any = None,
        *, op: Any = None, output_dtype: Any = None,
    ) -> Any:  # fmt: skip
        with torch.set_grad_enabled(with_gradients and torch.is_grad_enabled()):
            learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
            out, sums = _attention(query, key, value, attn_bias, p, scale, with_sums or learns)
            out = out if output_dtype is None else out.to(output_dtype)
        return (out, sums) if with_sums else out

    return rule


def prepare(module: ModuleType, patches: Patches) -> None:
    """For `xformers.ops.fmha`."""
    replace_function(patches, module, "memory_efficient_attention", _rule(True, False))
    replace_function(patches, module, "memory_efficient_attention_forward", _rule(False, False))
    replace_function(patches, module, "memory_efficient_attention_forward_requires_grad", _rule(False, True))
