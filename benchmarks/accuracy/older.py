"""Attention as transformers had it until version 4: BERT always added its mask to the scores, in float32."""

from __future__ import annotations

import math
from typing import Any

import torch

NAME = "as in transformers 4"


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    scores = torch.matmul(query, key.transpose(-1, -2))
    scores = scores / math.sqrt(query.shape[-1])
    scores = scores + torch.zeros(len(query), 1, 1, key.shape[-2], device=query.device)
    weights = torch.softmax(scores, dim=-1)
    weights = torch.nn.functional.dropout(weights, dropout, module.training)
    # Nobody holds the weights any longer: then they were returned only where they were asked for.
    return torch.matmul(weights, value).permute(0, 2, 1, 3).contiguous(), None


def old_attention() -> str:
    """The name to give as `attn_implementation`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)
    return NAME
