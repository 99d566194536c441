"""The fast path in inference of `nn.MultiheadAttention`, and of encoders and their layers, as CUDA puts it together.

As in ATen/native/transformers (``cuda/attention.cu``, ``attention.cpp``, ``transformer.cpp``; read in 1.13 to 2.5, and met by a
trace of 2.2): where a fused kernel may be used and nobody asks for the weights, `scaled_dot_product_attention`; otherwise all of
queries, keys and values in one buffer, whose queries the context is written over, and scores that softmax overwrites.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F

from gpumem_magic.patching import Patches
from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine import values
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.modes import ThreadFlag, pushed
from gpumem_magic.virtual.engine.rules import special
from gpumem_magic.virtual.engine.tensors import engine_of, is_ordinary
from gpumem_magic.virtual.operators import attention
from gpumem_magic.virtual.operators.nested_tensors import NestedOnDevice

# Where PyTorch's modules ask whether a tensor is one of somebody's own class.
_ASKING = ("torch.nn.modules.activation", "torch.nn.modules.transformer")
# Before, the fused kernels were for heads of eight, sixteen ... elements only. (2.11 asks for that, 2.13 does not; of 2.12 it is
# not known.)
_ANY_WIDTH_FROM = (2, 12)
# The longest row that the masked softmax holds in registers; longer ones are filled in a copy first (``SoftMax.cu``).
_LONGEST_ROW = 1024


# Python asks for what follows, and not TorchScript, whose next call would be C++'s own.
_ASKED_IN_PYTHON = ThreadFlag()


def install(patches: Patches, engine: Engine) -> None:
    """Until the patches are undone, virtual tensors are plain ones where these modules decide for their fast path."""
    asked = torch.overrides.has_torch_function

    def has_torch_function(relevant_args: Any) -> bool:
        if not asked(relevant_args):
            return False
        # (Between them and here is what relays the call.)
        caller = sys._getframe(1)
        asking = (frame.f_globals.get("__name__") for frame in (caller, caller.f_back) if frame is not None)
        if not any(name in _ASKING for name in asking):
            return True
        return asked(tuple(one for one in relevant_args if not (is_ordinary(one) or type(one) is NestedOnDevice)))

    is_left_aligned = torch._nested_tensor_from_mask_left_aligned

    def _nested_tensor_from_mask_left_aligned(t: Any, mask: Any) -> bool:
        with _ASKED_IN_PYTHON.raised():
            return is_left_aligned(t, mask)

    patches.set(torch.overrides, "has_torch_function", has_torch_function)
    patches.set(torch, "_nested_tensor_from_mask_left_aligned", _nested_tensor_from_mask_left_aligned)


@special(_aten._nested_tensor_from_mask_left_aligned.default)
def _left_aligned(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> bool:
    """Where each row of the mask ends, and how many it has (``NestedTensorTransformerFunctions.cpp``).

    Only where the values are known can what follows be packed: sizes are counted then.
    """
    mask = args[1]
    with pushed(engine.mode):
        padding = mask.new_zeros(mask.shape[0], 1)
        padded = torch.cat([mask, padding], 1)
        numbers = padded.to(torch.int32)
        ends = numbers.argmin(1)
        del numbers, padded
        counts = mask.cumsum(1).select(1, -1)
        same = counts == ends
        every = same.all()
        del every, same, ends, padding, counts
    known = values.exact(mask)
    if known is not None and _ASKED_IN_PYTHON.is_up:
        return not bool((known[:, 1:] & ~known[:, :-1]).any())
    if not (torch.is_grad_enabled() or torch.is_autocast_enabled("cuda")):
        engine.padded_encoders += 1
    return False


@special(_aten._native_multi_head_attention.default)
def _native_attention(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    rest = dict(zip(("mask", "need_weights", "average_attn_weights", "mask_type"), args[9:], strict=False))
    return _attend(*args[:9], **{**rest, **kwargs})


def _attend(
    query: Any,
    key: Any,
    value: Any,
    size: int,
    heads: int,
    qkv_weight: Any,
    qkv_bias: Any,
    proj_weight: Any,
    proj_bias: Any,
    mask: Any = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> Any:
    """The result, and the weights (of no elements where nobody asks for them)."""
    batch, length, _ = query.shape
    width = size // heads
    version = cast(Engine, engine_of(query)).memory.torch_version(query.get_device())
    fits = width % 8 == 0 or version >= _ANY_WIDTH_FROM
    if query is key and key is value and fits and not need_weights and mask is None:
        split = query.view(batch, length, heads, width).transpose(1, 2)
        gpu = attention.Chooser(torch.cuda.get_device_capability(query.device), version)
        kernel = attention.first_of(
            attention.fitting(attention.unmet(gpu, split, split, split, None, False, False)), gpu
        )
        if kernel in (attention.FLASH, attention.EFFICIENT, attention.CUDNN):
            parts = F.linear(query, qkv_weight, qkv_bias).view(batch, length, 3, heads, width)
            queries, keys, values = parts.permute(2, 0, 3, 1, 4).unbind()
            context = F.scaled_dot_product_attention(queries, keys, values)
            out = context.transpose(1, 2).reshape(batch, length, size)
            projected = F.linear(out, proj_weight, proj_bias)
            del out, context
            return projected, query.new_empty(0)
    projected = _projected(query, key, value, size, qkv_weight)
    parts = torch.empty(3, batch, heads, length, width, dtype=qkv_bias.dtype, device=query.device)
    del projected
    queries, keys, values = parts.view(3, batch * heads, length, width).unbind()
    scores: Any = torch.bmm(queries, keys.transpose(1, 2))
    if mask is not None:
        mask = mask.to(torch.bool)
        scores = _masked_softmax(scores.view(batch, heads, length, length), mask, mask_type).view_as(scores)
        mask = None
    torch.bmm(scores, values, out=queries)
    if not need_weights:
        scores = None
    context = queries.view(batch, heads, length, width).transpose(1, 2).contiguous().view(batch * length, size)
    out = F.linear(context, proj_weight, proj_bias).view(batch, length, size)
    del context
    if scores is None:
        return out, query.new_empty(0)
    scores = scores.view(batch, heads, length, length)
    if average_attn_weights:
        scores = scores.sum(1)
    return out, scores


def _projected(query: Any, key: Any, value: Any, size: int, weight: Any) -> Any:
    if query is key and key is value:
        return torch.matmul(query, weight.t())
    if key is value:
        parts = [torch.matmul(query, weight[:size].t()), torch.matmul(key, weight[size:].t())]
    else:
        parts = [torch.matmul(one, part.t()) for one, part in zip((query, key, value), weight.chunk(3), strict=True)]
    return torch.cat(parts, 2)


def _masked_softmax(scores: Any, mask: Any, mask_type: int | None) -> Any:
    if scores.shape[-1] <= _LONGEST_ROW:
        return torch.empty_like(scores)
    if mask.shape != scores.shape:
        mask = mask.view(mask.shape[0], 1, 1, -1) if mask_type == 1 else mask
    return torch.softmax(scores.masked_fill(mask, float("-inf")), -1)


@special(_aten._transformer_encoder_layer_fwd.default)
def _encoder_layer(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    _, size, heads, qkv_weight, qkv_bias, proj_weight, proj_bias = args[:7]
    rest = dict(zip(("mask", "mask_type"), args[18:], strict=False))
    mask, mask_type = (rest.get(name, kwargs.get(name)) for name in ("mask", "mask_type"))

    def attend(y: Any) -> Any:
        weights = qkv_weight, qkv_bias, proj_weight, proj_bias
        return _attend(y, y, y, size, heads, *weights, mask, False, True, mask_type)[0]

    return put_together(attend, *args[:18])


def put_together(
    attend: Callable[[Any], Any], source: Any, size: int, heads: int, qkv_weight: Any, qkv_bias: Any, proj_weight: Any,
    proj_bias: Any, use_gelu: bool, norm_first: bool, eps: float, norm1_weight: Any, norm1_bias: Any, norm2_weight: Any,
    norm2_bias: Any, ff1_weight: Any, ff1_bias: Any, ff2_weight: Any, ff2_bias: Any,
) -> Any:  # fmt: skip
    """An encoder layer: attention, the feed-forward net, and what is added in place to each; of nested tensors, too."""

    def norm1(y: Any) -> Any:
        return F.layer_norm(y, (size,), norm1_weight, norm1_bias, eps)

    def norm2(y: Any) -> Any:
        return F.layer_norm(y, (size,), norm2_weight, norm2_bias, eps)

    def feed_forward(y: Any) -> Any:
        hidden = F.linear(y, ff1_weight, ff1_bias)
        # (The activation is the product's own, or done in place.)
        hidden = _aten.gelu_.default(hidden) if use_gelu else hidden.relu_()
        out = F.linear(hidden, ff2_weight, ff2_bias)
        del hidden
        return out

    x = attend(norm1(source) if norm_first else source).add_(source)
    if norm_first:
        return feed_forward(norm2(x)).add_(x)
    x = norm1(x)
    return norm2(feed_forward(x).add_(x))
