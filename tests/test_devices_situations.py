"""Every odd computer ends in a report whose figures add up: what the driver does not say is not available, never 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from cuda_fakes import CONTEXT, IDLE, FakeNvml, FakeTorch

from gpumem_magic.devices.cuda import CudaMachine
from gpumem_magic.devices.driver import Driver
from gpumem_magic.recording.recorder import Recorder
from gpumem_magic.report.build import build
from gpumem_magic.report.model import Row
from gpumem_magic.snapshot.rules import AllocatorSettings
from gpumem_magic.units import GIB, MIB
from gpumem_magic.user_report import Report

OUTSIDE = ("context", "other_processes", "context_or_others")


@dataclass
class Computer:
    """torch and driver of a situation; later: what happens to them in the middle of the cell."""

    torch: FakeTorch
    nvml: FakeNvml
    driver: Driver
    later: Callable[[], Any] = lambda: None
    gpus: tuple[int, ...] = (0,)
    primary: int = 0
    environment: dict[str, str] = field(default_factory=dict)


def computer(count: int = 1, order: list[int] | None = None, **options: Any) -> Computer:
    torch = FakeTorch(count, **options)
    nvml = FakeNvml(torch, order)
    return Computer(torch, nvml, Driver(nvml))


def other_process() -> Computer:
    made = computer()
    made.later = lambda: setattr(made.torch.gpus[0], "others", 3 * GIB)
    return made


def other_process_that_leaves() -> Computer:
    made = computer()
    made.torch.gpus[0].others = 3 * GIB
    made.later = lambda: setattr(made.torch.gpus[0], "others", 0)
    return made


def container_with_the_hosts_pids() -> Computer:
    made = computer()
    made.nvml.pid = 4_000_000
    return made


def container_without_pids() -> Computer:
    made = computer()
    made.nvml.pid = None
    return made


def mig_instance() -> Computer:
    made = computer()
    made.nvml.mig[f"MIG-{made.torch.gpus[0].uuid}"] = 0
    return made


def mig_instance_by_name() -> Computer:
    made = computer()
    made.nvml.mig["MIG-aaaaaaaa-1111-2222-3333-444444444444"] = 0
    made.environment["CUDA_VISIBLE_DEVICES"] = "MIG-aaaaaaaa-1111-2222-3333-444444444444"
    return made


def old_driver() -> Computer:
    made = computer()
    made.nvml.knows_v2 = False
    return made


def falls_off_the_bus() -> Computer:
    made = computer()

    def fall() -> None:
        made.nvml.broken["*"] = "GPU is lost"
        made.torch.broken = True

    made.later = fall
    return made


def driver_goes_away() -> Computer:
    made = computer()
    made.later = lambda: made.nvml.broken.update({"*": "Unknown Error"})
    return made


def other_order() -> Computer:
    made = computer(2, order=[1, 0])
    made.torch.gpus[1].others = 5 * GIB
    return made


def reordered_by_variable() -> Computer:
    made = computer(2, order=[1, 0])
    made.environment["CUDA_VISIBLE_DEVICES"] = "1,0"
    made.torch.cuda.get_device_properties = lambda index: SimpleNamespace(
        name="NVIDIA Fake", total_memory=made.torch.gpus[index].total
    )
    made.torch.gpus[1].others = 5 * GIB
    return made


def wsl() -> Computer:
    made = computer()
    made.nvml.absurd = True
    return made


def no_driver() -> Computer:
    made = computer()
    made.driver = Driver(None, "the package nvidia-ml-py is not installed")
    return made


def no_driver_and_it_breaks() -> Computer:
    made = no_driver()
    made.later = lambda: setattr(made.torch, "broken", True)
    return made


class OldBinding(FakeNvml):
    """A binding that lacks whatever came later, and wants bytes."""

    nvmlMemory_v2 = None  # type: ignore[assignment]
    nvmlDeviceGetGraphicsRunningProcesses = None  # type: ignore[assignment]
    nvmlDeviceGetMaxMigDeviceCount = None  # type: ignore[assignment]

    def nvmlDeviceGetHandleByUUID(self, uuid: Any) -> Any:
        if not isinstance(uuid, bytes):
            raise TypeError("bytes expected")
        return super().nvmlDeviceGetHandleByUUID(uuid.decode())

    def nvmlDeviceGetUUID(self, handle: Any) -> Any:
        return super().nvmlDeviceGetUUID(handle).encode()


def other_version() -> Computer:
    torch = FakeTorch()
    nvml = OldBinding(torch)
    return Computer(torch, nvml, Driver(nvml))


def says_less_than_the_allocator() -> Computer:
    made = computer()
    made.nvml.nvmlDeviceGetMemoryInfo = lambda handle, version=None: SimpleNamespace(  # type: ignore[method-assign]
        total=made.torch.gpus[0].total, used=MIB, free=0
    )
    return made


def processes_not_permitted() -> Computer:
    made = computer()
    made.nvml.broken["DeviceGetComputeRunningProcesses"] = "Insufficient Permissions"
    made.nvml.broken["DeviceGetGraphicsRunningProcesses"] = "Insufficient Permissions"
    return made


def two_devices() -> Computer:
    made = computer(2)
    made.gpus = (0, 1)
    return made


def only_the_second() -> Computer:
    made = computer(2)
    made.gpus, made.primary = (1,), 1
    return made


def not_in_use_before() -> Computer:
    return computer(initialized=False)


def not_in_use_and_no_driver() -> Computer:
    made = computer(initialized=False)
    made.driver = Driver(None, "Driver Not Loaded")
    return made


def expandable() -> Computer:
    return computer(settings=AllocatorSettings(expandable_segments=True))


def other_allocator() -> Computer:
    return computer(backend="cudaMallocAsync")


def no_figures() -> Computer:
    made = computer(backend="uncached")
    made.environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    return made


def history_refused() -> Computer:
    made = computer()

    def refuse(*arguments: Any) -> None:
        raise RuntimeError("symbolizer not built\nwith many lines")

    made.torch._C._cuda_record_memory_history = refuse
    return made


def history_unknown() -> Computer:
    made = computer()
    del made.torch._C._cuda_isHistoryEnabled
    return made


APART, TOGETHER, NOTHING = "context and others apart", "their sum", "not available"

SITUATIONS: list[tuple[Callable[[], Computer], str, str]] = [
    (other_process, APART, ""),
    (other_process_that_leaves, APART, ""),
    (container_with_the_hosts_pids, TOGETHER, ""),
    (container_without_pids, TOGETHER, ""),
    (mig_instance, APART, ""),
    (mig_instance_by_name, APART, ""),
    (old_driver, APART, ""),
    (falls_off_the_bus, NOTHING, "could not be read"),
    # What the CUDA runtime says fits what the driver had said of the context.
    (driver_goes_away, APART, ""),
    (other_order, APART, ""),
    (reordered_by_variable, APART, ""),
    (wsl, TOGETHER, ""),
    (no_driver, TOGETHER, "nvidia-ml-py is not installed"),
    (no_driver_and_it_breaks, NOTHING, "could not be read"),
    (other_version, APART, ""),
    (says_less_than_the_allocator, NOTHING, ""),
    (processes_not_permitted, TOGETHER, ""),
    (two_devices, APART, ""),
    (only_the_second, APART, ""),
    (not_in_use_before, APART, ""),
    (not_in_use_and_no_driver, TOGETHER, "Driver Not Loaded"),
    (expandable, APART, ""),
    (other_allocator, APART, "cudaMallocAsync"),
    (no_figures, APART, "PYTORCH_NO_CUDA_MEMORY_CACHING"),
    (history_refused, APART, "symbolizer not built"),
    (history_unknown, APART, "_cuda_isHistoryEnabled"),
]


def check_row(row: Any) -> str:
    """Adds a row up, and says what is known of the memory outside the allocator."""
    sizes = {name: size or 0 for name, size in row.categories.items()}
    in_tensors = sum(size for name, size in sizes.items() if name not in (*OUTSIDE, "cached"))
    assert in_tensors == row.allocated
    assert in_tensors + sizes["cached"] == row.reserved
    known = {name for name in OUTSIDE if row.categories[name] is not None}
    if row.device_used is None:
        assert known == set()
        return NOTHING
    assert sum(sizes.values()) == row.device_used
    assert known in ({"context", "other_processes"}, {"context_or_others"})
    return TOGETHER if "context_or_others" in known else APART


def measure(made: Computer, monkeypatch: pytest.MonkeyPatch) -> Report:
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    recorder = Recorder(CudaMachine(made.torch, made.driver), primary=made.primary)
    recorder.start()
    kept = []
    for number, size in enumerate((30 * MIB, 3 * MIB, 700), start=1):
        for gpu in made.gpus:
            kept.append((made.torch.alloc(size, gpu), gpu))
            made.torch.free(made.torch.alloc(2 * size, gpu), gpu)
        if number == 2:
            made.later()
        recorder.checkpoint("statement", f"step {number}", f"step {number}", number)
    for address, gpu in kept:
        made.torch.free(address, gpu)
    return Report.of(build(recorder.finish()))


@pytest.mark.parametrize(("situation", "at_the_end", "words"), SITUATIONS)
def test_each_ends_in_a_report(
    situation: Callable[[], Computer], at_the_end: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = situation()
    left = made.torch.state()
    report = measure(made, monkeypatch)
    counted = made.torch.backend != "uncached"
    assert [row.kind for row in report.checkpoints] == ["before", "statement", "statement", "statement", "after"]
    for one in (report, *report.devices):
        known = [check_row(row) for row in (*one.checkpoints, one.peak)]
        assert known[-2] == at_the_end
        assert [row.allocated for row in one.checkpoints[1:4]] == (
            [30 * MIB, 33 * MIB, 33 * MIB + 1024] if counted else [0, 0, 0]
        )
        assert one.peak.peak_allocated == (90 * MIB if counted else 0)
        assert not any("add up" in note for note in one.notes)
    assert len(report.devices) == len(made.gpus) - 1
    assert any(words in note for note in report.notes) or not words
    assert not any("\n" in note or "gpumem_magic failed" in note for note in report.notes)
    assert "step 2" in str(report)
    now = made.torch.state()
    assert (now["bindings"], now["history"], now["queue"]) == (left["bindings"], None, [])


def rows_of(situation: Callable[[], Computer], monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    return list(measure(situation(), monkeypatch).checkpoints)


def test_the_other_process_is_told_from_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(other_process, monkeypatch)
    assert [row.categories["other_processes"] for row in rows] == [IDLE, IDLE, *[IDLE + 3 * GIB] * 3]
    assert {row.categories["context"] for row in rows[1:]} == {CONTEXT}


def test_the_devices_own_figures_are_shown_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    for situation in (other_order, reordered_by_variable):
        assert {row.categories["other_processes"] for row in rows_of(situation, monkeypatch)} == {IDLE}


def test_an_instance_is_not_taken_for_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for situation in (mig_instance, mig_instance_by_name):
        made = situation()
        report = measure(made, monkeypatch)
        assert report.device.smi_total_bytes == made.torch.gpus[0].total + made.nvml.driver_share


def test_before_cuda_is_in_use_a_device_has_what_the_driver_leaves_to_processes() -> None:
    """An H100's driver keeps 480 MiB for itself: nvidia-smi's total has them, and PyTorch's has not."""
    made = not_in_use_before()
    (device,) = CudaMachine(made.torch, made.driver).devices
    gpu = made.torch.gpus[0]
    assert device.facts.total_bytes == gpu.total
    assert device.facts.smi_total_bytes == gpu.total + made.nvml.driver_share


def test_what_is_lost_in_the_middle_was_there_before(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(falls_off_the_bus, monkeypatch)
    assert [row.device_used is None for row in rows] == [False, False, True, True, True]


def test_a_context_that_grows_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    made = computer()
    made.torch.alloc(MIB)
    made.later = lambda: setattr(made.torch.gpus[0], "context", CONTEXT + 96 * MIB)
    report = measure(made, monkeypatch)
    assert [row.categories["context"] for row in report.checkpoints] == [CONTEXT, CONTEXT, *[CONTEXT + 96 * MIB] * 3]
    assert any("context grew by 96.0 MiB in `step 2`" in note for note in report.notes)
