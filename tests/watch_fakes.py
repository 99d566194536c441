"""Devices, recorders and fronts for the tests of the watch: they do what they are told, and remember what they were shown."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from gpumem_magic.devices.base import Counters, DeviceFacts
from gpumem_magic.widgets.observer import Observer, Sample
from gpumem_magic.widgets.watch import WatchSamples

MIB = 1 << 20
PATIENCE = 300.0


def wait_until(true: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(PATIENCE * 100)):
        if true():
            return
        pause.wait(0.01)
    pytest.fail("it never came")


class FakeDevice:
    """`now` is what it says next: allocated, reserved, peak in bytes."""

    def __init__(self, index: int = 0, name: str = "F4", kind: str = "cuda") -> None:
        self.facts = DeviceFacts(name, kind, index, None, 1000 * MIB, 1024 * MIB)
        self.now = (0, 0, 0)
        self.broken: Exception | None = None

        self.labels: dict[int, Any] = {}

    def glance(self, log: Any = None) -> tuple[Counters, int]:
        return self.counters(), 0

    def counters(self) -> Counters:
        if self.broken is not None:
            raise self.broken
        allocated, reserved, peak = self.now
        return Counters(allocated, reserved, reserved + 300 * MIB, 300 * MIB, 0, None, peak, reserved)


class FakeMachine:
    """`devices` may change while it is watched."""

    def __init__(self, *devices: Any) -> None:
        self.devices = list(devices)

    def in_use(self) -> Any:
        return self.devices

    def settle(self) -> None:
        pass


class Clock:
    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


def observer_of(*devices: Any, capacity: int = 64) -> tuple[Observer, Clock]:
    clock = Clock()
    machine: Any = FakeMachine(*devices)
    return Observer(lambda: machine, clock, capacity), clock


@dataclass
class FakeFront:
    opened: int = 0
    shown: list[tuple[Sample, str]] = field(default_factory=list)
    closed: list[WatchSamples] = field(default_factory=list)
    broken: Exception | None = None

    def open(self) -> None:
        self.opened += 1

    def show(self, sample: Sample, state: str) -> None:
        if self.broken is not None:
            raise self.broken
        self.shown.append((sample, state))

    def cell_begins(self) -> None:
        pass

    def cell_ended(self) -> None:
        pass

    def close(self, samples: WatchSamples) -> None:
        self.closed.append(samples)
