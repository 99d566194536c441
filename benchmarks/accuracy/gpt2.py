"""A GPT-2 of 124 million parameters in plain torch, in the variants that a published ladder of speed-ups goes through.

Learned positions, pre-norm blocks, dropout, no bias in the three projections, an output head of its own. By hand or by PyTorch:
normalisation and activation, the attention, and where the causal mask is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Variant:
    """What a rung of the ladder uses. mask_buffer: every block keeps its mask as float32; else it is made on the fly."""

    mask_buffer: bool = True
    native_layers: bool = False
    fused_attention: bool = False
    vocabulary: int = 50257
    context: int = 1024
    width: int = 768
    heads: int = 12
    layers: int = 12
    dropout: float = 0.1


class HandNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.var(dim=-1, keepdim=True, unbiased=False)
        normal = (x - mean) / torch.sqrt(variance + 1e-5)
        return self.scale * normal + self.shift


class HandGelu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))))


class Attention(nn.Module):
    mask: torch.Tensor

    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.variant = variant
        width = variant.width
        if variant.fused_attention:
            self.all = nn.Linear(width, 3 * width, bias=False)
        else:
            self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(variant.dropout)
        if variant.mask_buffer and not variant.fused_attention:
            mask = torch.triu(torch.ones(variant.context, variant.context), diagonal=1)
            self.register_buffer("mask", mask, persistent=False)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        return x.view(batch, tokens, self.variant.heads, width // self.variant.heads).transpose(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        if self.variant.fused_attention:
            shape = (batch, tokens, 3, self.variant.heads, width // self.variant.heads)
            query, key, value = self.all(x).view(shape).permute(2, 0, 3, 1, 4)
            drop = self.variant.dropout if self.training else 0.0
            out = F.scaled_dot_product_attention(query, key, value, None, drop, is_causal=True)
        else:
            query, key, value = self._heads(self.query(x)), self._heads(self.key(x)), self._heads(self.value(x))
            scores = query @ key.transpose(2, 3)
            if self.variant.mask_buffer:
                hidden = self.mask.bool()[:tokens, :tokens]
            else:
                hidden = torch.triu(torch.ones(tokens, tokens, dtype=torch.bool, device=x.device), diagonal=1)
            scores.masked_fill_(hidden, -torch.inf)
            weights = self.dropout(torch.softmax(scores / key.shape[-1] ** 0.5, dim=-1))
            out = weights @ value
        result: torch.Tensor = self.out(out.transpose(1, 2).contiguous().view(batch, tokens, width))
        return result


class Block(nn.Module):
    def __init__(self, variant: Variant) -> None:
        super().__init__()
        width = variant.width
        norm = nn.LayerNorm if variant.native_layers else HandNorm
        gelu = nn.GELU(approximate="tanh") if variant.native_layers else HandGelu()
        self.attention = Attention(variant)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), gelu, nn.Linear(4 * width, width))
        self.before, self.between = norm(width), norm(width)
        self.dropout = nn.Dropout(variant.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x
        x = self.before(x)
        x = self.attention(x)
        x = self.dropout(x)
        x = x + shortcut
        shortcut = x
        x = self.between(x)
        x = self.perceptron(x)
        x = self.dropout(x)
        return x + shortcut


class GPT2(nn.Module):
    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.variant = variant
        self.tokens = nn.Embedding(variant.vocabulary, variant.width)
        self.positions = nn.Embedding(variant.context, variant.width)
        self.dropout = nn.Dropout(variant.dropout)
        self.blocks = nn.Sequential(*(Block(variant) for _ in range(variant.layers)))
        self.norm = (nn.LayerNorm if variant.native_layers else HandNorm)(variant.width)
        self.head = nn.Linear(variant.width, variant.vocabulary, bias=False)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        places = self.positions(torch.arange(indices.shape[1], device=indices.device))
        x = self.tokens(indices) + places
        x = self.dropout(x)
        x = self.blocks(x)
        x = self.norm(x)
        logits: torch.Tensor = self.head(x)
        return logits


@torch.no_grad()
def generate(model: Callable[[torch.Tensor], torch.Tensor], indices: torch.Tensor, count: int) -> torch.Tensor:
    for _ in range(count):
        logits = model(indices)[:, -1, :]
        indices = torch.cat((indices, torch.argmax(logits, dim=-1, keepdim=True)), dim=1)
    return indices
