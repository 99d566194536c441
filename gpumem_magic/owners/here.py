"""The machine whose memory is asked for: the virtual one that is on, else this computer's GPUs once the program uses them."""

from __future__ import annotations

import sys

from gpumem_magic.devices.base import Machine


class NoDevice(Exception):
    """There is no device to look at. The text is one line and says what to do."""


def machine_in_use() -> Machine:
    """Raises NoDevice. Never brings CUDA into use, and imports torch only if the program has."""
    if "torch" not in sys.modules:
        raise NoDevice("no memory is in use: PyTorch has not been imported yet")
    import torch

    from gpumem_magic.devices import here
    from gpumem_magic.virtual import gpu

    machine = gpu.current()
    if machine is not None:
        return machine
    real = here.machine(torch) if torch.cuda.is_initialized() else None
    if real is not None:
        return real
    raise NoDevice("no device is on: `%gpumem_device NAME` turns a virtual one on")
