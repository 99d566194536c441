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
from gpumem_magic.virtual.libraries.loading import has_virtual


def _quiet(kind: Any, patches: Patches) -> None:
    original = kind.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not has_virtual(args, kwargs):
            return original(self, *args, **kwargs)
        first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, VirtualTensor))
        engine_of(first).kernels_not_run += 1
        return None

    patches.set(kind, "run", run)


def prepare_jit(module: ModuleType, patches: Patches) -> None:
    """For `triton.runtime.jit`."""
    _quiet(module.JITFunction, patches)


def prepare_autotuner(module: ModuleType, patches: Patches) -> None:
    """For `triton.runtime.autotuner`."""
    _quiet(module.Autotuner, patches)
