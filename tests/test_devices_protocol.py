"""What a device answers is one protocol, which every device, log and machine has in full; nobody asks what else they are."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from cuda_fakes import FakeNvml, FakeTorch

from gpumem_magic.devices import machines
from gpumem_magic.devices.base import Device, Log, Machine
from gpumem_magic.devices.cuda import CudaMachine
from gpumem_magic.devices.driver import Driver
from gpumem_magic.units import MIB
from gpumem_magic.virtual import gpu

PACKAGE = Path(__file__).parents[1] / "gpumem_magic"


@pytest.fixture(params=["virtual", "cuda"])
def machine(request: pytest.FixtureRequest) -> Any:
    if request.param == "virtual":
        yield gpu.turn_on("2xT4")
        gpu.turn_off()
    else:
        torch = FakeTorch(2)
        torch.use()
        yield CudaMachine(torch, Driver(FakeNvml(torch)))


def members(protocol: type) -> set[str]:
    return {name for name in vars(protocol) if not name.startswith("_")}


def test_every_machine_device_and_log_has_the_whole_protocol(machine: Any) -> None:
    device = machine.devices[0]
    log = device.start_log()
    try:
        for protocol, one in ((Machine, machine), (Device, device), (Log, log)):
            assert len(members(protocol)) >= 5
            assert {name for name in members(protocol) if not hasattr(one, name)} == set()
    finally:
        ended = log.stop()
    assert ended.facts == device.facts


def test_a_glance_says_what_the_counters_say_and_where_the_log_stands(machine: Any) -> None:
    device = machine.devices[0]
    log = device.start_log()
    before = device.glance(log)
    is_virtual = device.facts.kind == "virtual"
    address = device.malloc(8 * MIB, 0) if is_virtual else machine._torch.alloc(8 * MIB)
    counters, position = device.glance(log)
    assert counters.allocated == device.counters().allocated == before[0].allocated + 8 * MIB
    assert position - log.first == log.position() > before[1] - log.first == 0
    assert (log.growing is not None) == is_virtual
    ended = log.stop()
    assert [event.address for event in ended.events if event.action == "alloc"] == [address]
    segments, _ = machine.look(device)
    assert sum(segment.allocated_size for segment in segments) == counters.allocated


def test_the_virtual_machine_stands_before_the_gpus_until_it_is_off() -> None:
    torch = FakeTorch(2)
    assert machines.virtual() is machines.in_use() is None
    on = gpu.turn_on("T4")
    try:
        assert machines.virtual() is machines.in_use() is gpu.current() is on
        assert machines.gpus(torch) is None
    finally:
        gpu.turn_off()
    assert machines.virtual() is None
    found = machines.gpus(torch)
    assert isinstance(found, CudaMachine)
    assert machines.gpus(torch) is found


def test_only_one_place_makes_the_gpus_and_nothing_probes_a_device() -> None:
    made, probed = set(), set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id == "CudaMachine":
                made.add(path.name)
            if node.func.id in ("getattr", "hasattr") and ast.unparse(node.args[0]).split(".")[-1].lstrip("_") in (
                "device", "machine", "log", "recorder",
            ):  # fmt: skip
                probed.add(f"{path.name}:{node.lineno}")
    assert (made, probed) == ({"machines.py"}, set())
