"""What a device holds beside PyTorch's allocator, and a driver that takes its time."""

from __future__ import annotations

import os

import pytest

from gpumem_magic.devices.driver import DriverMemory
from gpumem_magic.devices.outside import OutsideMemory, Shares
from gpumem_magic.units import GIB, MIB


class Gpu:
    """One that others use, too. takes: seconds of an answer."""

    def __init__(self, takes: float) -> None:
        self.takes = takes
        self.time = 100.0
        self.asked = 0
        self.reserved, self.context, self.others = 0, 500 * MIB, 3 * GIB

    def memory(self) -> DriverMemory:
        self.asked += 1
        self.time += self.takes
        return DriverMemory(80 * GIB, self.reserved + self.context + self.others)

    def usage(self) -> dict[int, int | None]:
        return {os.getpid(): self.reserved + self.context, 1: self.others}

    def outside(self) -> OutsideMemory:
        return OutsideMemory(self, lambda: None, lambda: self.time)  # type: ignore[arg-type]

    def after(self, seconds: float, outside: OutsideMemory) -> Shares:
        self.time += seconds
        return outside.now(self.reserved, True)


def test_who_answers_at_once_is_asked_at_each_moment() -> None:
    gpu = Gpu(takes=0.00001)
    outside = gpu.outside()
    for _ in range(10):
        gpu.others += 1 * MIB
        assert gpu.after(0.0001, outside) == Shares(gpu.reserved + gpu.context + gpu.others, gpu.context, gpu.others)
    assert outside.told_late() == 0


def test_a_driver_that_was_slow_twice_is_left_alone_for_nineteen_times_as_long() -> None:
    gpu = Gpu(takes=0.01)
    outside = gpu.outside()
    gpu.after(0, outside)
    # Once may be its waking up.
    gpu.others += MIB
    assert gpu.after(0.001, outside).other_processes == gpu.others
    asked, known = gpu.asked, gpu.others
    gpu.others += GIB
    gpu.reserved += 64 * MIB
    shares = gpu.after(0.15, outside)
    assert gpu.asked == asked
    # The figures still add up: the allocator's is of now, the rest as it was.
    assert shares == Shares(gpu.reserved + gpu.context + known, gpu.context, known)
    assert gpu.after(0.05, outside).other_processes == gpu.others
    assert gpu.asked == asked + 1
    assert outside.told_late() == pytest.approx(0.15)
    assert outside.told_late() == 0


def test_it_is_asked_again_when_the_process_gets_a_context() -> None:
    gpu = Gpu(takes=0.01)
    gpu.context = 0
    outside = gpu.outside()
    for _ in range(2):
        assert outside.now(0, False).context == 0
    gpu.context = 500 * MIB
    assert outside.now(0, True).context == 500 * MIB


def test_at_most_a_twentieth_of_the_time_is_spent_on_waiting() -> None:
    gpu = Gpu(takes=0.004)
    outside = gpu.outside()
    began = gpu.time
    for _ in range(5000):
        gpu.after(0.0002, outside)
    assert gpu.asked * gpu.takes <= 0.05 * (gpu.time - began) + 2 * gpu.takes


def test_inside_a_statement_the_driver_is_asked_where_memory_moved_or_two_milliseconds_later() -> None:
    gpu = Gpu(takes=0.00001)
    outside = gpu.outside()

    def asked(seconds: float) -> bool:
        before = gpu.asked
        gpu.time += seconds
        shares = outside.now(gpu.reserved, True, exact=False)
        assert shares.device_used == gpu.reserved + gpu.context + gpu.others
        return gpu.asked > before

    assert asked(0)
    assert not asked(0.0005)
    gpu.reserved += MIB
    assert asked(0.0005)
    assert not asked(0.0005)
    assert asked(0.002)
    gpu.after(0.0001, outside)
    assert not asked(0.0001)
    before = gpu.asked
    gpu.after(0.0001, outside)
    assert gpu.asked == before + 1
