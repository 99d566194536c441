"""The three tensors of a sparse matrix in compressed form (CSR, CSC, and in blocks)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from gpumem_magic.virtual.engine.calls import sparse_of
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.operators.data_dependent import _placed

BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)
IN_BLOCKS = (torch.sparse_bsr, torch.sparse_bsc)
FLIPPED = {
    torch.sparse_csr: torch.sparse_csc,
    torch.sparse_csc: torch.sparse_csr,
    torch.sparse_bsr: torch.sparse_bsc,
    torch.sparse_bsc: torch.sparse_bsr,
}


class CompressedParts(NamedTuple):
    """Where each row (or column) begins, where its elements stand in it, and these."""

    compressed: Any
    plain: Any
    values: Any

    @property
    def elements(self) -> int:
        return int(self.plain.shape[-1])


def parts(engine: Engine, tensor: Any) -> CompressedParts:
    found = engine._strided_parts(tensor)
    engine.settle(found, allocates=False)
    return CompressedParts(*found)


def is_compressed(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.layout not in (torch.strided, torch.sparse_coo)


def made(
    engine: Engine, shape: Any, dtype: torch.dtype, layout: torch.layout, count: int, device: int, block: Any = ()
) -> Any:
    """One with memory of its own: `count` elements (blocks) in matrices of this shape, all batches alike."""
    *batches, rows, columns = shape
    by = block or (1, 1)
    lines = rows // by[0] if layout in BY_ROWS else columns // by[1]
    sizes = ((*batches, lines + 1), torch.int64), ((*batches, count), torch.int64), ((*batches, count, *block), dtype)
    return sparse_of([_placed(engine, *size, device) for size in sizes], shape, layout)
