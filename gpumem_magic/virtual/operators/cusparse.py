"""How much cuSPARSE asks for to work in, in bytes, where a sparse matrix is multiplied with a dense one.

As an H100 was asked for it (PyTorch 2.11, CUDA 13.0): these are the very sizes of 963 recorded products, from 10 to 100,000
elements. On other cards, and with other versions, nothing is counted.
"""

from __future__ import annotations

import torch

from gpumem_magic.virtual.engine.half_precision import HALF
from gpumem_magic.virtual.operators.cusolver import is_known

__all__ = ["by_coordinates", "by_rows", "is_known"]


def by_rows(rows: int, elements: int, columns: int, dtype: torch.dtype) -> int:
    """A matrix in compressed rows, with a dense one of so many columns."""
    if columns > 1:
        return 8 * (-(-elements // 24) + 1) - 1
    if dtype in HALF:
        return 4 * rows + 8 * -(-elements // 896) + 142
    return 8 * (-(-elements // 3072) + 2) - 1


def by_coordinates(elements: int, columns: int, dtype: torch.dtype) -> int:
    at_once = 256 if columns > 1 else 4096 if dtype == torch.float32 else 3584
    return 4 * (-(-elements // at_once) + 2) - 1
