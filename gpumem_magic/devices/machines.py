"""Which machine is in use, decided in this one place: the virtual one if it is on, else this computer's GPUs.

Looking must not change what is seen: nothing here imports torch or brings CUDA into use.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from gpumem_magic.devices import torch_memory
from gpumem_magic.devices.base import Machine
from gpumem_magic.devices.cuda import CudaMachine

_virtual: Machine | None = None
_gpus: tuple[int, Any, CudaMachine] | None = None


def virtual() -> Machine | None:
    """The virtual machine that is on, or None."""
    return _virtual


def put_in_front(machine: Machine | None) -> None:
    """From now on this virtual machine stands before the GPUs; None: no longer any."""
    global _virtual
    _virtual = machine


def gpus(torch: Any) -> CudaMachine | None:
    """This computer's GPUs, the same machine each time; None where there are none, or a virtual one stands before them."""
    global _gpus
    if _virtual is not None or not torch_memory.is_present(torch):
        return None
    known = _gpus is not None and _gpus[:2] == (os.getpid(), torch)
    # CUDA_VISIBLE_DEVICES may change for as long as CUDA is not in use.
    if _gpus is None or not known or len(_gpus[2].devices) != torch.cuda.device_count():
        _gpus = os.getpid(), torch, CudaMachine(torch)
    return _gpus[2]


def in_use() -> Machine | None:
    """The machine that the program uses now; None before its first use of CUDA."""
    if _virtual is not None:
        return _virtual
    torch = sys.modules.get("torch")
    # Another thread may be importing it: not all of its names are there yet.
    is_initialized = getattr(getattr(torch, "cuda", None), "is_initialized", None)
    return gpus(torch) if is_initialized is not None and is_initialized() else None
