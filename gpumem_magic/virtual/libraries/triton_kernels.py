"""Kernels written in Triton on a virtual device: a launch writes into existing tensors, and allocates nothing.

So a launch with virtual tensors does nothing. `JITFunction.run` and `Autotuner.run` are what ``kernel[grid](...)`` ends in; the
tuner would run the kernel to time it.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch.utils._pytree import tree_leaves

from gpumem_magic.patching import Patches
from gpumem_magic.virtual.engine.tensors import VirtualTensor, engine_of
from gpumem_magic.virtual.libraries.loading import Prepare, has_virtual


def quiet(kind: str) -> Prepare:
    """Has the `run` of a class launch nothing."""

    def prepare(module: ModuleType, patches: Patches) -> None:
        original = getattr(module, kind).run

        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not has_virtual(args, kwargs):
                return original(self, *args, **kwargs)
            found = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, VirtualTensor)]
            engine_of(found[0]).kernels_not_run += 1
            for tensor in found:
                engine_of(tensor).forget(tensor)
            return None

        patches.set(getattr(module, kind), "run", run)

    return prepare
