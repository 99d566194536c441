"""Indexing that a device does in another way.

A number that is assigned (``x[mask] = 0``) stays on the host until a kernel takes it (`valueToTensor` in
torch/csrc/autograd/python_variable_indexing.cpp); where C++ sees another device than CUDA it makes a tensor of it there.

``x[:, -1]`` as PyTorch before 2.9 ran it: a slice that takes all of a dimension is an operator of its own. Its gradient is a
tensor of the full size, which later versions do not make (``applySlice`` in ATen/TensorIndexing.h compared the end, the largest
integer, with the dimension's length). One that names the length as its end, beside other indices, was left out then, too.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from gpumem_magic.looks.objects import is_exactly
from gpumem_magic.virtual.engine.tensors import VirtualTensor

# The first PyTorch that leaves such slices out.
LEFT_OUT_FROM = (2, 9)


def assigned_from_host(tensor: Any, index: Any, value: Any) -> Any:
    """Assigns a number; None where the value is none, or the tensor is not on the device."""
    if not isinstance(value, (int, float, complex)) or not isinstance(tensor, VirtualTensor):
        return None
    tensor[index] = torch.scalar_tensor(value, dtype=tensor.dtype, device="cpu")
    return False


def with_full_slices(tensor: Any, index: Any) -> Any:
    """``tensor[index]`` for a tensor whose gradient is wanted; None where no such slice is in the index, or a mask is."""
    items = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(item, slice) and item.stop is None and not item.start for item in items):
        return None
    if any(isinstance(item, bool) or getattr(item, "dtype", None) in (torch.bool, torch.uint8) for item in items):
        return None
    dim = 0
    chosen: dict[int, Any] = {}
    for number, item in enumerate(items):
        if item is None:
            tensor = tensor.unsqueeze(dim)
        elif item is Ellipsis:
            dim = tensor.dim() - sum(later is not None for later in items[number + 1 :]) - 1
        elif isinstance(item, int):
            tensor = tensor.select(dim, item)
            continue
        elif isinstance(item, slice):
            if len(items) == 1 or not _names_all_of(item, tensor.shape[dim]):
                step = 1 if item.step is None else item.step
                end = sys.maxsize if item.stop is None else item.stop
                tensor = torch.ops.aten.slice.Tensor(tensor, dim, item.start or 0, end, step)
        else:
            chosen[dim] = item
        dim += 1
    if not chosen:
        return tensor
    lists = [None if place not in chosen else torch.as_tensor(chosen[place]) for place in range(max(chosen) + 1)]
    return torch.ops.aten.index.Tensor(tensor, lists)


def _names_all_of(item: slice, length: int) -> bool:
    if not is_exactly(item.stop, (int,)) or item.stop != length:
        return False
    begins = item.start is None or (is_exactly(item.start, (int,)) and item.start == 0)
    return begins and (item.step is None or (is_exactly(item.step, (int,)) and item.step == 1))
