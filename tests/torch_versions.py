"""What tests must know of the PyTorch that they run on, where its versions differ."""

from __future__ import annotations

import torch

from gpumem_magic.units import MIB

TORCH: tuple[int, int] = tuple(int(part) for part in torch.__version__.split(".")[:2])  # type: ignore[assignment]

WORKSPACES_ARE_KEPT = TORCH < (2, 15)
"""From 2.15 on, a workspace of cuBLAS is taken for each product and given back after it."""

BIAS_WORKSPACE = MIB if TORCH < (2, 12) else 0
"""What cuBLASLt keeps for products with a bias, beside cuBLAS's; shared since 2.12."""
