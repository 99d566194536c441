"""What older releases kept for the backward pass, where it differs from today's.

Softmax: until PyTorch 1.10 its derivative took the input for its type, and so kept it (1.11 takes the type alone; transformers'
`softmax_backward_data` tells the two apart). BERT until transformers 4 always added its mask to the scores, in float32.
"""

from __future__ import annotations

import math
from typing import Any

import torch

NAME = "as in torch 1.10"


class _SoftmaxThatKeepsItsInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        weights = torch.softmax(scores, dim=-1)
        ctx.save_for_backward(scores, weights)
        return weights

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        scores, weights = ctx.saved_tensors
        return torch.ops.aten._softmax_backward_data(gradient, weights, -1, scores.dtype)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.matmul(query, key.transpose(-1, -2))
    scores = scores / math.sqrt(query.shape[-1])
    mask = torch.zeros(len(query), 1, 1, key.shape[-2], device=query.device)
    scores = scores + mask
    if torch.is_autocast_enabled("cuda"):
        scores = scores.float()
    weights = _SoftmaxThatKeepsItsInput.apply(scores)
    weights = torch.nn.functional.dropout(weights, dropout, module.training)
    out = torch.matmul(weights, value).permute(0, 2, 1, 3).contiguous()
    return out, weights


def old_attention() -> str:
    """The name to give as `attn_implementation`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)
    return NAME
