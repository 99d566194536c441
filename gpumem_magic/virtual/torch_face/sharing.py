"""Tensors of a virtual device that go to another process (`torch.multiprocessing`): their memory stays the sender's.

On a card the receiver opens the sender's memory and takes none of its own; here the received storage has no memory either. What
is known of the values is the same bytes of the host in both processes.
"""

from __future__ import annotations

import importlib
import os
import weakref
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from gpumem_magic.patching import Patches
from gpumem_magic.virtual.engine.computing import ComputingEngine
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.tensors import VirtualTensor, engine_of

# What this process received: storages by the sender's process and identity, so that tensors that shared one go on doing so.
_received: weakref.WeakValueDictionary[tuple[int, int], Any] = weakref.WeakValueDictionary()


def install(patches: Patches) -> None:
    """The pickler is told for good, which belongs to `multiprocessing`. In its table the classes are PyTorch's own, as in any."""
    # (Libraries that hand weights on to other processes ask for what the pickler would.)
    patches.set(importlib.import_module("torch.multiprocessing.reductions"), "reduce_tensor", _reduced)
    for kind in (torch.Tensor, torch.nn.Parameter):
        ForkingPickler.register(kind, _reduced)


def _reduced(tensor: torch.Tensor) -> Any:
    if not isinstance(tensor, VirtualTensor):
        return reduce_tensor(tensor)
    if tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError(
            "Cowardly refusing to serialize non-leaf tensor which requires_grad, since autograd does not support crossing "
            "process boundaries.  If you just want to transfer the data, call detach() on the tensor before serializing "
            "(e.g., putting it on the queue)."
        )
    engine = engine_of(tensor)
    storage = tensor.untyped_storage()
    # (The pickler moves the twin to shared memory, in place.)
    twin = engine.twin_of(storage) if isinstance(engine, ComputingEngine) else None
    place = (tensor.get_device(), storage.nbytes(), (os.getpid(), storage._cdata), twin)
    view = (tensor.dtype, tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()))
    return _rebuilt, (place, view, tensor.requires_grad, isinstance(tensor, torch.nn.Parameter))


def _rebuilt(place: Any, view: Any, requires_grad: bool, is_parameter: bool) -> torch.Tensor:
    index, nbytes, key, twin = place
    dtype, size, stride, offset = view
    with torch.no_grad():
        tensor: Any = torch.empty(0, dtype=dtype, device=torch.device("cuda", index))
        engine = engine_of(tensor)
        assert isinstance(engine, Engine)
        storage = _received.get(key)
        if storage is None:
            storage = _received[key] = engine.borrowed(nbytes, index, twin)
        tensor.set_(storage, offset, size, stride)
    tensor.requires_grad_(requires_grad)
    return torch.nn.Parameter(tensor, requires_grad=requires_grad) if is_parameter else tensor
