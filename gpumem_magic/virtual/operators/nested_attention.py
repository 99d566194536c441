"""Attention with nested tensors, by the kernel that the device's PyTorch chooses for them, and its encoder layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine.half_precision import HALF
from gpumem_magic.virtual.operators import nested_tensors
from gpumem_magic.virtual.operators.attention import CUDNN, EFFICIENT, FLASH, MATH, Chooser, first_of, fitting, unmet
from gpumem_magic.virtual.operators.encoder_layers import put_together
from gpumem_magic.virtual.operators.nested_kernels import unpadded
from gpumem_magic.virtual.operators.nested_operators import linear, to_kind, to_padded
from gpumem_magic.virtual.operators.nested_tensors import DEVICES, NestedOnDevice, contiguous, is_nested, rule_for


@rule_for("_transformer_encoder_layer_fwd")
def _encoder_layer(*args: Any) -> Any:
    """(`transformer_encoder_layer_forward`, ``transformer.cpp``, and `native_multi_head_attention_cuda`, ``attention.cu``; met by
    two recordings of an H100 with 2.11, event by event.)"""
    source, size, heads, qkv_weight, qkv_bias, proj_weight, proj_bias = args[:7]
    if any(one is not None for one in args[18:19]) or not _is_attended_at_once(source, heads):
        return _encoder_layer_of_padded(*args[:18])

    def attend(y: NestedOnDevice) -> Any:
        parts = linear(y, qkv_weight, qkv_bias).chunk(3, -1)
        by_head = [one.view(len(y.sizes), -1, heads, size // heads).transpose(1, 2) for one in parts]
        context: Any = _attention(*by_head).transpose(1, 2)
        projected = linear(context.reshape(len(y.sizes), -1, size), proj_weight, proj_bias)
        del context
        return projected

    return put_together(attend, *args[:18])


def _is_attended_at_once(sequences: NestedOnDevice, heads: int) -> bool:
    """Whether a fused kernel takes them (`check_for_seq_len_1_nested_tensor`: none of one token or less)."""
    if any(length < 2 for length, _ in sequences.sizes):
        return False
    gpu: Chooser = DEVICES.gpu_of(sequences.device.index)
    by_head: Any = sequences.view(len(sequences.sizes), -1, heads, sequences.sizes[0][1] // heads).transpose(1, 2)
    fits = _fitting([by_head] * 3, None, False, 0.0, False)
    return bool(fits - {MATH}) and first_of(fits, gpu) != MATH


def _encoder_layer_of_padded(source: NestedOnDevice, size: int, heads: int, *weights: Any) -> NestedOnDevice:
    """Where attention goes by products: on padded sequences, as an estimate (CUDA pads scores and context alone)."""
    padded = to_padded(source, 0.0)
    mask = torch.tensor([[at >= len_ for at in range(padded.shape[1])] for len_, _ in source.sizes])
    found = _aten._transformer_encoder_layer_fwd.default(padded, size, heads, *weights, mask.to(source.device), 1)
    del padded
    return NestedOnDevice(unpadded(found, source.sizes), source.sizes)


@rule_for("scaled_dot_product_attention")
def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> NestedOnDevice:  # fmt: skip
    """As the device's PyTorch chooses its kernel for nested tensors (``sdp_utils.cpp``), and what that takes."""
    nested: tuple[NestedOnDevice, ...] = (query, key, value)
    if not all(map(is_nested, nested)) or enable_gqa or len({(one.common(0), one.common(1)) for one in nested}) > 1:
        nested_tensors.refuse("scaled_dot_product_attention with tensors of several batches or heads")
    follows = torch.is_grad_enabled() and any(one.buffer.requires_grad for one in nested)
    fits = _fitting(nested, attn_mask, is_causal, dropout_p, follows)
    kernel = first_of(fits, DEVICES.gpu_of(query.device.index))
    if kernel == MATH:
        return _attention_by_products(query, key, value, attn_mask, dropout_p, is_causal, scale)
    queries, keys, values = (_transposed(one, 1, 2) for one in nested)
    ends, ends_of_keys = _ends(queries), _ends(keys)
    longest, longest_key = (max(size[0] for size in one.sizes) for one in (queries, keys))
    flat = [_as_dense(one) for one in (queries, keys, values)]
    if kernel == FLASH:
        found, log_sum, *seeds = _aten._flash_attention_forward(
            *flat, ends, ends_of_keys, longest, longest_key, dropout_p, is_causal, False, scale=scale
        )
        # (One tuple of C++'s, whose parts go in this order.)
        del log_sum, ends, ends_of_keys
        while seeds:
            del seeds[0]
    else:
        found = _aten._efficient_attention_forward(
            *(one.unsqueeze(0) for one in flat), None, ends, ends_of_keys, longest, longest_key, dropout_p, int(is_causal),
            follows, scale=scale,
        )[0].squeeze(0)  # fmt: skip
    return _transposed(queries.plainly(found.reshape(-1), flat[2].shape[-1]), 1, 2)


