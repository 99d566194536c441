"""Views that would reach behind their storage (`checkInBoundsForStorage` in ``Resize.h``). Meta tensors may."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def refuse_out_of_bounds(
    tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> None:
    """Raises PyTorch's error for an `as_strided` of these arguments, if some of its elements would lie behind the storage."""
    if 0 in size:
        return
    first = int(tensor.storage_offset()) if storage_offset is None else storage_offset
    reach = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=False))
    needed, there = (first + reach) * tensor.itemsize, tensor.untyped_storage().nbytes()
    if needed > there:
        raise RuntimeError(
            f"setStorage: sizes {list(size)}, strides {list(stride)}, storage offset {first}, and itemsize {tensor.itemsize} "
            f"requiring a storage size of {needed} are out of bounds for storage of size {there}"
        )
