"""A measured cell's recording as a file: the same report and the same ledger again, and PyTorch's own tools open it."""

from __future__ import annotations

import pickle
import pickletools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gpumem_magic
from gpumem_magic.attribution.view import DeviceView
from gpumem_magic.files.extra import labels_to_save, saved_labels
from gpumem_magic.files.loaded import views_of
from gpumem_magic.snapshot.files import read
from gpumem_magic.user_report import Report
from gpumem_magic.virtual import gpu


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    yield
    gpu.turn_off()


def train(device: str, steps: int = 2, width: int = 256) -> list[Any]:
    model = torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.ReLU(), torch.nn.Linear(4 * width, width))
    model = model.to(device)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(64, width, device=device)).pow(2).mean().backward()
        optimizer.step()
    return [model, optimizer]


def measured(device: str = "T4") -> Report:
    """A first block, which leaves memory in use and cached; and the second's report, whose recording begins in the middle."""
    with gpumem_magic.measure(device=device):
        kept = train("cuda")
        scratch = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in (3 << 20, 700, 25 << 20, 1 << 20)]
        del scratch[::2]
    with gpumem_magic.measure() as measurement:
        more = train("cuda", width=300)
        del scratch
    assert kept
    assert more
    return measurement.report


def same_ledger(live: DeviceView, filed: DeviceView) -> None:
    end = len(live.timeline)
    assert len(filed.timeline) == end
    assert filed.timeline.allocations == live.timeline.allocations
    assert tuple(filed.labels) == tuple(live.labels)
    for position in range(end + 1):
        assert filed.timeline.allocated_at(position) == live.timeline.allocated_at(position)
        assert filed.timeline.reserved_at(position) == live.timeline.reserved_at(position)


def test_loaded_again_it_is_the_same_report_and_ledger(tmp_path: Path) -> None:
    report = measured()
    path = tmp_path / "cell.pickle"
    report.save_snapshot(path)
    again = gpumem_magic.load(path)
    assert again == report
    data = again.to_dict()
    contents = data.pop("contents")
    assert data == report.to_dict()
    assert sum(group["bytes"] for group in contents["allocations"]) == report.peak.allocated
    (filed,) = views_of(read(path))
    assert report.recording is not None
    live = DeviceView(report.recording, 0)
    assert live.log.start, "the recording begins in the middle"
    same_ledger(live, filed)
    assert filed.sizes(filed.peak[1])["optimizer_state"] == report.peak.categories["optimizer_state"] > 0
    at_peak = filed.timeline.live_at(filed.peak[1])
    assert {filed.labels[one.index].name for one in at_peak} >= {"0.weight", "2.weight"}
    assert list(filed.timeline.live_at(0)) != []


def test_several_devices(tmp_path: Path) -> None:
    with gpumem_magic.measure(device="2xT4") as measurement:
        kept = [train("cuda:0"), train("cuda:1", width=128)]
    report = measurement.report
    path = tmp_path / "two.pickle"
    report.save_snapshot(path)
    again = gpumem_magic.load(path)
    assert again == report
    assert [one.device.index for one in again.devices] == [1]
    for view in views_of(read(path)):
        same_ledger(DeviceView(report.recording, view.device), view)
    names = [source.name for source in report.timeline().sources]
    assert len(names) == 2
    assert "cuda:1" in names[1]
    assert [source.name for source in again.timeline().sources] == ["GPU 0", "GPU 1"]
    assert [source.name for source in again.devices[0].timeline().sources] == ["GPU 1"]
    assert kept


def test_a_file_written_from_a_file_holds_the_same(tmp_path: Path) -> None:
    first, second = tmp_path / "first.pickle", tmp_path / "second.pickle"
    measured().save_snapshot(first)
    gpumem_magic.load(first).save_snapshot(second)
    assert pickle.loads(second.read_bytes()) == pickle.loads(first.read_bytes())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cell.pickle"
    measured().save_snapshot(path)
    return path


def test_it_is_plain_data_of_protocol_4(file: Path) -> None:
    content = file.read_bytes()
    operations = [operation.name for operation, _, _ in pickletools.genops(content)]
    assert not {"GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "NEWOBJ"} & set(operations)
    assert content[:2] == b"\x80\x04"


def test_pytorchs_own_functions_read_it(file: Path) -> None:
    from torch.cuda import _memory_viz

    data = pickle.loads(file.read_bytes())
    report = gpumem_magic.load(file)
    assert "base64" in _memory_viz.trace_plot(data)
    assert "base64" in _memory_viz.segment_plot(data)
    assert _memory_viz.trace(data).count(" = ") >= 10
    reserved = sum(segment["total_size"] for segment in data["segments"])
    assert reserved == report.checkpoints[-1].reserved
    text = _memory_viz.segsum(data)
    assert f"segments: {len(data['segments'])}" in text
    assert f"total_reserved: {_memory_viz.Bytes(reserved)}" in text
    assert f"total_allocated: {_memory_viz.Bytes(report.checkpoints[-1].allocated)}" in text
    assert _memory_viz.memory(data, str)


def test_pytorchs_own_command_opens_it(file: Path, tmp_path: Path) -> None:
    for command in ("trace_plot", "segment_plot"):
        target = tmp_path / f"{command}.html"
        done = subprocess.run(
            [sys.executable, "-m", "torch.cuda._memory_viz", command, str(file), "-o", str(target)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        # And the page that it made is one of the forms that are read.
        assert gpumem_magic.load(target) == gpumem_magic.load(file)


def test_a_redacted_copy_has_no_names(file: Path, tmp_path: Path) -> None:
    from gpumem_magic import cli

    target = tmp_path / "copy.pickle"
    assert cli.main(["show", str(file), "--redact", str(target)]) == 0
    assert b"0.weight" in file.read_bytes()
    assert b"weight" not in target.read_bytes()
    assert b"train" not in target.read_bytes()


@pytest.mark.parametrize(
    "damaged",
    [
        None,
        [],
        {"0": 3},
        {"0": {"born": [], "before": 7}},
        {"0": {"born": [[1, 2]], "before": []}},
        {"0": {"born": [[0, "no category", "stack", None]], "before": []}},
        {"0": {"born": [["0", "inputs", "stack", None]], "before": []}},
        {"0": {"born": [[0, "inputs", "stack", 5]], "before": []}},
        {"0": {"born": [[0, ["inputs"], "stack", None]], "before": []}},
    ],
)
def test_damaged_labels_are_left_out(file: Path, damaged: Any) -> None:
    (view,) = views_of(read(file))
    assert saved_labels(damaged, 0) is None
    whole = {"0": labels_to_save(view.timeline, view.labels)}
    found = saved_labels(whole, 0)
    assert found is not None
    assert found.of(view.timeline.allocations) == tuple(view.labels)
    assert saved_labels(whole, 1) is None
