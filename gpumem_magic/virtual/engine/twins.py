"""The host's side of a virtual GPU that computes: for each storage on the device one on the host with the same bytes.

A tensor on the device is seen on the host as the same size, stride and offset on its storage's twin; so views, and what is
written in place, need no care of their own. A twin comes into being when its values are first written or read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gpumem_magic.looks.tensors import SPARSE_PARTS
from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine.calls import sparse_of
from gpumem_magic.virtual.engine.storage import Placement, StorageTable
from gpumem_magic.virtual.engine.tensors import VirtualTensor

_CPU = torch.device("cpu")
# (The name is another's while a device is on.)
_DEVICE = torch.device
_AS_THEY_ARE = frozenset(
    (int, float, bool, str, slice, type(None), type(Ellipsis), torch.dtype, torch.layout, torch.memory_format)
)
# Past what calls an overload in Python, which takes longer than they do.
_empty, _set = torch._C._VariableFunctions.empty, torch._C.TensorBase.set_
_as_strided = torch._C._VariableFunctions.as_strided


class Twins:
    """The twins of all storages of a table. Not safe for threads by itself: the engine's lock is held.

    parts(tensor) -> the tensors that hold the memory of a sparse tensor: its indices and, last, its values.
    is_coalesced(tensor): whether each place is there once.
    """

    def __init__(
        self, table: StorageTable, parts: Callable[[Any], tuple[Any, ...]], is_coalesced: Callable[[Any], bool]
    ) -> None:
        self._table = table
        self._parts = parts
        self._is_coalesced = is_coalesced

    def placement(self, tensor: Any) -> Placement:
        return self._placed(tensor, tensor.untyped_storage())

    def _placed(self, tensor: Any, storage: Any) -> Placement:
        found = self._table.find(storage)
        if found is None:
            self._table.adopt(storage, tensor.fake_device.index)
            found = self._table.find(storage)
        assert found is not None
        return found

    def of(self, placement: Placement, nbytes: int) -> torch.UntypedStorage:
        twin = placement.twin
        if twin is None:
            twin = _aten.zeros.default((nbytes,), dtype=torch.uint8).untyped_storage()
            placement.put(twin)
        elif twin.nbytes() < nbytes:
            twin.resize_(nbytes)
        return twin  # type: ignore[no-any-return]

    def plainly(self, tensor: Any) -> torch.Tensor:
        """The same of a dense tensor that is neither negated nor conjugated by name."""
        storage = tensor.untyped_storage()
        placement = self._table.find(storage)
        if placement is None or placement.host is None or placement.host.dtype is not tensor.dtype:
            return self._looked_at(tensor)
        host: torch.Tensor = placement.host
        size, stride, offset = tensor.size(), tensor.stride(), tensor.storage_offset()
        if host.stride() == stride and host.size() == size and host.storage_offset() == offset:
            return host
        if placement.twin.nbytes() < storage.nbytes():
            return self._looked_at(tensor)
        return _as_strided(host, size, stride, offset)

    def view(self, tensor: Any) -> torch.Tensor:
        """The host's view of a device tensor. To be called with dispatch off."""
        if tensor.layout is not torch.strided:
            made: torch.Tensor = sparse_of(
                [self.view(part) for part in self._parts(tensor)], tensor.size(), tensor.layout
            )
            return made._coalesced_(self._is_coalesced(tensor)) if tensor.layout is torch.sparse_coo else made
        if not (tensor.is_neg() or tensor.is_conj()):
            return self.plainly(tensor)
        return self._looked_at(tensor)

    def _looked_at(self, tensor: Any) -> torch.Tensor:
        storage = tensor.untyped_storage()
        placement = self._placed(tensor, storage)
        blank = _empty((0,), dtype=tensor.dtype, device=_CPU)
        # As large as the device's is now.
        twin = self.of(placement, storage.nbytes())
        made: torch.Tensor = _set(blank, twin, tensor.storage_offset(), tensor.size(), tensor.stride())
        if tensor.is_conj():
            torch._C._set_conj(made, True)
        if tensor.is_neg():
            torch._C._set_neg(made, True)
        if placement.host is None:
            _serve_again(placement, made)
        return made

    def has_taken(self, tensor: Any, result: torch.Tensor) -> bool:
        """Whether `keep` has taken over the memory of a host tensor, which may be used again for the device's."""
        return tensor.layout is torch.strided and self.placement(tensor).host is result

    def keep(self, tensor: Any, result: torch.Tensor, given: Any) -> bool:
        """Has the values of a device tensor be those of a host tensor, whose memory may be taken over.

        given: what the result was made from, whose memory may not. False where the shapes differ.
        """
        if tensor.layout is not torch.strided:
            if result.layout is torch.strided:
                return False
            ours = self._parts(tensor)
            if tensor.layout is not torch.sparse_coo:
                kept = result.layout is tensor.layout
                for mine, part in zip(ours, SPARSE_PARTS[tensor.layout] if kept else (), strict=False):
                    its = part(result)
                    kept = kept and mine.size() == its.size() and self.keep(mine, its, given)
                return kept
            count = ours[0].shape[1]
            if result._nnz() > count:
                result = result.coalesce()
            indices, values = result._indices(), result._values()
            if len(values) < count:
                # CUDA keeps places that the host leaves out (of products).
                indices, values = _padded(indices, values, count)
            return self.keep(ours[0], indices, given) and self.keep(ours[1], values, given)
        if result.layout is not torch.strided:
            result = result.to_dense()
        if result.is_meta:
            return False
        if result._is_zerotensor():
            # (It has no memory at all.)
            result = _aten.zeros.default(result.size(), dtype=result.dtype)
        storage = tensor.untyped_storage()
        placement = self._placed(tensor, storage)
        theirs = result.untyped_storage()
        if placement.twin is not None:
            if placement.twin._cdata == theirs._cdata:
                return True
        elif _is_seen_as(tensor, result) and not _is_of(theirs._cdata, given):
            # (What may lie behind it on the device is as undefined as there; who looks at it has the twin grow.)
            placement.put(theirs)
            _serve_again(placement, result)
            return True
        if tensor.size() != result.size():
            if result.numel() == 0:
                # A result that nobody asked for; it is not left to chance what is there.
                self.view(tensor).zero_()
            return not tensor.numel() or not result.numel()
        self.view(tensor).copy_(result)
        return True


