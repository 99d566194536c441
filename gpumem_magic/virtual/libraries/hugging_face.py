"""transformers asks whether a tensor is a compiler's fake, and then makes masks that a run with real tensors goes without."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from gpumem_magic.patching import Patches
from gpumem_magic.virtual.engine.tensors import VirtualParameter, VirtualTensor


def prepare(module: ModuleType, patches: Patches) -> None:
    original: Any = getattr(module, "is_fake_tensor", None)
    if original is None:
        return

    def is_fake_tensor(x: Any) -> bool:
        return type(x) is not VirtualTensor and type(x) is not VirtualParameter and bool(original(x))

    # The library's own function as Dynamo sees it, which breaks graphs at ours.
    is_fake_tensor.__code__ = is_fake_tensor.__code__.replace(co_filename=original.__code__.co_filename)
    patches.also_undo(lambda: vars(module).update(is_fake_tensor=original))
    vars(module).update(is_fake_tensor=is_fake_tensor)
