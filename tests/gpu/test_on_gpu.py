"""On a real GPU: every row against `torch.cuda.memory_stats` and NVML, what measuring costs, and that it leaves nothing.

``python -m pytest tests/gpu -s`` prints the figures. No time is asserted.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from measured import Measured, ask, machine, measure
from programs import HIDES_ITS_GRAPH, PROGRAMS, Training
from torch.nn.modules import module as nn_module
from torch.optim import optimizer as nn_optimizer

import gpumem_magic
from gpumem_magic.recording.recorder import Recorder
from gpumem_magic.report.build import build
from gpumem_magic.units import GIB, MIB, human

HERE = Path(__file__).parent
OUTSIDE = ("context", "other_processes", "context_or_others")
# Another process, or a library that loads a kernel between two questions.
DRIVER_NOISE = 96 * MIB


def statement_rows(measured: Measured) -> list[Any]:
    """With all rows: folded iterations are built again from the recording."""
    from gpumem_magic.attribution.view import DeviceView
    from gpumem_magic.report.build import _Builder, _positions
    from gpumem_magic.report.drafts import RowDrafts

    view = DeviceView(measured.recording, measured.recording.primary)
    builder = _Builder(view, measured.recording.checkpoints, 0)
    drafts = RowDrafts(view, measured.recording.checkpoints).drafts()
    builder._balances = view.ledger.at(_positions(drafts))
    return [builder._row(draft, with_parts=False) for draft in drafts if draft.point.kind == "statement"]


def check_row(row: Any) -> None:
    sizes = {name: size or 0 for name, size in row.categories.items()}
    in_tensors = sum(size for name, size in sizes.items() if name not in (*OUTSIDE, "cached"))
    assert in_tensors == row.allocated
    assert in_tensors + sizes["cached"] == row.reserved
    if row.device_used is not None:
        assert sum(sizes.values()) == row.device_used


def check_identity(name: str, row: Any, held: Any) -> None:
    """What the program's own objects hold is what the report says; what its graph keeps, by lifetime, is activations."""
    for category in ("parameters", "buffers", "gradients", "optimizer_state"):
        assert row.categories[category] == getattr(held, category), (row.label, row.iteration, category)
    if row.line == 5 and name not in HIDES_ITS_GRAPH:
        # Beside the graph: the loss, and the random numbers' state of kernels that drop out.
        kept = row.categories["activations"] + row.categories["autocast_copies"]
        assert held.graph <= kept + MIB
        assert kept <= 1.05 * held.graph + MIB


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_row_is_what_pytorch_and_the_driver_say(name: str) -> None:
    torch.cuda.init()
    torch.cuda.reset_peak_memory_stats()
    measured = measure(name, 3)
    report, rows = measured.report, statement_rows(measured)
    assert not any("add up" in note or "gpumem_magic failed" in note for note in report.notes), report.notes
    assert len(rows) == len(measured.told)
    highest = 0
    for row, told in zip(rows, measured.told, strict=True):
        check_row(row)
        assert (row.allocated, row.reserved) == (told.allocated, told.reserved)
        highest = max(highest, row.peak_allocated)
        assert highest == told.highest
        if row.device_used is not None:
            assert abs(row.device_used - told.used) <= DRIVER_NOISE
        if told.own and row.categories["context"] is not None:
            assert abs(row.categories["context"] - (told.own - told.reserved)) <= DRIVER_NOISE
    assert report.peak.peak_allocated == measured.told[-1].highest
    by_line = {(row.line, row.iteration): row.categories for row in rows}
    parameters = by_line[2, ()]["parameters"]
    for row, held in zip(rows, measured.held, strict=True):
        check_identity(name, row, held)
    assert by_line[6, (3,)]["gradients"] == parameters > 0
    assert by_line[7, (3,)]["optimizer_state"] >= 2 * parameters
    assert by_line[5, (3,)]["activations"] > 0
    assert by_line[4, (3,)]["inputs"] > 0
    worst = max((row.categories["unknown"] or 0) / max(row.allocated, 1) for row in rows)
    print(
        f"\n{name}: peak {human(report.peak.peak_allocated)} in {report.peak.where}; parameters {human(parameters)}; "
        f"unknown at most {worst:.2%} of a row; context {rows[-1].categories['context']}; notes {list(report.notes)}"
    )
    assert worst <= 0.05


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_measuring_costs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    def run(recorder: Recorder | None) -> float:
        torch.manual_seed(0)
        training = Training(name)
        statements = training.statements(training.iterations)
        for _, _, _, call in statements[:6]:
            call()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for words, line, iteration, call in statements[6:]:
            call()
            if recorder is not None:
                recorder.checkpoint("statement", words, words, line, iteration, (3,))
        torch.cuda.synchronize()
        return time.perf_counter() - began

    plain = min(run(None) for _ in range(2))
    recorder = Recorder(machine())
    recorder.start({})
    watched = run(recorder)
    began = time.perf_counter()
    recording = recorder.finish(namespace={})
    report = build(recording)
    after = time.perf_counter() - began
    events = len(recording.logs[recording.primary].events)
    with capsys.disabled():
        print(
            f"\n{name}: {plain:.3f} s plain, {watched:.3f} s measured, ratio {watched / plain:.3f}; "
            f"{events:,} events, report after {after:.2f} s, own work {report.overhead_seconds:.3f} s"
        )
    assert events > 0


