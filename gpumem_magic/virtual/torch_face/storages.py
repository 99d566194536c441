"""What a program sees of the storages of virtual tensors: their device, their address, and storages moved to the device."""

from __future__ import annotations

from typing import Any

import torch

from gpumem_magic.patching import Patches
from gpumem_magic.virtual.engine.computing import ComputingEngine
from gpumem_magic.virtual.engine.engine import Engine


def install(patches: Patches, engine: Engine) -> None:
    """Replaces what `torch.UntypedStorage` inherits, which would say that the storage is on the meta device."""
    kind = torch.UntypedStorage
    original_device: Any = torch._C.StorageBase.device  # type: ignore[attr-defined]
    original_address = kind.data_ptr
    original_cpu = kind.cpu
    original_copy: Any = kind.copy_
    original_new: Any = kind.__new__

    def placed(storage: Any) -> Any:
        with engine.lock:
            return engine.table.find(storage)

    def device(self: Any) -> torch.device:
        plain: torch.device = original_device.__get__(self)
        if plain.type != "meta":
            return plain
        place = placed(self)
        return plain if place is None else torch.device("cuda", place.device)

    def data_ptr(self: Any) -> int:
        place = placed(self) if original_device.__get__(self).type == "meta" else None
        return original_address(self) if place is None else int(place.address)

    def cuda(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
        if self.device.type == "meta":
            raise NotImplementedError("Cannot copy out of meta tensor; no data!")
        target = torch.device("cuda") if device is None else device
        made = torch.empty(self.nbytes(), dtype=torch.uint8, device=target)
        if isinstance(engine, ComputingEngine):
            made.copy_(torch.empty(0, dtype=torch.uint8).set_(self))
        return made.untyped_storage()

    def cpu(self: Any) -> Any:
        if original_device.__get__(self).type != "meta" or placed(self) is None:
            return original_cpu(self)  # type: ignore[no-untyped-call]
        twin = engine.twin_of(self) if isinstance(engine, ComputingEngine) else None
        if twin is not None:
            return twin.clone()
        engine.count_stand_in()
        return torch.zeros(self.nbytes(), dtype=torch.uint8).untyped_storage()

    def copy_(self: Any, source: Any, non_blocking: Any = None) -> Any:
        """(What is saved meanwhile, as `torch.distributed.checkpoint.async_save` does, is brought to the host so.)"""
        if original_device.__get__(self).type == "cpu" and original_device.__get__(source).type == "meta":
            source = cpu(source)
        return original_copy(self, source, non_blocking)

    def made(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """``torch.UntypedStorage(100, device="cuda")``."""
        where = kwargs.get("device")
        if where is None or torch.device(where).type != "cuda":
            return original_new(cls, *args, **kwargs)
        content: Any = args[0] if args else kwargs.get("size", 0)
        make = torch.empty if isinstance(content, int) else torch.tensor
        return make(content, dtype=torch.uint8, device=where).untyped_storage()

    patches.set(kind, "__new__", staticmethod(made))
    patches.set(kind, "device", property(device))
    patches.set(kind, "data_ptr", data_ptr)
    patches.set(kind, "cuda", cuda)
    patches.set(kind, "cpu", cpu)
    patches.set(kind, "copy_", copy_)
