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

    @property
    def batches(self) -> int:
        """How many of the tensor's dimensions are of batches; its last ones may be dense, behind rows and columns."""
        return int(self.compressed.dim()) - 1

    def block(self, layout: torch.layout) -> tuple[int, ...]:
        return tuple(self.values.shape[self.batches + 1 : self.batches + 3]) if layout in IN_BLOCKS else ()


def parts(engine: Engine, tensor: Any) -> CompressedParts:
    found = engine._strided_parts(tensor)
    engine.settle(found, allocates=False)
    return CompressedParts(*found)


def is_compressed(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.layout not in (torch.strided, torch.sparse_coo)


def made(
    engine: Engine,
    shape: Any,
    dtype: torch.dtype,
    layout: torch.layout,
    count: int,
    device: int,
    block: Any = (),
    batches: int | None = None,
) -> Any:
    """One with memory of its own: `count` elements (blocks) in matrices of this shape, all batches alike.

    batches: how many dimensions are theirs; all but the last two where it is not said.
    """
    place = len(shape) - 2 if batches is None else batches
    before, (rows, columns), dense = shape[:place], shape[place : place + 2], shape[place + 2 :]
    by = block or (1, 1)
    lines = rows // by[0] if layout in BY_ROWS else columns // by[1]
    sizes = (
        ((*before, lines + 1), torch.int64), ((*before, count), torch.int64), ((*before, count, *block, *dense), dtype)
    )  # fmt: skip
    return sparse_of([_placed(engine, *size, device) for size in sizes], shape, layout)