def state() -> list[Any]:
    """Whatever a recording could leave behind."""
    return [
        torch._C._cuda_isHistoryEnabled(),
        torch.autograd._engine_run_backward,
        torch.autograd.graph._engine_run_backward,
        torch.cuda.CUDAGraph.replay,
        torch._C._cuda_record_memory_history,
        torch._C._cuda_resetAccumulatedMemoryStats,
        *(
            dict(table)
            for owner in (nn_module, nn_optimizer)
            for name, table in sorted(vars(owner).items())
            if name.startswith("_global_") and isinstance(table, dict)
        ),
        torch.random.get_rng_state().tolist(),
        torch.cuda.get_rng_state().tolist(),
        torch.cuda.memory_allocated(),
    ]


class Stop(BaseException):
    """As Ctrl-C, but nobody else's."""


@pytest.mark.parametrize("ending", [None, ValueError("mine"), Stop(), KeyboardInterrupt()], ids=repr)
def test_nothing_is_left_behind(ending: BaseException | None) -> None:
    torch.cuda.init()
    kept = torch.ones(MIB, device="cuda")
    peak = torch.ones(64 * MIB, device="cuda")
    del peak
    before, highest = state(), torch.cuda.max_memory_allocated()
    caught = None
    try:
        with gpumem_magic.measure(device="cuda") as measured:
            passing = torch.ones(MIB, device="cuda") * 2
            del passing
            if ending is not None:
                raise ending
    except BaseException as error:
        caught = error
    assert caught is ending
    assert state() == before
    assert torch.cuda.max_memory_allocated() == highest
    assert measured.report.device.kind == "cuda"
    for row in measured.report.checkpoints:
        check_row(row)
    assert measured.report.peak.peak_allocated >= torch.cuda.memory_allocated() + 4 * MIB
    del kept


def test_a_users_own_history_goes_on() -> None:
    torch.cuda.memory._record_memory_history(max_entries=5000)
    try:
        before = torch.ones(MIB, device="cuda")
        with gpumem_magic.measure(device="cuda") as measured:
            inside = torch.ones(MIB, device="cuda")
        after = torch.ones(MIB, device="cuda")
        assert torch._C._cuda_isHistoryEnabled()
        trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        allocations = [event for event in trace if event["action"] == "alloc"]
        assert len(allocations) >= 3
        assert allocations[-1]["frames"]
        rows = measured.report.checkpoints
        assert rows[-1].allocated - rows[0].allocated == 4 * MIB
        del before, inside, after
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def test_out_of_memory_is_raised_once_and_placed() -> None:
    size = torch.cuda.mem_get_info()[1] + GIB
    with pytest.raises(torch.OutOfMemoryError), gpumem_magic.measure(device="cuda") as measured:
        torch.empty(size, dtype=torch.uint8, device="cuda")
    error = measured.report.error
    assert error is not None
    assert error.type.rpartition(".")[2] == "OutOfMemoryError"
    assert error.requested == size
    assert [row.kind for row in measured.report.checkpoints] == ["before", "error", "after"]


def test_a_ring_that_overflows_leaves_totals_and_the_peak() -> None:
    torch.cuda.init()
    torch.cuda.reset_peak_memory_stats()
    measured = measure("linear", 30, ring=100)
    for row, told in zip(statement_rows(measured), measured.told, strict=True):
        check_row(row)
        assert (row.allocated, row.reserved) == (told.allocated, told.reserved)
    assert measured.report.peak.peak_allocated == measured.told[-1].highest
    assert any("were dropped" in note for note in measured.report.notes)


def test_streams_and_graphs() -> None:
    side = torch.cuda.Stream()
    static = torch.ones(MIB, device="cuda")
    with gpumem_magic.measure(device="cuda") as measured:
        with torch.cuda.stream(side):
            other = static * 2
        other.record_stream(torch.cuda.current_stream())
        del other
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = static * 3
        graph.replay()
        torch.cuda.synchronize()
    for row in measured.report.checkpoints:
        check_row(row)
    assert not any("add up" in note for note in measured.report.notes), measured.report.notes
    assert any("CUDA graphs ran (1 capture, 1 replay)" in note for note in measured.report.notes)
    del captured, graph


