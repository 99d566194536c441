"""Samples: every byte of a moment in a layer, categories as they become known, and the report's after the cell."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from watch_fakes import MIB, FakeDevice, observer_of

from gpumem_magic.devices import machines
from gpumem_magic.devices.base import DeviceFacts, DeviceLog, Label
from gpumem_magic.recording import under_way
from gpumem_magic.recording.model import Sighting
from gpumem_magic.snapshot.model import ACTIVE, INACTIVE, Block, Segment, TraceEvent
from gpumem_magic.widgets import live
from gpumem_magic.widgets.columns import ALLOCATED, DEVICE_USED, LAYERS, PEAK, RESERVED, SENT, layers_of
from gpumem_magic.widgets.observer import Observer


def named(row: Any) -> dict[str, int]:
    return {layer: size for layer, size in layers_of(list(row)).items() if size}


# ---- without a recording


def test_what_nobody_has_recorded_is_not_yet_known() -> None:
    device = FakeDevice()
    device.now = (100 * MIB, 120 * MIB, 100 * MIB)
    observer, clock = observer_of(device)
    sample = observer.observe()
    ((number, row),) = sample.rows
    assert number == 0
    assert row[0] == clock.time
    assert len(row) == len(SENT)
    assert named(row) == {"not_yet_known": 100 * MIB, "cached": 20 * MIB, "context": 300 * MIB}
    assert sum(named(row).values()) == row[DEVICE_USED]
    # Unavailable is not a number, never 0.
    assert math.isnan(row[1 + LAYERS.index("context_or_others")])


def test_the_peak_counts_what_lies_between_two_samples_but_not_what_was_before() -> None:
    device = FakeDevice()
    observer, _ = observer_of(device)
    peaks = []
    for now in ((10, 900, 700), (20, 900, 700), (5, 900, 800), (5, 900, 800), (30, 900, 30), (5, 900, 90)):
        device.now = now
        ((_, row),) = observer.observe().rows
        peaks.append(row[PEAK])
    # 700 was reached before the watch; after the program reset its counter, 90 is less than was seen.
    assert peaks == [10, 20, 800, 800, 800, 800]


def test_several_devices_are_several_series_and_one_that_goes_keeps_its_samples() -> None:
    first, second = FakeDevice(0), FakeDevice(1)
    observer, clock = observer_of(first, second)
    assert [number for number, _ in observer.observe().rows] == [0, 1]
    observer._machine().devices = []  # type: ignore[union-attr, misc]
    clock.time += 1
    assert observer.observe().rows == []
    observer._machine().devices = [second, FakeDevice(0, "other")]  # type: ignore[union-attr, misc]
    clock.time += 1
    assert [number for number, _ in observer.observe().rows] == [1, 2]
    assert [len(series.ring) for series in observer.series] == [1, 2, 1]
    rows, _ = observer.history()
    assert [number for number, _ in rows] == [0, 1, 1, 2]


def test_marks_come_with_the_next_sample_once() -> None:
    observer, clock = observer_of(FakeDevice())
    observer.mark("here\nnow")
    observer.mark("earlier", at=clock.time - 5)
    assert [(mark.label, mark.time) for mark in observer.observe().marks] == [("here now", 1000.0), ("earlier", 995.0)]
    assert observer.observe().marks == []
    assert len(observer.history()[1]) == 2


def test_the_source_imports_nothing_and_wakes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: False)))
    assert machines.in_use() is None
    # A module in the middle of being imported by another thread.
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    assert machines.in_use() is None


# ---- live labels


def block(address: int, size: int, state: str = ACTIVE) -> Block:
    return Block(address, max(size, 512), size, state)


def segment(*blocks: Block) -> Segment:
    return Segment(0, blocks[0].address, sum(each.size for each in blocks), 0, "large", blocks)


def test_labels_follow_the_log() -> None:
    start = [segment(block(1, 100), block(2, 50), block(3, 7, INACTIVE))]
    labels = live.LiveLabels(0, start, {2: Label("optimizer_state", "identity")})
    assert {name: size for name, size in labels.requested().items() if size} == {
        "optimizer_state": 50,
        "not_yet_known": 100,
    }
    events = [
        TraceEvent("alloc", 10, 1000),
        TraceEvent("alloc", 11, 4096),
        TraceEvent("segment_alloc", 99, 1 << 20),
        TraceEvent("free_requested", 10, 1000),
        TraceEvent("free_completed", 10, 1000),
        TraceEvent("alloc", 10, 30),
    ]
    log = DeviceLog(DeviceFacts("F4", "virtual", 0, None, None, None), (), events, {1: "workspace"})

    def advance(looks: list[Sighting], end: int) -> None:
        labels.advance(log, looks, end, lambda device, position: ())

    looks = [
        Sighting(0, 0, 1, "parameter"),
        Sighting(1, 1, 10, "parameter"),  # another device's
        Sighting(0, 1, 10, "input"),  # of the tenant that goes
        Sighting(0, 6, 10, "named"),  # a role that decides nothing alone
    ]
    advance(looks, 2)
    found = {name: size for name, size in labels.requested().items() if size}
    assert found == {"parameters": 100, "optimizer_state": 50, "inputs": 1000, "workspace": 4096}
    advance(looks, len(events))
    found = {name: size for name, size in labels.requested().items() if size}
    assert found == {"parameters": 100, "optimizer_state": 50, "workspace": 4096, "not_yet_known": 30}
    # Seen as a gradient, then known as a parameter; a weaker look afterwards changes nothing.
    more = [*looks, *(Sighting(0, 6, 10, role) for role in ("gradient", "parameter", "gradient", "input"))]
    advance(more, len(events))
    assert labels.requested()["parameters"] == 130
    assert labels.requested()["not_yet_known"] == 0
    # A look at an earlier tenant of the address that is taken in late.
    advance([*more, Sighting(0, 1, 10, "buffer")], len(events))
    assert labels.requested()["parameters"] == 130


def test_idle_labels_forget_an_address_that_has_another_tenant() -> None:
    at_end = {1: (100, "unknown"), 2: (50, "activations"), 9: (1, "inputs")}
    sums, left = live.requested_now(
        [segment(block(1, 100), block(2, 51), block(3, 8))], {3: Label("parameters", "identity")}, at_end
    )
    assert {name: size for name, size in sums.items() if size} == {"unknown": 100, "not_yet_known": 51, "parameters": 8}
    assert left == {1: (100, "unknown")}


# ---- the virtual GPU, and the report


@pytest.fixture
def machine() -> Any:
    from gpumem_magic.virtual import gpu

    yield gpu.turn_on("T4")
    gpu.turn_off()


def train(steps: int, each: Any) -> Any:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        batch = torch.randn(64, 256, device="cuda")
        loss = model(batch).square().mean()
        each("forward")
        loss.backward()
        each("backward")
        optimizer.step()
        each("step")
    return model, optimizer, batch, loss


def test_categories_become_known_and_end_as_the_reports(machine: Any) -> None:
    from gpumem_magic.session import recording as session

    observer = Observer(machines.in_use, time.time, 256)
    recording = session.open_recording()
    seen: dict[str, dict[str, int]] = {}

    def look(where: str) -> None:
        ((_, row),) = observer.observe().rows
        assert sum(named(row).values()) == row[DEVICE_USED]
        assert (
            sum(size for layer, size in named(row).items() if layer in LAYERS[: LAYERS.index("cached")])
            == row[ALLOCATED]
        )
        seen[where] = named(row)

    observer.observe()
    kept = train(2, look)
    assert {"parameters", "inputs"} <= set(seen["forward"])
    assert seen["backward"]["gradients"] == seen["backward"]["parameters"]
    assert seen["step"]["optimizer_state"] >= 2 * seen["step"]["parameters"]
    assert seen["forward"]["not_yet_known"] > 0
    report = recording.close()
    sample = observer.observe()
    ((_, last),) = sample.rows
    assert named(last) == {name: size for name, size in report.checkpoints[-1].categories.items() if size}
    # The samples of the cell have the report's categories now, and are sent again.
    assert len(sample.relabelled) == 7
    assert all("not_yet_known" not in named(row) for _, row in sample.relabelled)
    assert any("activations" in named(row) for _, row in sample.relabelled)
    for _, row in sample.relabelled:
        assert sum(named(row).values()) == row[DEVICE_USED]
    assert observer.notes == []
    assert observer.observe().relabelled == []
    # What is freed without a recording is seen too.
    del kept
    ((_, row),) = observer.observe().rows
    assert named(row).get("parameters", 0) == 0
    assert row[RESERVED] == last[RESERVED]


# Trains in a function, where no variable of the notebook holds anything.
PLAIN = """
def plain():
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        batch = torch.randn(64, 256, device="cuda")
        loss = model(batch).square().mean()
        look("forward")
        loss.backward()
        look("backward")
        optimizer.step()
        look("step")
