"""Operators at which the host waits for the device: what `torch.cuda.set_sync_debug_mode` warns of, or refuses.

`warn_or_error_on_sync` (c10/cuda/CUDAFunctions.cpp) is called where PyTorch itself waits for a stream: a number that is read, a
size that is found out, and a copy between host and device that may not go on by itself.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine.calls import users_line
from gpumem_magic.virtual.engine.tensors import VirtualTensor

# As `torch.cuda.get_sync_debug_mode` has them.
NOTHING, WARN, ERROR = range(3)
_SAID = "called a synchronizing CUDA operation"
# Their results' sizes, or numbers, are read from the device.
_READING = {
    *overloads("_local_scalar_dense nonzero _unique2 unique_dim unique_consecutive bincount equal"),
}
_COPIES = {_aten._to_copy.default, _aten.copy_.default}
_BY_INDEX = set(overloads("index.Tensor index_put index_put_ _index_put_impl_"))
_MASKS = (torch.bool, torch.uint8)


def waits(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the host waits for the device in this call."""
    if func in _COPIES:
        return _copies_between(func, args, kwargs)
    if func in _BY_INDEX:
        # (The places of a mask are counted first.)
        return any(isinstance(one, VirtualTensor) and one.dtype in _MASKS for one in args[1])
    return func in _READING


def _copies_between(func: Any, args: Any, kwargs: Any) -> bool:
    if kwargs.get("non_blocking") or (func is _aten.copy_.default and len(args) > 2 and args[2]):
        return False
    source = args[1] if func is _aten.copy_.default else args[0]
    if func is _aten.copy_.default:
        to_host = not isinstance(args[0], VirtualTensor)
    else:
        device = kwargs.get("device")
        to_host = device is not None and device.type == "cpu"
        if device is None:
            return False
    return isinstance(source, VirtualTensor) == to_host


def tell(mode: int) -> None:
    """Says it, at the program's line."""
    if mode == ERROR:
        raise RuntimeError(_SAID)
    file, line = users_line()
    warnings.warn_explicit(_SAID, UserWarning, file, line)
