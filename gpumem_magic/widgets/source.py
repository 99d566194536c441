"""Which devices there are to watch, and what they say now. Asks only what is loaded already: looking must not change what is
seen."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from gpumem_magic.devices.base import Counters
from gpumem_magic.snapshot.model import Segment

_TRIES = 3


class Source:
    """The devices of the process: the virtual ones that are on, else the GPUs, once the program has used CUDA."""

    def __init__(self) -> None:
        self._real: Any = None

    def machine(self) -> Any:
        """The machine to read now, or None. Never imports torch, never initialises CUDA."""
        gpu = sys.modules.get("gpumem_magic.virtual.gpu")
        # A module that is being imported by another thread has not all of its names yet.
        current = getattr(gpu, "current", None)
        machine = current() if current is not None else None
        if machine is not None:
            return machine
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        is_initialized = getattr(cuda, "is_initialized", None)
        if is_initialized is None or not is_initialized():
            return None
        if self._real is None:
            from gpumem_magic.widgets.real import RealMachine

            self._real = RealMachine(sys.modules["torch"])
        return self._real

    def devices(self, machine: Any) -> Sequence[Any]:
        """Those of its devices that are worth a chart."""
        in_use = getattr(machine, "in_use", None)
        return list(machine.devices if in_use is None else in_use())


def settle(machine: Any) -> None:
    """Lets a virtual machine do the frees that wait. Only where nothing is recorded: a recording decides that for itself."""
    do = getattr(machine, "settle", None)
    if do is not None:
        do()


def read(device: Any, log: Any = None) -> tuple[Counters, int]:
    """The counters, and a position of the same moment: how many events a log had then, or a real device has counted; else 0.

    No lock: the program is not to wait for us. What changed under our hands is read again.
    """
    own = getattr(device, "read", None)
    if own is not None:
        both: tuple[Counters, int] = own()
        return both
    counters, position = device.counters(), 0
    for _ in range(_TRIES if log is not None else 0):
        position = len(log.events)
        counters = device.counters()
        if len(log.events) == position:
            break
    return counters, position


def blocks(machine: Any, device: Any) -> tuple[tuple[Segment, ...], dict[int, str]] | None:
    """The segments now, and address -> category of what earlier recordings found out. None for a real device: too dear."""
    if device.facts.kind != "virtual":
        return None
    engine = getattr(machine, "engine", None)
    with engine.lock if engine is not None else nullcontext():
        labels = dict(getattr(device, "_labels", {}))
        return device.segments(), {address: label.category for address, label in labels.items()}
