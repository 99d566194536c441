"""PyTorch's underscored functions, as 2.9 to 2.13 have them, and a PyTorch in which one of them is gone or has other fields."""

from __future__ import annotations

import inspect
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda_fakes import FakeNvml, FakeTorch

from gpumem_magic.devices import torch_memory
from gpumem_magic.devices.cuda import CudaMachine
from gpumem_magic.devices.driver import Driver
from gpumem_magic.recording.recorder import Recorder
from gpumem_magic.report.build import build
from gpumem_magic.report.model import ReportData
from gpumem_magic.units import MIB
from gpumem_magic.virtual import gpu


def report_on(fake: FakeTorch) -> ReportData:
    """What a user gets from a cell that makes one tensor of 4 MiB."""
    recorder = Recorder(CudaMachine(fake, Driver(FakeNvml(fake))))
    recorder.start()
    fake.alloc(4 * MIB)
    recorder.checkpoint("statement", "x = ...", "x = ...", 2)
    return build(recorder.finish())


def test_the_one_that_is_installed_takes_what_is_asked() -> None:
    # (While a virtual GPU is on, as an earlier test may have left one, a CPU build says a version of CUDA, too.)
    gpu.turn_off()
    # Only a build with CUDA has what lies below; the Python of it is there on every one.
    taken = inspect.signature(torch.cuda.memory._record_memory_history).parameters
    assert {"enabled", "context", "stacks", "max_entries"} <= set(taken)
    if torch.version.cuda is not None:
        torch_memory.check_history(torch)
    else:
        with pytest.raises(RuntimeError, match=rf"^torch {re.escape(torch.__version__)} has no _cuda_record"):
            torch_memory.check_history(torch)


def of_2_9(
    enabled: Any = "all", context: Any = "all", stacks: str = "all", max_entries: int = 1, device: Any = None
) -> None:
    """The signature, as it was before `skip_actions`."""


def of_2_13(
    enabled: Any = "all", context: Any = "all", stacks: str = "all", max_entries: int = 1, device: Any = None,
    clear_history: bool = False, compile_context: bool = False, global_record_annotations: bool = False,
    skip_actions: Any = None,
) -> None:  # fmt: skip
    """And as it is with it."""


def of_anything(enabled: Any = "all", *arguments: Any, **options: Any) -> None:
    """What passes everything on."""


@pytest.mark.parametrize("record", [of_2_9, of_2_13, of_anything])
def test_what_these_versions_have_is_enough(record: Any) -> None:
    fake = FakeTorch()
    fake.cuda.memory._record_memory_history = record
    torch_memory.check_history(fake)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda fake: setattr(fake.cuda.memory, "_record_memory_history", None), "has no _record_memory_history"),
        (
            lambda fake: setattr(fake.cuda.memory, "_record_memory_history", lambda enabled=None, context=None: None),
            "has no stacks and no max_entries=",
        ),
    ],
)
def test_without_it_the_report_has_totals_and_says_what_is_missing(change: Any, words: str) -> None:
    fake = FakeTorch()
    change(fake)
    with pytest.raises(RuntimeError, match=words):
        torch_memory.check_history(fake)
    report = report_on(fake)
    assert any(words in note and "rows show totals" in note for note in report.notes), report.notes
    assert report.checkpoints[1].allocated == 4 * MIB


@pytest.mark.parametrize(
    ("lose", "words"),
    [
        (lambda data: data.pop("device_traces"), "a snapshot of torch .* has no 'device_traces'"),
        (lambda data: data["segments"][0].pop("total_size"), "a segment of torch .* has no 'total_size'"),
        (lambda data: data["device_traces"][0][-1].pop("addr"), "an event of torch .* has no 'addr'"),
    ],
)
def test_other_fields_are_told_and_the_totals_stay(lose: Any, words: str) -> None:
    fake = FakeTorch()
    before = fake.cuda.memory._snapshot

    def snapshot() -> dict[str, Any]:
        data = before()
        if any(data["device_traces"]):
            lose(data)
        return data

    fake.cuda.memory._snapshot = snapshot
    report = report_on(fake)
    (note,) = [note for note in report.notes if "could not be read" in note]
    assert re.search(words, note)
    assert report.checkpoints[1].allocated == 4 * MIB


def test_gpus_are_counted_below_torch_cuda() -> None:
    def torch_with(**names: object) -> Any:
        return SimpleNamespace(_C=SimpleNamespace(**names))

    def no_driver() -> int:
        raise RuntimeError("the driver does not answer")

    assert torch_memory.count_below(torch_with(_cuda_getDeviceCount=lambda: 2)) == 2
    assert torch_memory.count_below(torch_with(_cuda_getDeviceCount=no_driver)) == 0
    assert torch_memory.count_below(torch_with()) == 0
