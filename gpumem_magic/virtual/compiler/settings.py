"""Settings of PyTorch's compiler that are ours while the device is on."""

from __future__ import annotations

from typing import Any

from gpumem_magic.patching import Patches


def configure(patches: Patches, config: Any, name: str, value: Any) -> None:
    """A setting, until the patches are undone or somebody else sets it."""
    section, _, last = name.rpartition(".")
    config, name = (getattr(config, section), last) if section else (config, name)
    before = getattr(config, name)

    def put_back() -> None:
        if getattr(config, name) == value:
            setattr(config, name, before)

    patches.also_undo(put_back)
    setattr(config, name, value)
