"""A single attention head without mask or projections, swept over context length and head size, in exact bytes.

The program: batch 8, float32, queries, keys and values are leaves. A warm-up leaves gradients and both cuBLAS workspaces
(the caller's and the autograd thread's); then the peak is taken in the forward pass and in the backward pass.
"""

from __future__ import annotations

import re

import torch

from accuracy.plans import Plan, Readings, Skip, readings
from accuracy.table import Row

WARM_UPS = 2
# The rows are of a PyTorch before 2.15, which kept its workspaces.
DEVICE = "virtual:46GiB,torch=2.6"


def plan(row: Row) -> Plan | Skip:
    shape = re.fullmatch(r"ctx (\d+), d (\d+)", row.seq_or_image)
    moment = next((word for word in ("before forward", "forward", "backward") if row.extras.endswith(word) or
                   row.extras.endswith(f"{word}()")), None)  # fmt: skip
    if shape is None or moment is None or row.dtype != "fp32":
        return Skip("not a plain float32 point of the sweep")
    batch, context, size = int(row.batch), int(shape[1]), int(shape[2])

    def run() -> Readings:
        return _run(batch, context, size)

    return Plan(("attention", batch, context, size), DEVICE, run, f"{moment}: max_memory_allocated")


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Softmax by hand: shifted by the largest score, exponentials, divided by their sum."""
    scores = torch.einsum("bqd,bkd->bqk", query, key) / query.shape[-1] ** 0.5
    powers = torch.exp(scores - scores.max(dim=-1, keepdim=True).values)
    weights = powers / powers.sum(dim=-1, keepdim=True)
    return torch.einsum("bqk,bkd->bqd", weights, value)


def _run(batch: int, context: int, size: int) -> Readings:
    leaves = [torch.randn(batch, context, size, device="cuda", requires_grad=True) for _ in range(3)]
    for _ in range(WARM_UPS):
        attention(*leaves).mean().backward()
    torch.cuda.reset_peak_memory_stats()
    found = readings("before forward: ")
    out = attention(*leaves)
    found |= readings("forward: ")
    torch.cuda.reset_peak_memory_stats()
    out.mean().backward()
    return found | readings("backward: ")
