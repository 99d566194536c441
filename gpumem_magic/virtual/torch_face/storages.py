"""What a program sees of the storages of virtual tensors: their device, their address, and storages moved to the device."""

from __future__ import annotations

from typing import Any

import torch

from gpumem_magic.patching import Patches
from gpumem_magic.virtual.engine.computing import ComputingEngine
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.refusals import CannotRun

_NO_HANDLE = (
    "memory of a virtual GPU has no handle that another process could open: send the tensor itself, through a queue of "
    "torch.multiprocessing, or run this line on a real GPU"
)


def install(patches: Patches, engine: Engine) -> None:
    """Replaces what `torch.UntypedStorage` inherits, which would say that the storage is on the meta device."""
    kind: Any = torch.UntypedStorage
    original_device: Any = torch._C.StorageBase.device  # type: ignore[attr-defined]
    original_address = kind.data_ptr
    original_cpu = kind.cpu
    original_copy = kind.copy_
    original_new = kind.__new__
    original_getitem = kind.__getitem__
    original_setitem = kind.__setitem__
    original_fill = kind.fill_
    original_share = kind._share_cuda_

    def placed(storage: Any) -> Any:
        """Where a storage lies on a device; None for others. (C++ was told that those of devices are on meta.)"""
        if original_device.__get__(storage).type != "meta":
            return None
        with engine.lock:
            return engine.table.find(storage)

    def device(self: Any) -> torch.device:
        place = placed(self)
        plain: torch.device = original_device.__get__(self)
        return plain if place is None else torch.device("cuda", place.device)

    def data_ptr(self: Any) -> int:
        place = placed(self)
        return original_address(self) if place is None else int(place.address)

    def cuda(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
        if self.device.type == "meta":
            raise NotImplementedError("Cannot copy out of meta tensor; no data!")
        target = torch.device("cuda") if device is None else device
        made = torch.empty(self.nbytes(), dtype=torch.uint8, device=target)
        if isinstance(engine, ComputingEngine):
            made.copy_(torch.empty(0, dtype=torch.uint8, device="cpu").set_(self))
        return made.untyped_storage()

    def cpu(self: Any) -> Any:
        if placed(self) is None:
            return original_cpu(self)
        twin = engine.twin_of(self) if isinstance(engine, ComputingEngine) else None
        if twin is not None:
            return twin.clone()
        engine.count_stand_in()
        return torch.zeros(self.nbytes(), dtype=torch.uint8, device="cpu").untyped_storage()

    def copy_(self: Any, source: Any, non_blocking: Any = None) -> Any:
        """(What is saved meanwhile, as `torch.distributed.checkpoint.async_save` does, is brought to the host so.)"""
        if placed(source) is not None:
            if original_device.__get__(self).type == "cpu":
                source = cpu(source)
            else:
                engine.copied(self, source)
        return original_copy(self, source, non_blocking)

    def made(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """``torch.UntypedStorage(100, device="cuda")``."""
        where = kwargs.get("device")
        if where is None or torch.device(where).type != "cuda":
            return original_new(cls, *args, **kwargs)
        content: Any = args[0] if args else kwargs.get("size", 0)
        make = torch.empty if isinstance(content, int) else torch.tensor
        return make(content, dtype=torch.uint8, device=where).untyped_storage()

    def bytes_of(storage: Any) -> torch.Tensor | None:
        """A view of the bytes of a storage on a device; None for others."""
        if placed(storage) is None:
            return None
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def getitem(self: Any, place: Any) -> Any:
        view = bytes_of(self)
        if view is None:
            return original_getitem(self, place)
        if isinstance(place, slice):
            raise CannotRun(
                "a virtual GPU has no slices of a storage: slice a tensor that looks at it, as torch.empty(0, dtype=torch.uint8, "
                "device=storage.device).set_(storage) does"
            )
        return view[place].item()

    def setitem(self: Any, place: Any, value: Any) -> None:
        view = bytes_of(self)
        if view is None:
            original_setitem(self, place, value)
        else:
            view[place] = value

    def fill_(self: Any, value: int) -> Any:
        view = bytes_of(self)
        if view is None:
            return original_fill(self, value)
        view.fill_(value)
        return self

    def share(self: Any, *args: Any) -> Any:
        """(What `torch.multiprocessing` sends goes another way: `sharing`.)"""
        if placed(self) is None:
            return original_share(self, *args)
        raise CannotRun(_NO_HANDLE)

    patches.set(kind, "__new__", staticmethod(made))
    patches.set(kind, "_share_cuda_", share)
    patches.set(kind, "__getitem__", getitem)
    patches.set(kind, "__setitem__", setitem)
    patches.set(kind, "fill_", fill_)
    patches.set(kind, "device", property(device))
    patches.set(kind, "data_ptr", data_ptr)
    patches.set(kind, "cuda", cuda)
    patches.set(kind, "cpu", cpu)
    patches.set(kind, "copy_", copy_)
