"""What can be said of the devices in a notebook: which are on, and how much of their memory is in use."""

# IPython's errors carry no types.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from IPython.core.error import UsageError

from gpumem_magic.devices import machines
from gpumem_magic.devices.base import Device, Machine
from gpumem_magic.session import device as choosing
from gpumem_magic.units import MIB, human

_NONE = "no device is on: `%gpumem_device NAME` turns a virtual one on"


def state() -> str:
    """What is on, and the names that there are, for a bare ``%gpumem_device``."""
    import torch

    from gpumem_magic.virtual.card import catalog

    machine = choosing.virtual()
    if machine is not None:
        words = [f"{choosing.machine_words(machine)} on.{choosing.calibrated(machine)}"]
    else:
        real = machines.gpus(torch)
        words = ["No virtual device is on."] if real is None else []
        for device in real.devices if real is not None else ():
            mark = "  (chosen)" if device.index == choosing.chosen_gpu() else ""
            words.append(f"{choosing.gpu_words(device)}{mark}")
    return "\n".join([*words, "", catalog.describe()])


def memory_text() -> str:
    """The memory of every device now, one line each and its processes below, for a bare ``%gpumem``."""
    devices = _all_devices()
    if not devices:
        import torch

        from gpumem_magic.devices import unsupported

        why = unsupported.why_not(torch)
        return (
            f"{why + ' ' if why is not None else ''}No device is on. `%%gpumem` turns a virtual {choosing.DEFAULT_DEVICE} on "
            "where there is no GPU; `%gpumem_device NAME` chooses another."
        )
    return "\n".join(line for device in devices for line in (_state_line(device), *_process_lines(device)))


def smi_lines() -> list[str]:
    """``3769MiB / 16160MiB`` for every device. Raises UsageError where there is none."""
    devices = _all_devices()
    if not devices:
        raise UsageError(_NONE)
    return [_smi_line(device) for device in devices]


def machine_in_use() -> Machine:
    """The machine that the program uses. Raises UsageError where it uses none."""
    machine = machines.in_use()
    if machine is None:
        raise UsageError(_NONE if "torch" in sys.modules else "no memory is in use: PyTorch has not been imported yet")
    return machine


def _all_devices() -> Sequence[Device]:
    """Those that are on, else those that this computer has, whether they are in use or not."""
    import torch

    machine = machines.virtual() or machines.gpus(torch)
    if machine is None:
        return ()
    machine.settle()
    return machine.devices


def _state_line(device: Device) -> str:
    now, facts = device.counters(), device.facts
    virtual = "virtual " if facts.kind == "virtual" else ""
    return (
        f"cuda:{facts.index}  {virtual}{facts.name}  allocated {human(now.allocated)}  reserved {human(now.reserved)}  "
        f"nvidia-smi {_smi_line(device)}"
    )


def _smi_line(device: Device) -> str:
    """Whole MiB cut off as nvidia-smi does; ``not available`` for what the driver does not say."""
    used, facts = device.counters().device_used, device.facts
    total = facts.smi_total_bytes or facts.total_bytes
    in_use = "not available" if used is None else f"{used // MIB}MiB"
    return f"{in_use} / {total // MIB}MiB" if total else in_use


def _process_lines(device: Device) -> list[str]:
    """One line for each process with memory on a device, those with most first; none where the driver does not say."""
    return [
        f"  process {process.pid}  {process.user or 'unknown user'}  {process.command or 'unknown program'}  "
        f"{'not available' if process.bytes is None else human(process.bytes)}"
        + ("  (this one)" if process.pid == os.getpid() else "")
        for process in device.processes() or ()
    ]
