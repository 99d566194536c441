"""PyTorch's distributed tensors (of FSDP's `fully_shard`, too): they are where the piece is that this process holds.

C++ makes them on the device that it is told for the piece, which is ``meta:i`` for ``cuda:i``.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from gpumem_magic.patching import Patches
from gpumem_magic.virtual.engine.tensors import VirtualTensor


def prepare(module: ModuleType, patches: Patches) -> None:
    kind: Any = module.DTensor

    def follow(name: str) -> None:
        before = getattr(torch.Tensor, name)

        def get(self: Any) -> Any:
            piece = self._local_tensor
            return getattr(piece, name) if isinstance(piece, VirtualTensor) else before.__get__(self)

        patches.set(kind, name, property(get))

    for name in ("device", "is_cuda", "is_meta", "is_cpu", "get_device"):
        if name not in vars(kind):
            follow(name)
