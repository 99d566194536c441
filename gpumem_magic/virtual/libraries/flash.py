"""flash-attn on a virtual device: its functions return and save what the library's kernels do.

Source: `csrc/flash_attn/flash_api.cpp` of flash-attn 2.5 to 2.8 (`mha_fwd`, `mha_bwd` and their variable-length forms). Not
counted: the partial results of queries shorter than the keys that the kernel splits (decoding with a long cache).
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from gpumem_magic.patching import Patches
from gpumem_magic.units import round_up
from gpumem_magic.virtual.engine.half_precision import HALF
from gpumem_magic.virtual.libraries.loading import replace_function

# The backward kernel works in rows of 128.
_ROWS = 128


class Lengths(NamedTuple):
    """How the sequences lie: `sequences` of them packed in one row of tokens, or None for a batch of equal ones."""

    sequences: int | None = None
    deterministic: bool = False


class Flash(torch.autograd.Function):
    """The kernel. Inputs are (q, k, v), (q, kv) or (qkv,); each gradient is one tensor like its input."""

    @staticmethod
    def forward(ctx: Any, lengths: Lengths, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query, _, value = _parts(inputs)
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        heads = query.shape[-2]
        if lengths.sequences is None:
            sums = query.new_empty((query.shape[0], heads, query.shape[1]), dtype=torch.float32)
        else:
            sums = query.new_empty((heads, query.shape[0]), dtype=torch.float32)
        seeds = query.new_empty(2, dtype=torch.int64)
        ctx.lengths = lengths
        ctx.save_for_backward(*inputs, out, sums, seeds)
        ctx.mark_non_differentiable(sums)
        ctx.set_materialize_grads(False)
        return out, sums

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        *inputs, _, _, _ = ctx.saved_tensors
        grad_out = gradients[0].contiguous()
        results = tuple(torch.empty_like(tensor) for tensor in inputs)
        query, key, _ = _parts(inputs)
        heads, size = query.shape[-2:]
        size = round_up(size, 32 if size <= 128 else 64)
        if ctx.lengths.sequences is None:
            rows: tuple[int, ...] = (query.shape[0], round_up(query.shape[1], _ROWS))
        else:
            rows = (query.shape[0] + _ROWS * ctx.lengths.sequences,)
        row_sums = query.new_empty((*rows, heads), dtype=torch.float32)
        copies = _copies(query, ctx.lengths, heads)
        sums = query.new_empty((*copies, *rows, heads, size), dtype=torch.float32)
        if key.shape[-2] != heads:
            # Every query head has gradients of its own for the keys and values, which are added up after.
            expanded = [key.new_empty((*key.shape[:-2], heads, key.shape[-1])) for _ in range(2)]
            del expanded
        del row_sums, sums, grad_out
        return (None, *results)


def _copies(query: torch.Tensor, lengths: Lengths, heads: int) -> tuple[int, ...]:
    """The deterministic kernel adds up one copy for each group of blocks that run at a time."""
    if not lengths.deterministic:
        return ()
    batch = query.shape[0] if lengths.sequences is None else lengths.sequences
    processors = torch.cuda.get_device_properties(query.device).multi_processor_count
    return (-(-processors // max(batch * heads, 1)),)


def _parts(inputs: Any) -> Any:
    if len(inputs) == 1:
        return inputs[0].unbind(-3)
    return inputs if len(inputs) == 3 else (inputs[0], *inputs[1].unbind(-3))


def attend(lengths: Lengths, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and the log-sum-exp. Raises what the library raises for devices and types that it does not know."""
    first = inputs[0]
    if torch.cuda.get_device_capability(first.device) < (8, 0):
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")
    if first.dtype not in HALF or any(tensor.dtype != first.dtype for tensor in inputs):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    size = first.shape[-1]
    if size > 256:
        raise RuntimeError("FlashAttention forward only supports head dimension at most 256")
    extra = -size % 8
    dense = [F.pad(tensor, (0, extra)) if extra else _dense(tensor) for tensor in inputs]
    out, sums = Flash.apply(lengths, *dense)  # type: ignore[no-untyped-call]
    return (out[..., :size] if extra else out), sums


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


# The library's functions, each with its tensors, and the ends of packed sequences.
_FUNCTIONS = {
    "flash_attn_func": "q k v",
    "flash_attn_kvpacked_func": "q kv",
    "flash_attn_qkvpacked_func": "qkv",
    "flash_attn_varlen_func": "q k v cu_seqlens_q",
    "flash_attn_varlen_kvpacked_func": "q kv cu_seqlens_q",
    "flash_attn_varlen_qkvpacked_func": "qkv cu_seqlens",
}


def _rule(names: list[str]) -> Callable[..., Any]:
    def rule(*args: Any, deterministic: bool = False, return_attn_probs: bool = False, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        *tensors, last = (given[name] for name in names)
        if not names[-1].startswith("cu_"):
            found = attend(Lengths(None, deterministic), *tensors, last)
        else:
            found = attend(Lengths(len(last) - 1, deterministic), *tensors)
        return (*found, None) if return_attn_probs else found[0]

    return rule


def flash_attn_with_kvcache(
    q: Any, k_cache: Any, v_cache: Any, *args: Any, return_softmax_lse: bool = False, **kwargs: Any
) -> Any:
    """Writes new keys and values into the cache, and never has a gradient."""
    with torch.no_grad():
        out, sums = attend(Lengths(), q, k_cache, v_cache)
    return (out, sums) if return_softmax_lse else out


def prepare(module: ModuleType, patches: Patches) -> None:
    """For `flash_attn.flash_attn_interface`."""
    for name, arguments in _FUNCTIONS.items():
        replace_function(patches, module, name, _rule(arguments.split()))
    replace_function(patches, module, "flash_attn_with_kvcache", flash_attn_with_kvcache)