def _transposed(nested: NestedOnDevice, one: int, other: int) -> NestedOnDevice:
    found: Any = nested.transpose(one, other)
    return found  # type: ignore[no-any-return]


def _fitting(nested: Sequence[NestedOnDevice], mask: Any, is_causal: bool, dropout: float, follows: bool) -> set[str]:
    """The kernels that nested tensors may have: cuDNN's has none for them, the memory-efficient one no gradients."""
    heads = nested[0].common(1)
    widths = [one.common(3) for one in nested]
    if nested[0].rank != 4 or heads is None or None in widths or any(0 in size for one in nested for size in one.sizes):
        return {MATH} if torch.backends.cuda.math_sdp_enabled() else set()
    query, key, value = (
        torch.empty(len(one.sizes), heads, 1, width or 0, dtype=one.dtype, device="meta")
        for one, width in zip(nested, widths, strict=True)
    )
    gpu: Chooser = DEVICES.gpu_of(nested[0].device.index)
    fits = fitting(unmet(gpu, query, key, value, mask, is_causal, False, dropout)) - {CUDNN}
    if widths[0] is not None and widths[0] % 8:
        fits.discard(FLASH)
    return fits - {EFFICIENT} if follows or mask is not None else fits


def _ends(sequences: NestedOnDevice) -> torch.Tensor:
    """Where each sequence ends among all (`cumulative_and_max_seq_len_nnz`)."""
    ends = list(accumulate((size[0] for size in sequences.sizes), initial=0))
    return torch.tensor(ends, dtype=torch.int32).to(sequences.device)


def _as_dense(sequences: NestedOnDevice) -> torch.Tensor:
    """All sequences behind each other, [all, heads, width]: the buffer itself where they lie so (`view_as_dense`)."""
    if not sequences.lies_plainly and not _lies_in_order(sequences):
        sequences = contiguous(sequences)
    size = (sum(each[0] for each in sequences.sizes), *sequences.sizes[0][1:])
    return sequences.buffer.as_strided(size, sequences.strides[0], sequences.offsets[0])


def _lies_in_order(nested: NestedOnDevice) -> bool:
    """(`is_safe_to_get_storage_as_tensor`)"""
    if len(nested.sizes) < 2:
        return True
    first, heads = nested.strides[0], nested.common(2)
    if heads == 1:
        if first[0] <= first[2]:
            return False
    elif not first[0] > first[1] > first[2] or set(nested.strides) != {first}:
        return False
    gaps = [after - before for before, after in zip(nested.offsets, nested.offsets[1:], strict=False)]
    steps = [
        gap // (size[0] * strides[0]) for gap, size, strides in zip(gaps, nested.sizes, nested.strides, strict=False)
    ]
    return len(set(steps)) == 1


def _attention_by_products(
    query: NestedOnDevice,
    key: NestedOnDevice,
    value: NestedOnDevice,
    mask: Any,
    dropout: float,
    is_causal: bool,
    scale: Any,
) -> NestedOnDevice:
    """(`_scaled_dot_product_attention_math`, ``attention.cpp``)"""
    if not all(one.lies_plainly for one in (query, key, value)):
        raise RuntimeError("scaled_dot_product_attention: If inputs are nested tensors they must be contiguous")
    if is_causal or mask is not None:
        query.size(-2)  # raises where the lengths differ
        nested_tensors.refuse("scaled_dot_product_attention with a mask, by products")
    kind = query.dtype
    if kind in HALF and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        query, key, value = (to_kind(one, torch.float) for one in (query, key, value))
    factor = (query.size(-1) ** -0.5 if scale is None else scale) ** 0.5
    weights = torch.matmul(query * factor, key.transpose(-2, -1) * factor)
    shares = torch.softmax(weights, -1)
    if dropout:
        shares = F.dropout(shares, dropout)
    attended: Any = torch.matmul(shares, value).to(kind)
    return attended  # type: ignore[no-any-return]