plain()
"""


def test_an_interrupt_as_it_begins_leaves_nothing(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    shell = InteractiveShell()
    before = {name: list(callbacks) for name, callbacks in shell.events.callbacks.items()}
    monkeypatch.setattr("gpumem_magic.widgets.plain_cells.LiveLabels", interrupted)
    undo: list[Callable[[], None]] = []
    with pytest.raises(KeyboardInterrupt):
        Observer(machines.in_use, time.time, 256).follow(shell, undo)
    for one in undo:
        one()
    assert shell.events.callbacks == before


def test_plain_cells_of_a_virtual_device_are_known_while_they_run(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.nn.modules import module as nn_module

    # However long a look takes, the next one is taken.
    monkeypatch.setattr("gpumem_magic.widgets.observer._REST", 0)

    shell = InteractiveShell()
    observer = Observer(machines.in_use, time.time, 256)
    seen: dict[str, dict[str, int]] = {}

    def look(where: str) -> None:
        ((_, row),) = observer.observe().rows
        seen[where] = named(row)
        tenants = LAYERS[: LAYERS.index("cached")]
        assert sum(size for layer, size in seen[where].items() if layer in tenants) == row[ALLOCATED]

    def run(cell: str) -> dict[str, int]:
        assert shell.run_cell(cell, store_history=True).success
        look("end")
        return seen["end"]

    shell.user_ns["look"] = look
    run("%load_ext gpumem_magic\nimport torch")
    # Made before anybody watched.
    run("model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).cuda()")
    weights = seen["end"].pop("not_yet_known")
    undo: list[Callable[[], None]] = []
    observer.follow(shell, undo)
    (end,) = undo
    look("end")
    assert seen["end"]["parameters"] == weights
    run(PLAIN)
    assert "not_yet_known" not in seen["backward"]
    # The loss is made outside of all modules, and known when backward begins.
    assert seen["forward"]["activations"] > 64 * 256 * 4
    assert seen["forward"]["inputs"] == 64 * 256 * 4
    assert seen["backward"]["gradients"] == seen["backward"]["parameters"] == weights
    assert seen["step"]["optimizer_state"] >= 2 * weights
    assert "optimizer_state" not in seen["end"]
    # A measured cell finds no hook of ours, and what it knew stays known in the next plain one.
    measured = run("%%gpumem -q -o report\n" + PLAIN + "kept = torch.zeros(1 << 20, device='cuda')")
    report = shell.user_ns["report"].checkpoints[-1].categories
    assert measured == {name: size for name, size in report.items() if size}
    assert run("after = 1") == measured
    # One that ends while a cell runs leaves nothing either.
    shell.user_ns["end"] = end
    run("end()\nloss = model(batch := torch.ones(8, 256, device='cuda'))")
    assert not nn_module._global_forward_hooks
    assert not nn_module._global_forward_pre_hooks
    assert not under_way.is_any()
    assert machine.devices[0].allocator.sinks == []
    assert shell.events.callbacks["pre_run_cell"] == []


def test_a_real_device_is_asked_for_what_modules_and_optimizers_hold() -> None:
    import torch

    device = FakeDevice()
    device.now = (100 * MIB, 120 * MIB, 100 * MIB)
    observer, _ = observer_of(device)
    layer = torch.nn.Linear(1024, 1024, bias=False)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    # Its storages stand for memory of the device, steps for the host's.
    observer._machine().locate = (  # type: ignore[union-attr, method-assign]
        lambda tensor: (0, tensor.untyped_storage().data_ptr()) if tensor.numel() > 1 else None
    )
    shell = SimpleNamespace(
        events=SimpleNamespace(register=lambda *_: None, callbacks={"pre_run_cell": [], "post_run_cell": []})
    )
    shell.user_ns = {"layer": layer, "same": layer, "optimizer": optimizer}
    undo: list[Callable[[], None]] = []
    observer.follow(shell, undo)
    (end,) = undo
    ((_, row),) = observer.observe().rows
    assert named(row) == {
        "parameters": 4 * MIB, "optimizer_state": 8 * MIB, "not_yet_known": 88 * MIB, "cached": 20 * MIB,
        "context": 300 * MIB,
    }  # fmt: skip
    # More than there is: they have been given to somebody else meanwhile.
    device.now = (10 * MIB, 120 * MIB, 100 * MIB)
    ((_, row),) = observer.observe().rows
    assert named(row)["not_yet_known"] == 10 * MIB
    end()


def test_a_log_that_is_too_long_keeps_the_samples_as_they_were(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpumem_magic.session import recording as session

    monkeypatch.setattr(live, "RELABEL_LIMIT", 3)
    observer = Observer(machines.in_use, time.time, 256)
    recording = session.open_recording()
    kept = train(1, lambda where: observer.observe())
    recording.close()
    assert observer.observe().relabelled == []
    assert "keep their first categories" in observer.notes[0]
    assert kept


def test_watching_leaves_the_report_as_it_is(machine: Any) -> None:
    from gpumem_magic.session import recording as session
    from gpumem_magic.virtual import gpu

    reports = []
    for watched in (False, True):
        gpu.turn_on("T4")
        observer = Observer(machines.in_use, time.time, 256)
        recording = session.open_recording()
        looks = observer.observe if watched else object
        kept = train(2, lambda where, looks=looks: looks())
        data = recording.close().to_dict()
        data.pop("overhead_seconds")
        reports.append(data)
        del kept
    assert reports[0] == reports[1]


def test_statements_are_marks(machine: Any) -> None:
    from gpumem_magic.recording.instrument import Statement
    from gpumem_magic.session import recording as session

    observer = Observer(machines.in_use, time.time, 256)
    recording = session.open_recording()
    progress = recording.observer()
    observer.observe()
    for line in (2, 3, 4):
        statement = Statement(line, line, f"x = {line}", "assign", 0)
        progress.after_statement(statement, (), ())
    (mark,) = observer.observe().marks
    assert (mark.kind, mark.label, mark.line, mark.count) == ("checkpoint", "x = 4", 4, 3)
    progress.after_statement(statement, (), ())
    recording.close()
    assert [mark.count for mark in observer.observe().marks] == [1]
    assert observer.observe().marks == []


def test_a_cell_that_ends_in_a_pause_is_relabelled_there(machine: Any) -> None:
    from gpumem_magic.session import recording as session

    observer = Observer(machines.in_use, time.time, 256)
    recording = session.open_recording()
    kept = train(1, lambda where: observer.observe())
    assert observer.observe(resting=True).relabelled == []
    recording.close()
    sample = observer.observe(resting=True)
    assert sample.rows == []
    assert len(sample.relabelled) == 3
    assert kept
    assert observer.observe(resting=True).relabelled == []


def test_the_failing_statement_is_a_mark(machine: Any) -> None:
    from gpumem_magic.session import recording as session

    observer = Observer(machines.in_use, time.time, 256)
    recording = session.open_recording()
    observer.observe()
    recording.close(ZeroDivisionError("division by zero"), ("1 / 0", 7, (), ()))
    (mark,) = observer.observe().marks
    assert (mark.kind, mark.label, mark.line) == ("checkpoint", "1 / 0", 7)
