"""PyTorch's distributed tensors (of FSDP's `fully_shard`, too): they are where the piece is that this process holds.

C++ makes them on the device that it is told for the piece, which is ``meta:i`` for ``cuda:i``.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from gpumem_magic.patching import Patches
from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.host_calls import equivalent
from gpumem_magic.virtual.engine.modes import pushed
from gpumem_magic.virtual.engine.rules import special


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


def prepare_collectives(module: ModuleType, patches: Patches) -> None:
    """For `torch.distributed._functional_collectives`: on a device their results are wrapped (2.11 and newer), and wait when they
    are used. Here nothing is waited for, and what PyTorch's shape rule makes would be a second tensor."""
    wrapping = getattr(torch.ops._c10d_functional, "_wrap_tensor_autograd", None)
    if wrapping is not None:
        special(wrapping.default)(_same_memory)
        # A wrapper is no memory that a device's could be the twin of.
        equivalent(wrapping.default)(torch.ops._c10d_functional.wait_tensor.default)


def _same_memory(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    with pushed(engine.mode):
        return _aten.alias.default(args[0])
