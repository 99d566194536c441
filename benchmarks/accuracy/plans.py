"""What is to be done for a row: a run on a virtual device that gives the row's figure, or a reason why there is none."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

import torch

from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.engine.device import VirtualDevice

Readings = dict[str, int]


@dataclass(frozen=True)
class Plan:
    """A run and which of its readings the row prints. Rows with the same key and device share one run."""

    key: Hashable
    device: str
    run: Callable[[], Readings]
    reading: str


@dataclass(frozen=True)
class Skip:
    why: str


def readings(prefix: str = "") -> Readings:
    """What the device says now, in bytes."""
    (device,) = current_devices()
    return {
        f"{prefix}memory_allocated": torch.cuda.memory_allocated(),
        f"{prefix}max_memory_allocated": torch.cuda.max_memory_allocated(),
        f"{prefix}memory_reserved": torch.cuda.memory_reserved(),
        f"{prefix}max_memory_reserved": torch.cuda.max_memory_reserved(),
        f"{prefix}nvidia-smi": device.used_bytes(),
        f"{prefix}nvml": device.used_bytes() + device.model.driver_reserved_bytes,
    }


def current_devices() -> tuple[VirtualDevice, ...]:
    machine = gpu.current()
    if machine is None:
        raise RuntimeError("a plan runs on a virtual device, and none is on")
    machine.settle()
    return tuple(machine.devices)


def carry_out(plan: Plan, done: dict[Hashable, Mapping[str, int]]) -> int:
    """The figure in bytes. `done` remembers runs, so that each is made once."""
    key = (plan.device, plan.key)
    if key not in done:
        gpu.turn_on(plan.device)
        try:
            done[key] = plan.run()
        finally:
            gc.collect()
            gpu.turn_off()
    return done[key][plan.reading]