def test_a_users_reset_of_the_peak_is_theirs_and_the_reports_peak_stays() -> None:
    # What earlier tests left in cycles would go when it suits the collector.
    gc.collect()
    base = torch.cuda.memory_allocated()
    with gpumem_magic.measure(device="cuda") as measured:
        large = torch.ones(16 * MIB, device="cuda")
        del large
        torch.cuda.reset_peak_memory_stats()
        small = torch.ones(MIB, device="cuda")
    assert torch.cuda.max_memory_allocated() == base + 4 * MIB
    assert measured.report.peak.peak_allocated == base + 64 * MIB
    del small


def test_a_cell_that_runs_out_and_one_that_works_afterwards() -> None:
    pytest.importorskip("IPython")
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()
    shell.run_line_magic("load_ext", "gpumem_magic")
    size = torch.cuda.mem_get_info()[1] + GIB
    shell.user_ns["size"] = size
    failed = shell.run_cell(
        "%%gpumem --quiet\nimport torch\nkept = torch.ones(1 << 20, device='cuda')\n"
        "for turn in range(3):\n    torch.empty(size * turn, dtype=torch.uint8, device='cuda')\n"
    )
    assert isinstance(failed.error_in_exec, torch.OutOfMemoryError)
    report = gpumem_magic.last_report()
    assert report is not None
    assert report.error is not None
    assert (report.error.line, report.error.requested) == (5, size)
    error_row = next(row for row in report.checkpoints if row.kind == "error")
    assert error_row.iteration == (2,)
    for row in report.checkpoints:
        check_row(row)
    works = shell.run_cell("%%gpumem --quiet\nmore = kept * 2\nmore.shape[0]")
    works.raise_error()
    report = gpumem_magic.last_report()
    assert report is not None
    assert report.error is None
    assert [row.line for row in report.checkpoints if row.kind == "statement"] == [2, 3]
    assert report.checkpoints[-1].allocated - report.checkpoints[0].allocated == 4 * MIB
    assert report.checkpoints[-1].allocated == torch.cuda.memory_allocated()


def test_several_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with gpumem_magic.measure() as measured:
        one = torch.ones(MIB, device="cuda:0")
        two = one.to("cuda:1")
    assert [other.device.index for other in measured.report.devices] == [1]
    assert measured.report.devices[0].checkpoints[-1].allocated >= 4 * MIB
    del one, two


@pytest.mark.real("a process that has not used CUDA yet has no stand-in")
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, ""),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, ""),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, "cudaMallocAsync"),
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "PYTORCH_NO_CUDA_MEMORY_CACHING"),
    ],
    ids=["plain", "expandable", "async", "uncached"],
)
def test_a_fresh_process_where_cuda_is_not_in_use_before(settings: dict[str, str], words: str) -> None:
    import os

    done = subprocess.run(
        [sys.executable, str(HERE / "fresh_process.py")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(gpumem_magic.__file__).parents[1]), **settings},
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    print(f"\n{settings}: {said['rows']} {said['notes']}")
    assert said["in_use_before"] is False
    assert said["history_after"] is False
    assert words in " ".join(said["notes"])
    assert not any("add up" in note or "gpumem_magic failed" in note for note in said["notes"])
    first, last = said["rows"][0], said["rows"][-1]
    assert first["allocated"] == 0
    if "NO_CUDA" not in words:
        assert (last["allocated"], last["reserved"]) == (said["allocated"], said["reserved"])
        assert said["peak"] == said["highest"]
    for row in said["rows"]:
        if row["device_used"] is not None:
            assert row["device_used"] == row["reserved"] + sum(row[name] or 0 for name in OUTSIDE)


@pytest.mark.real("it would be compared with itself")
@pytest.mark.parametrize("name", ["linear_sgd", "oom_growing_list"])
def test_the_virtual_gpu_agrees(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`python benchmarks/truth --device cuda --save DIR` does this for twenty programs, and keeps what it finds."""
    sys.path.append(str(HERE.parents[1] / "benchmarks"))
    from truth import comparing, measuring, saved

    real = measuring.in_new_process(name, "cuda")
    device = saved.virtual_name(real)
    compared = comparing.compare(real, measuring.in_new_process(name, device), device)
    with capsys.disabled():
        print(f"\n{comparing.in_a_line(compared)}")
    assert abs(compared.errors["peak allocated"]) <= 0.05
    assert compared.same_failure


def test_reading_a_moment_is_cheap(capsys: pytest.CaptureFixture[str]) -> None:
    device = machine().devices[torch.cuda.current_device()]
    kept = torch.ones(1, device="cuda")
    log = device.start_log()
    began = time.perf_counter()
    for _ in range(1000):
        log.position()
        device.counters()
    spent = (time.perf_counter() - began) / 1000
    log.stop()
    with capsys.disabled():
        print(f"\na moment costs {spent * 1e6:.0f} microseconds; now {ask()}")
    assert kept.numel() == 1
