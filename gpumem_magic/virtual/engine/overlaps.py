"""Memory that an operator reads and writes at once (`compute_mem_overlaps` in ``TensorIterator.cpp``, ``MemoryOverlap.cpp``).

``x[1:] += x[:-1]`` and ``x += x.t()`` are refused on a card, where threads would read what others have written.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine.tensors import VirtualTensor

# Beside what works element by element. (Filling may meet itself.)
_MORE = frozenset(
    overloads("copy_ index_put_ _index_put_impl_ masked_scatter_ scatter_.src scatter_add_ index_add_ index_copy_")
)
_FREE = frozenset(overloads("fill_.Scalar fill_.Tensor zero_ masked_fill_.Scalar masked_fill_.Tensor"))
_REFUSAL = (
    "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single memory location. "
    "Please clone() the tensor before performing the operation."
)


def may_not_meet(func: Any) -> bool:
    """Whether what it writes first must be apart from what it reads, or the very same."""
    return func not in _FREE and (torch.Tag.pointwise in func.tags or func in _MORE)


def refuse_overlaps(written: VirtualTensor, read: Iterable[Any]) -> None:
    """Raises PyTorch's error where a tensor that is read has some of the memory that is written, and is not the same."""
    for one in read:
        is_other = type(one) is VirtualTensor and one is not written
        if is_other and torch._C._is_alias_of(written, one) and _meet(written, one):  # type: ignore[attr-defined]
            raise RuntimeError(_REFUSAL)


def _meet(written: VirtualTensor, read: VirtualTensor) -> bool:
    """`get_overlap_status`, where it is "partial"."""
    if not (written.numel() and read.numel() and _is_dense(written) and _is_dense(read)):
        return False
    begins = written.storage_offset() * written.itemsize, read.storage_offset() * read.itemsize
    ends = begins[0] + written.numel() * written.itemsize, begins[1] + read.numel() * read.itemsize
    if begins[0] == begins[1] and ends[0] == ends[1]:
        return written.stride() != read.stride()
    return begins[0] < ends[1] and begins[1] < ends[0]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Without gaps, in whichever order."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1 and stride != expected:
            return False
        expected *= length
    return True
