"""The watch on real GPUs, which are emulated allocators behind PyTorch's own functions: figures, other processes, categories."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from cuda_fakes import CONTEXT, IDLE, FakeNvml, FakeTorch
from watch_fakes import Clock

from gpumem_magic.devices.cuda import DRIVER_SECONDS, CudaMachine
from gpumem_magic.devices.driver import Driver
from gpumem_magic.recording import under_way
from gpumem_magic.recording.model import Sighting
from gpumem_magic.recording.recorder import Recorder
from gpumem_magic.units import MIB
from gpumem_magic.widgets.columns import ALLOCATED, DEVICE_USED, layers_of
from gpumem_magic.widgets.observer import Observer


def watched(torch: FakeTorch, driver: Driver | None = None) -> tuple[Observer, Clock]:
    clock = Clock()
    machine = CudaMachine(torch, driver if driver is not None else Driver(FakeNvml(torch)), clock=clock)
    return Observer(lambda: machine, clock, 64), clock


def named(row: Any) -> dict[str, int]:
    return {layer: size for layer, size in layers_of(list(row)).items() if size}


def test_the_drivers_figures_are_asked_once_a_second_and_fit_the_counters_in_between() -> None:
    torch = FakeTorch()
    nvml = FakeNvml(torch)
    observer, clock = watched(torch, Driver(nvml))
    torch.alloc(8 * MIB)
    torch.gpus[0].others = 500 * MIB
    for number in range(10):
        ((_, row),) = observer.observe().rows
        found = named(row)
        assert sum(found.values()) == row[DEVICE_USED]
        assert found["context"] == CONTEXT
        assert found["other_processes"] == IDLE + 500 * MIB
        assert found["not_yet_known"] == row[ALLOCATED] == (number + 1) * 8 * MIB
        if number == 0:
            before = nvml.asked["DeviceGetMemoryInfo"]
        torch.alloc(8 * MIB)
        clock.time += DRIVER_SECONDS / 20
    assert nvml.asked["DeviceGetMemoryInfo"] == before
    clock.time += DRIVER_SECONDS
    torch.gpus[0].others = 0
    ((_, row),) = observer.observe().rows
    assert nvml.asked["DeviceGetMemoryInfo"] > before
    assert named(row)["other_processes"] == IDLE


def test_without_a_driver_what_it_would_say_is_unavailable_or_the_runtimes() -> None:
    torch = FakeTorch()
    observer, _ = watched(torch, Driver(None))
    torch.alloc(8 * MIB)
    ((_, row),) = observer.observe().rows
    assert layers_of(list(row))["context"] is None
    assert named(row)["context_or_others"] == CONTEXT + IDLE
    torch.broken = True
    observer, _ = watched(torch, Driver(None))
    ((_, row),) = observer.observe().rows
    assert row[DEVICE_USED] != row[DEVICE_USED]
    assert row[ALLOCATED] == 8 * MIB


def test_only_devices_in_use_have_a_chart() -> None:
    torch = FakeTorch(4)
    observer, _ = watched(torch)
    torch.alloc(MIB, gpu=2)
    assert len(observer.observe().rows) == 2
    assert [series.facts.index for series in observer.series] == [0, 2]


def test_watching_takes_no_snapshot_and_begins_no_history() -> None:
    torch = FakeTorch()
    observer, clock = watched(torch)
    torch.alloc(MIB)
    before = torch.state()
    for _ in range(5):
        observer.observe()
        clock.time += 1
    assert torch.state() == before
    assert not [call for call in torch.calls if "history" in call or "snapshot" in call]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A recording under way on one fake GPU; `torch` is that GPU's."""
    torch = FakeTorch()
    torch.use()
    made = Recorder(CudaMachine(torch, Driver(FakeNvml(torch))))
    made.start()
    monkeypatch.setattr(under_way, "_current", made)
    yield SimpleNamespace(own=made, torch=torch)
    made.put_back()


def test_the_samples_of_a_cell_have_the_reports_categories_after_it(
    recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpumem_magic.report.build import build_with_labels

    torch, made = recorder.torch, recorder.own
    observer, clock = watched(torch)

    def look() -> Any:
        clock.time += 0.1
        return observer.observe()

    weight = torch.alloc(20 * MIB)
    made._witness.sightings.append(Sighting(0, made.position(0), weight, "parameter", "weight"))
    ((_, row),) = look().rows
    assert named(row)["not_yet_known"] == 20 * MIB
    passing = torch.alloc(7 * MIB)
    look()
    torch.free(passing)
    ((_, last),) = look().rows
    assert row[ALLOCATED] == last[ALLOCATED] == 20 * MIB
    recording = made.finish()
    monkeypatch.setattr(under_way, "_current", None)
    report, _ = build_with_labels(recording)
    sample = look()
    assert observer.notes == []
    assert len(sample.relabelled) == 3
    for _, row in sample.relabelled:
        assert "not_yet_known" not in named(row)
        assert named(row)["parameters"] == 20 * MIB
        assert sum(named(row).values()) == row[DEVICE_USED]
    assert sample.relabelled[1][1][ALLOCATED] == 27 * MIB
    # Nothing has moved since: what is there is still known.
    ((_, now),) = sample.rows
    wanted = {name: size for name, size in report.checkpoints[-1].categories.items() if size}
    assert {name: size for name, size in named(now).items() if name != "cached"} == {
        name: size for name, size in wanted.items() if name != "cached"
    }
    # And then it has.
    torch.alloc(2 * MIB)
    ((_, moved),) = look().rows
    assert named(moved)["not_yet_known"] == 22 * MIB


def test_a_recording_that_never_comes_leaves_the_samples_and_a_note(
    recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch, made = recorder.torch, recorder.own
    observer, clock = watched(torch)
    torch.alloc(20 * MIB)
    observer.observe()
    made.put_back()
    monkeypatch.setattr(under_way, "_current", None)
    assert observer.observe().relabelled == []
    assert observer.notes == []
    clock.time += 60
    assert observer.observe().relabelled == []
    assert "did not finish" in observer.notes[0]
