"""`torch.export` (and what is built on it, such as `torch.onnx.export`) with a model on a virtual device.

It traces a model with fake tensors of its own, on CUDA; a build for the host has no guard for that device, and the process ends
in C++. So it is refused before.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from gpumem_magic.patching import Patches
from gpumem_magic.virtual.engine.tensors import VirtualTensor


def prepare(module: ModuleType, patches: Patches) -> None:
    original: Any = getattr(module, "_export", None)
    if original is None:
        return

    def export(mod: Any, *args: Any, **kwargs: Any) -> Any:
        held = [*mod.parameters(), *mod.buffers()] if isinstance(mod, torch.nn.Module) else []
        if any(isinstance(leaf, VirtualTensor) for leaf in (*held, *tree_leaves((args, kwargs)))):
            raise NotImplementedError(
                "torch.export cannot trace a model on the virtual GPU: export it from the host (model.cpu()), or on a real GPU."
            )
        return original(mod, *args, **kwargs)

    patches.set(module, "_export", export)
