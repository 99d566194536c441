"""Operators at which the host waits for the device: what `torch.cuda.set_sync_debug_mode` warns of, or refuses, and a capture
cannot take.

`warn_or_error_on_sync` (c10/cuda/CUDAFunctions.cpp) is called where PyTorch itself waits for a stream: a number that is read, a
size that is found out, and a copy between host and device that may not go on by itself.
"""

from __future__ import annotations

import threading
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


class Capturing(threading.local):
    """How many captures of CUDA graphs are under way in each thread, and whether one met what it cannot take."""

    graphs = 0
    is_spoiled = False


CAPTURING = Capturing()


def waits(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the host waits for the device in this call."""
    if func in _COPIES:
        return _copies_between(func, args, kwargs)
    if func in _BY_INDEX:
        indices = [one for one in args[1] if one is not None]
        if not all(isinstance(one, VirtualTensor) for one in indices):
            return True
        # (The places of a mask are counted first, but where one number is written: `canDispatchToMaskedFill`.)
        is_filled = func is not _aten.index.Tensor and not isinstance(args[2], VirtualTensor)
        return not is_filled and any(one.dtype in _MASKS for one in indices)
    if func is _aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    return func in _READING


def refuse_in_capture(func: Any, args: Any, kwargs: Any) -> None:
    """Raises what a card raises where an operator that is captured in a graph copies to or from memory of the host that is not
    pinned (``Copy.cu``), or waits: published runs of both by PyTorch's CUDA build with CUDA 13."""
    if func in _COPIES and _goes_between(func, args, kwargs) and not _is_pinned(func, args, kwargs):
        raise RuntimeError(
            "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned. Please use "
            "tensor.pin_memory() or allocate the tensor with pin_memory=True."
        )
    if waits(func, args, kwargs):
        refuse_waiting()


def _is_pinned(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the host's side of a copy is pinned."""
    if func is _aten._to_copy.default and isinstance(args[0], VirtualTensor):
        # (`_to_copy` in TensorConversions.cpp)
        return bool(kwargs.get("non_blocking"))
    on_host = args[1] if func is _aten.copy_.default and isinstance(args[0], VirtualTensor) else args[0]
    return bool(on_host.is_pinned())


def refuse_waiting() -> None:
    """Raises what CUDA answers to one who waits for a stream that is captured; the capture is lost with that."""
    CAPTURING.is_spoiled = True
    raise torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")


def _copies_between(func: Any, args: Any, kwargs: Any) -> bool:
    if kwargs.get("non_blocking") or (func is _aten.copy_.default and len(args) > 2 and args[2]):
        return False
    return _goes_between(func, args, kwargs)


def _goes_between(func: Any, args: Any, kwargs: Any) -> bool:
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
