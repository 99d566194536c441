"""Copies between several virtual devices in one process, which `torch.nn.DataParallel` is made of.

The names are those of `torch._C` in CUDA builds (torch 2.9 to 2.13); CPU builds do not have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gpumem_magic.patching import Patches


def install(patches: Patches) -> None:
    for name, function in {
        "_broadcast": _broadcast,
        "_broadcast_coalesced": _broadcast_coalesced,
        "_scatter": _scatter,
        "_gather": _gather,
    }.items():
        patches.set(torch._C, name, function)


def _on(tensor: torch.Tensor, index: int) -> torch.Tensor:
    return tensor.to(torch.device("cuda", index))


def _broadcast(tensor: torch.Tensor, devices: Sequence[int]) -> list[torch.Tensor]:
    return [_on(tensor, index) for index in devices]


def _broadcast_coalesced(
    tensors: Sequence[torch.Tensor], devices: Sequence[int], buffer_size: int
) -> list[list[torch.Tensor]]:
    """One list for each device. CUDA sends tensors together in a buffer of `buffer_size` bytes, of which copies are views."""
    copies: list[list[torch.Tensor]] = [list(tensors)]
    for index in devices[1:]:
        mine: list[torch.Tensor] = []
        for group in torch._utils._take_tensors(tensors, buffer_size):
            flat = torch._utils._flatten_dense_tensors(group)
            mine += torch._utils._unflatten_dense_tensors(_on(flat, index), group)
        copies.append(list(torch._utils._reorder_tensors_as(mine, tensors)))
    return copies


def _scatter(
    tensor: torch.Tensor, devices: Sequence[int], chunk_sizes: Sequence[int] | None, dim: int, streams: Any
) -> list[torch.Tensor]:
    chunks = tensor.chunk(len(devices), dim) if chunk_sizes is None else tensor.split(list(chunk_sizes), dim)
    return [_on(chunk, index).contiguous() for chunk, index in zip(chunks, devices, strict=False)]


def _gather(tensors: Sequence[torch.Tensor], dim: int, destination: int | None) -> torch.Tensor:
    if destination == -1:
        return torch.cat([tensor.cpu() for tensor in tensors], dim)
    index = tensors[0].get_device() if destination is None else destination
    shape = list(tensors[0].shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    out = torch.empty(shape, dtype=tensors[0].dtype, device=torch.device("cuda", index))
    at = 0
    for tensor in tensors:
        out.narrow(dim, at, tensor.shape[dim]).copy_(tensor)
        at += tensor.shape[dim]
    return out