def _is_seen_as(tensor: Any, host: torch.Tensor) -> bool:
    """Whether a host tensor looks at its storage as a device's does at its own."""
    return (
        host.dtype is tensor.dtype
        and host.size() == tensor.size()
        and host.stride() == tensor.stride()
        and host.storage_offset() == tensor.storage_offset()
        and not (tensor.is_neg() or tensor.is_conj() or host.is_neg() or host.is_conj())
    )


def _serve_again(placement: Placement, host: torch.Tensor) -> None:
    """Keeps a host tensor with the storage that it looks at, if it may be used wherever that is."""
    if type(host) is torch.Tensor and not (host.is_inference() or host.is_neg() or host.is_conj()):
        placement.host = host


def _is_of(storage: int, given: Any) -> bool:
    """Whether a storage (its `_cdata`) is that of one of the arguments."""
    for one in given:
        if isinstance(one, torch.Tensor):
            if one.layout is torch.strided and one.untyped_storage()._cdata == storage:
                return True
        elif isinstance(one, (list, tuple)) and _is_of(storage, one):
            return True
    return False


def _padded(indices: torch.Tensor, values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """So many elements, with zeros at the first one's place."""
    more = count - len(values)
    first = indices[:, :1] if indices.numel() else indices.new_zeros((indices.shape[0], 1))
    return (
        torch.cat([indices, first.expand(-1, more)], 1),
        torch.cat([values, values.new_zeros((more, *values.shape[1:]))]),
    )


def leaves(items: Any) -> Sequence[Any]:
    """What lists, tuples and their like hold, in order. No generator: each operator passes here."""
    if not isinstance(items, (list, tuple)):
        return (items,)
    found: list[Any] = []
    for item in items:
        if isinstance(item, (list, tuple)):
            found += leaves(item)
        else:
            found.append(item)
    return found


def mapped(function: Callable[[Any], Any], items: Any) -> Any:
    """The same lists and tuples with the function's results in place of the leaves."""
    kind = type(items)
    if kind is list or kind is tuple:
        return kind([mapped(function, item) for item in items])
    return function(items)


def on_host(twins: Twins, arg: Any) -> Any:
    """An operator's argument as the host's operator takes it."""
    kind = type(arg)
    if kind in _AS_THEY_ARE:
        return arg
    if kind is list or kind is tuple:
        return kind([on_host(twins, item) for item in arg])
    if isinstance(arg, VirtualTensor):
        return twins.view(arg)
    if kind is _DEVICE:
        return _CPU
    if isinstance(arg, (list, tuple)):
        return [on_host(twins, item) for item in arg]
    return arg
