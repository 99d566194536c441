"""Pinned host memory: pinning itself needs a driver, so a virtual GPU keeps note of what a program pinned. The copy is a copy, as
on a card, where what is written to it does not reach the original."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from gpumem_magic.patching import Patches
from gpumem_magic.virtual.engine.host_blocks import HostBlocks

# `cudaErrorHostMemoryAlreadyRegistered` and `cudaErrorHostMemoryNotRegistered` (``driver_types.h``).
_IS_REGISTERED, _IS_NOT_REGISTERED = 712, 713


class Pinned:
    """Which storages of the host count as pinned. They are not kept: weak references hold an address, and no data."""

    def __init__(self) -> None:
        self.blocks = HostBlocks()
        self.used = False
        """Whether anything was pinned yet, which brings CUDA into use."""
        self._storages: set[StorageWeakRef] = set()
        self._registered: dict[int, int] = {}
        """By its address, the bytes of memory that the program had pinned where it lies; they are not the allocator's."""
        self._enough = 64

    def install(self, patches: Patches) -> None:
        tensor, storage = torch.Tensor, torch.UntypedStorage
        patches.set(tensor, "pin_memory", self._pin_memory)
        patches.set(tensor, "is_pinned", self._is_pinned(tensor.is_pinned))
        patches.set(storage, "pin_memory", lambda its, device="cuda": self._copied(its))
        patches.set(storage, "is_pinned", lambda its, device="cuda": self.has(its))

    def note(self, storage: torch.UntypedStorage) -> None:
        """From now on a storage counts as pinned, and has a block of pinned memory as long as it is there."""
        if len(self._storages) >= self._enough:
            self._storages = {reference for reference in self._storages if not reference.expired()}
            self._enough = max(64, 2 * len(self._storages))
        self.used = True
        self._storages.add(StorageWeakRef(storage))
        weakref.finalize(storage, self.blocks.give_back, self.blocks.take(storage.nbytes())).atexit = False

    def has(self, storage: torch.UntypedStorage) -> bool:
        if self._registered and storage.device.type == "cpu":
            address = storage.data_ptr()
            if any(start <= address < start + nbytes for start, nbytes in self._registered.items()):
                return True
        return bool(self._storages) and StorageWeakRef(storage) in self._storages

    def register(self, address: int, nbytes: int, flags: int = 0) -> int:
        """What `cudaHostRegister` answers: 0, or that this memory is registered."""
        if address in self._registered:
            return _IS_REGISTERED
        self.used = True
        self._registered[address] = nbytes
        return 0

    def unregister(self, address: int) -> int:
        """What `cudaHostUnregister` answers: 0, or that this memory is not registered."""
        return _IS_NOT_REGISTERED if self._registered.pop(address, None) is None else 0

    def _pin_memory(self, tensor: torch.Tensor, *args: Any) -> Any:
        """(Subclasses go on as they are: what their copy would be is theirs to say.)"""
        if not _is_plain(tensor) or self.has(tensor.untyped_storage()):
            return tensor
        copy = tensor.detach().clone()
        self.note(copy.untyped_storage())
        return copy

    def _copied(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        if self.has(storage):
            return storage
        copy: torch.UntypedStorage = storage.clone()
        self.note(copy)
        return copy

    def _is_pinned(self, original: Any) -> Any:
        def is_pinned(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
            if _is_plain(tensor) or (type(tensor) is torch.nn.Parameter and tensor.device.type == "cpu"):
                return self.has(tensor.untyped_storage())
            return bool(original(tensor, *args, **kwargs))

        return is_pinned


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"
