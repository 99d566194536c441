"""The real device's road on recordings of real GPUs: rows and peaks worked out from the trace are the counters'.

A recorded trace happens again behind a `torch.cuda` for tests, whose counters are those of an allocator that makes the same
decisions. The recordings lie beside the project, not in it; without them these tests are skipped.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from cuda_fakes import FakeNvml, FakeTorch, RecordedGpu

from gpumem_magic.devices.cuda import CudaMachine
from gpumem_magic.devices.driver import Driver
from gpumem_magic.recording.recorder import Recorder
from gpumem_magic.report.build import build
from gpumem_magic.report.model import ReportData, Row
from gpumem_magic.snapshot import files
from gpumem_magic.units import MIB

RECORDINGS = Path(__file__).parents[1].parent / "shared" / "data" / "snapshots"
NAMES = [
    "small-97-events",
    "transformer-forward-b150",
    "transformer-forward-backward-b100",
    "transformer-medium-128-inference",
    "transformer-full-step",
    "transformer-xl-forward-expandable",
]


class Playback:
    """A recording that happens again, measured. first: where in it the measuring begins, 0 to 1. counters[i]: PyTorch's at row i.

    part_kept: how much of it the allocator's history may hold.
    """

    def __init__(self, name: str, first: float, rows: int, part_kept: float = 2) -> None:
        path = RECORDINGS / f"{name}.pickle.gz"
        if not path.exists():
            pytest.skip(f"needs the recording {path.name}, which lies in shared/data/snapshots beside the project")
        snapshot = files.read(path).snapshot
        (device,) = (index for index, trace in enumerate(snapshot.device_traces) if trace)
        self.torch = FakeTorch()
        self.gpu = RecordedGpu(self.torch, snapshot, device)
        self.gpu.others = 700 * MIB
        # Where a request has just been met, whatever it took.
        quiet = [index + 1 for index, event in enumerate(self.gpu.events) if event.action == "alloc"]
        begin = quiet[int(first * (len(quiet) - 1))] if first else 0
        after = [moment for moment in quiet if moment > begin]
        self.moments = [*(after[len(after) * row // rows] for row in range(rows)), len(self.gpu.events)]
        self.gpu.play_to(begin)
        self.begin = begin
        self.machine = CudaMachine(self.torch, Driver(FakeNvml(self.torch)), int(part_kept * len(self.gpu.events)))
        self.before = self.torch.state()
        self.counters = [self.machine.devices[0].counters()]

    def measure(self) -> ReportData:
        recorder = Recorder(self.machine)
        recorder.start()
        for number, moment in enumerate(self.moments):
            self.gpu.play_to(moment)
            self.counters.append(self.machine.devices[0].counters())
            recorder.checkpoint("statement", f"statement {number}", f"statement {number}", number + 1)
        self.recording = recorder.finish()
        return build(self.recording)


def check_row(row: Row, own: int) -> None:
    """own: the context, which is the same all the time."""
    sizes = {name: size or 0 for name, size in row.categories.items()}
    outside = sizes["context"] + sizes["other_processes"] + sizes["context_or_others"]
    in_tensors = sum(sizes.values()) - outside - sizes["cached"]
    assert in_tensors == row.allocated
    assert in_tensors + sizes["cached"] == row.reserved
    assert sum(sizes.values()) == row.device_used
    assert row.categories["context"] == own


@pytest.mark.parametrize("first", [0, 0.4])
@pytest.mark.parametrize("name", NAMES)
def test_rows_and_peaks_are_the_counters_of_the_recording(name: str, first: float) -> None:
    played = Playback(name, first, rows=3)
    report = played.measure()
    assert not any("add up" in note or "history" in note for note in report.notes), report.notes
    rows = [row for row in report.checkpoints if row.kind in ("before", "statement")]
    assert len(rows) == len(played.counters) == 5
    highest = rows[0].allocated
    for row, told in zip(rows, played.counters, strict=True):
        assert (row.allocated, row.reserved, row.device_used) == (told.allocated, told.reserved, told.device_used)
        check_row(row, played.gpu.context)
        highest = max(highest, row.peak_allocated)
        if first == 0:
            # The counters' peak is since the recorded trace began, which is where this report begins.
            assert highest == told.peak_allocated
    assert report.peak.peak_allocated == report.peak.allocated == highest
    assert played.torch.state()["bindings"] == played.before["bindings"]
    assert played.torch.history is None


@pytest.mark.parametrize("name", ["transformer-full-step", "transformer-forward-b150"])
def test_rows_whose_events_the_ring_dropped_are_the_counters_as_well(name: str) -> None:
    played = Playback(name, 0, rows=8, part_kept=0.1)
    report = played.measure()
    rows = [row for row in report.checkpoints if row.kind in ("before", "statement")]
    for row, told in zip(rows, played.counters, strict=True):
        assert (row.allocated, row.reserved) == (told.allocated, told.reserved)
        check_row(row, played.gpu.context)
    assert any("were dropped" in note for note in report.notes)
    assert report.peak.peak_allocated == played.counters[-1].peak_allocated


@pytest.mark.parametrize("name", ["transformer-full-step", "transformer-2.7b-train-bf16"])
def test_the_log_is_the_trace_and_ends_in_the_recorded_segments(name: str) -> None:
    played = Playback(name, 0.5, rows=1)
    played.measure()
    log = played.recording.logs[0]
    told = [event[:4] for event in played.gpu.events[played.begin :]]
    assert [event[:4] for event in log.events] == told
    assert played.counters[-1].reserved == sum(segment.total_size for segment in played.gpu.final)
    assert played.counters[-1].allocated == sum(segment.allocated_size for segment in played.gpu.final)
