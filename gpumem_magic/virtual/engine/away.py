"""Copies on the host of what nobody knows: whether they come back to a device as they are, as offloaded activations do.

What came back has no values there either. They are not kept: weak references hold an address, and no data.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from gpumem_magic.virtual.engine.values import version

_Line = tuple[str, int]


class _Copied(NamedTuple):
    """line: where stand-ins were copied into a storage. written: how often that is written to at most while it has them.
    times: how many such copies have not come back."""

    line: _Line
    written: int
    times: int


class Away:
    """The storages on the host that have stand-ins."""

    def __init__(self) -> None:
        self._copied: dict[StorageWeakRef, _Copied] = {}
        self._enough = 64

    def note(self, host: torch.Tensor, line: _Line, in_place: bool) -> None:
        """This line of the program's copied stand-ins to a host tensor. in_place: to one that was there, whose version PyTorch
        counts up behind the operator."""
        if type(host) is not torch.Tensor or host.is_inference():
            return
        if len(self._copied) >= self._enough:
            self._copied = {reference: one for reference, one in self._copied.items() if not reference.expired()}
            self._enough = max(64, 2 * len(self._copied))
        reference = StorageWeakRef(host.untyped_storage())
        before = self._copied.get(reference)
        times = 1 if before is None or before.line != line else before.times + 1
        self._copied[reference] = _Copied(line, version(host) + in_place, times)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the values of a host tensor are stand-ins."""
        return bool(self._copied) and self._of(tensor) is not None

    def came_back(self, host: torch.Tensor) -> _Line | None:
        """For a host tensor that is copied to a device: the line that gave it stand-ins, once for each time."""
        found = self._of(host) if self._copied else None
        if found is None or not found.times:
            return None
        self._copied[StorageWeakRef(host.untyped_storage())] = found._replace(times=found.times - 1)
        return found.line

    def _of(self, host: torch.Tensor) -> _Copied | None:
        if type(host) is not torch.Tensor or host.layout is not torch.strided or host.is_inference():
            return None
        found = self._copied.get(StorageWeakRef(host.untyped_storage()))
        return found if found is not None and version(host) <= found.written else None
