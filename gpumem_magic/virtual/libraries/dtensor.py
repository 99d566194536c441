"""PyTorch's distributed tensors (of FSDP's `fully_shard`, too): they are where the piece is that this process holds.

C++ makes them on the device that it is told for the piece, which is ``meta:i`` for ``cuda:i``.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from gpumem_magic.patching import Patches


def prepare(module: ModuleType, patches: Patches) -> None:
    kind: Any = module.DTensor

    def follow(name: str) -> None:
        def get(self: Any) -> Any:
            # Of a piece of the program's own class, too: it knows what it wraps.
            return getattr(self._local_tensor, name)

        patches.set(kind, name, property(get))

    for name in ("device", "is_cuda", "is_meta", "is_cpu", "get_device"):
        if name not in vars(kind):
            follow(name)
