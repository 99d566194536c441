"""The GPUs of this computer, found once, and what can be said of them in a line."""

from __future__ import annotations

import os
from typing import Any

from gpumem_magic.devices import torch_memory
from gpumem_magic.devices.cuda import CudaDevice, CudaMachine
from gpumem_magic.units import MIB, human

_found: tuple[int, Any, CudaMachine] | None = None


def machine(torch: Any) -> CudaMachine | None:
    """The machine of this process, the same each time; None where `torch.cuda` has no GPU. Does not bring CUDA into use."""
    global _found
    if not torch_memory.is_present(torch):
        return None
    known = _found is not None and _found[:2] == (os.getpid(), torch)
    # CUDA_VISIBLE_DEVICES may change for as long as CUDA is not in use.
    if _found is None or not known or len(_found[2].devices) != torch.cuda.device_count():
        _found = os.getpid(), torch, CudaMachine(torch)
    return _found[2]


def words(device: CudaDevice) -> str:
    """``cuda:1 (NVIDIA H200, 139.8 GiB)``."""
    facts = device.facts
    size = f", {human(facts.total_bytes)}" if facts.total_bytes else ""
    return f"cuda:{device.index} ({facts.name}{size})"


def state_line(device: CudaDevice) -> str:
    """What the allocator and nvidia-smi say of a device now."""
    now = device.counters()
    return (
        f"cuda:{device.index}  {device.facts.name}  allocated {human(now.allocated)}  reserved {human(now.reserved)}  "
        f"nvidia-smi {smi_line(device)}"
    )


def smi_line(device: CudaDevice) -> str:
    """``3769MiB / 16160MiB``, whole MiB cut off as nvidia-smi does; ``not available`` for what the driver does not say."""
    used, facts = device.counters().device_used, device.facts
    total = facts.smi_total_bytes or facts.total_bytes
    in_use = "not available" if used is None else f"{used // MIB}MiB"
    return f"{in_use} / {total // MIB}MiB" if total else in_use


def process_lines(device: CudaDevice) -> list[str]:
    """One line for each process with memory on a device, those with most first; none where the driver does not say."""
    return [
        f"  process {process.pid}  {process.user or 'unknown user'}  {process.command or 'unknown program'}  "
        f"{'not available' if process.bytes is None else human(process.bytes)}"
        + ("  (this one)" if process.pid == os.getpid() else "")
        for process in device.processes() or ()
    ]
