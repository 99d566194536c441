"""Half precision, whose values CUDA's kernels add up in float32."""

from __future__ import annotations

import torch

HALF = (torch.float16, torch.bfloat16)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type of the sums that a kernel makes of values of this type."""
    return torch.float32 if dtype in HALF else dtype
