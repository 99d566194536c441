"""`torch.export` with a model on a virtual device: what its files hold, and what is built on it and needs more than there is.

A trace is made as `torch.compile` makes its own (`compiler.stages`).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from gpumem_magic.patching import Patches
from gpumem_magic.virtual.engine.tensors import VirtualTensor
from gpumem_magic.virtual.libraries.loading import has_virtual


def prepare_archive(module: ModuleType, patches: Patches) -> None:
    """A virtual tensor is written as `torch.save` writes it, not as nothing. In 2.13 and newer; before, all tensors are."""
    original = getattr(module, "_is_fake_tensor", None)
    if original is not None:
        patches.set(module, "_is_fake_tensor", lambda value: not isinstance(value, VirtualTensor) and original(value))


def prepare_draft(module: ModuleType, patches: Patches) -> None:
    _refuse(
        module, patches, "draft_export", "it goes by values that operators give on the device. torch.export.export can"
    )


def prepare_ahead(module: ModuleType, patches: Patches) -> None:
    why = "it needs the CUDA toolkit's compiler and a GPU. torch.compile(exported.module()) can be run here"
    _refuse(module, patches, "compile_fx_aot", why, "AOTInductor")


def prepare_onnx(module: ModuleType, patches: Patches) -> None:
    """(The exporter through TorchScript, which reads the weights in C++.)"""
    why = "it writes the weights, whose values are not there. Export the model before it is moved to the device"
    _refuse(module, patches, "export", why, "torch.onnx.export")


def _refuse(module: ModuleType, patches: Patches, name: str, why: str, called: str = "") -> None:
    original: Any = getattr(module, name, None)
    if original is None:
        return

    def refused(mod: Any, *args: Any, **kwargs: Any) -> Any:
        held = [*mod.parameters(), *mod.buffers()] if hasattr(mod, "parameters") else []
        if has_virtual(held, args, kwargs):
            raise NotImplementedError(f"{called or name} cannot take a model on the virtual GPU: {why}.")
        return original(mod, *args, **kwargs)

    patches.set(module, name, refused)
