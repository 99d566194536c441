"""Cells and blocks on real GPUs, through the magics and `measure`, on a `torch.cuda` for tests; and what they leave behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda_fakes import CONTEXT, FakeNvml, FakeTorch
from IPython.utils.capture import capture_output
from shell_fakes import clean_shell, show_text_alone
from test_phases import state_of_torch

import gpumem_magic
from gpumem_magic.devices import machines, unsupported
from gpumem_magic.devices.base import DeviceError
from gpumem_magic.devices.cuda import CudaMachine
from gpumem_magic.devices.driver import Driver
from gpumem_magic.notebook.devices import memory_text
from gpumem_magic.recording import under_way
from gpumem_magic.session import device
from gpumem_magic.trials import cards
from gpumem_magic.units import GIB, MIB
from gpumem_magic.user_report import Report
from gpumem_magic.virtual import gpu as virtual_gpu


class Computer:
    def __init__(self, count: int) -> None:
        self.torch = FakeTorch(count)
        self.nvml = FakeNvml(self.torch)
        self.machine = CudaMachine(self.torch, Driver(self.nvml))


@pytest.fixture
def computer(monkeypatch: pytest.MonkeyPatch) -> Computer:
    made = Computer(2)
    monkeypatch.setattr(machines, "gpus", lambda _: made.machine)
    monkeypatch.setattr(device, "_chosen_gpu", None)
    return made


@pytest.fixture
def shell(computer: Computer) -> Iterator[Any]:
    with clean_shell() as shell:
        shell.run_line_magic("load_ext", "gpumem_magic")
        show_text_alone(shell)
        shell.user_ns.update(gpu=computer.torch, torch=torch, MIB=MIB)
        yield shell
        shell.run_line_magic("unload_ext", "gpumem_magic")


def run(shell: Any, cell: str) -> tuple[Any, str]:
    with capture_output(display=False) as captured:
        result = shell.run_cell(cell, store_history=True)
    return result, captured.stdout + captured.stderr


def last() -> Report:
    report = gpumem_magic.last_report()
    assert report is not None
    return report


def everything(computer: Computer, shell: Any) -> dict[str, Any]:
    """Whatever a recording could leave behind."""
    return {
        "torch": state_of_torch(),
        "gpu": computer.torch.state(),
        "peaks": [one.allocator.peak_allocated for one in computer.torch.gpus],
        "environment": dict(os.environ),
        "threads": threading.enumerate(),
        "interrupt": signal.getsignal(signal.SIGINT),
        "tracing": (sys.gettrace(), sys.getprofile(), sys.excepthook, sys.displayhook),
        "transformers": [len(shell.ast_transformers), len(shell.input_transformers_post)],
        "callbacks": {name: list(found) for name, found in shell.events.callbacks.items()},
        "random": torch.random.get_rng_state().tolist(),
    }


# ---- choosing


def test_a_bare_cell_measures_the_gpu_that_is_there(shell: Any) -> None:
    result, out = run(shell, "%%gpumem\na = gpu.alloc(30 * MIB)\ngpu.free(a)\n")
    assert result.success, out
    report = last()
    assert (report.device.kind, report.device.index, report.device.name) == ("cuda", 0, "NVIDIA Fake")
    assert [row.allocated for row in report.checkpoints] == [0, 30 * MIB, 0, 0]
    assert report.checkpoints[1].categories["context"] == CONTEXT
    assert virtual_gpu.current() is None
    assert not any("virtual" in note for note in report.notes)


def test_the_device_that_the_cell_used_is_the_report_s(shell: Any) -> None:
    run(shell, "%%gpumem\na = gpu.alloc(30 * MIB, gpu=1)\n")
    assert (last().device.index, last().devices) == (1, ())
    run(shell, "%%gpumem\na = gpu.alloc(30 * MIB)\n")
    assert last().device.index == 0
    assert [other.device.index for other in last().devices] == [1]
    assert [row.allocated for row in last().devices[0].checkpoints] == [30 * MIB] * 3


@pytest.mark.parametrize("flag", ["cuda:1", "cuda", "cuda:0"])
def test_the_flag_chooses_for_one_cell(shell: Any, flag: str) -> None:
    run(shell, f"%%gpumem --device {flag}\na = gpu.alloc(MIB)\n")
    assert last().device.index == (1 if flag == "cuda:1" else 0)
    run(shell, "%%gpumem\na = gpu.alloc(MIB)\n")
    assert last().device.index == 0


def test_the_magic_chooses_for_all_that_follow(shell: Any) -> None:
    _, out = run(shell, "%gpumem_device cuda:1")
    assert "cuda:1 (NVIDIA Fake, 16.0 GiB) is measured from now on: a real GPU." in out
    run(shell, "%%gpumem\na = gpu.alloc(MIB)\n")
    assert last().device.index == 1
    _, out = run(shell, "%gpumem_device")
    assert "cuda:1 (NVIDIA Fake, 16.0 GiB)  (chosen)" in out
    _, out = run(shell, "%gpumem_device off")
    assert "no longer chosen" in out
    run(shell, "%%gpumem\na = gpu.alloc(MIB)\n")
    assert last().device.index == 0


def test_measure_takes_a_device(computer: Computer) -> None:
    with gpumem_magic.measure(device="cuda:1") as measured:
        computer.torch.alloc(5 * MIB, gpu=1)
    assert measured.report.device.index == 1
    assert measured.report.checkpoints[-1].allocated == 5 * MIB
    with pytest.raises(DeviceError, match="there are 2 devices here"), gpumem_magic.measure(device="cuda:2"):
        pass


def test_the_gpus_are_found_once_and_again_where_others_became_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "_gpus", None)
    fake = FakeTorch(2, initialized=False)
    first = machines.gpus(fake)
    assert first is not None
    assert first is machines.gpus(fake)
    del fake.gpus[1]
    second = machines.gpus(fake)
    assert second is not None
    assert [len(first.devices), len(second.devices)] == [2, 1]
    fake.cuda.is_available = lambda: False
    assert machines.gpus(fake) is None
    assert "PYTORCH_NVML_BASED_CUDA_CHECK" not in os.environ
    assert "get_device_properties" not in fake.calls


def test_the_state_of_the_devices(shell: Any, computer: Computer) -> None:
    computer.torch.alloc(30 * MIB)
    computer.torch.gpus[0].others = GIB
    _, out = run(shell, "%gpumem")
    lines = out.splitlines()
    assert lines[0].startswith(
        "cuda:0  NVIDIA Fake  allocated 30.0 MiB  reserved 30.0 MiB  nvidia-smi 1477MiB / 16634MiB"
    )
    assert [line.split()[:2] for line in lines[1:3]] == [["process", "1"], ["process", str(os.getpid())]]
    assert lines[2].endswith("(this one)")
    _, out = run(shell, "%gpumem_smi")
    assert out.split("\n")[:2] == ["1477MiB / 16634MiB", "3MiB / 16634MiB"]
    computer.nvml.absurd = True
    assert "not available" in run(shell, "%gpumem")[1]


def test_wrong_names_are_one_line(shell: Any) -> None:
    for cell in ("%gpumem_device cuda:7", "%%gpumem --device cuda:7\nx = 1\n"):
        result, out = run(shell, cell)
        assert not result.success
        assert "cuda:7: there are 2 devices here, from cuda:0" in out
        assert "Traceback" not in out


# ---- without a GPU


def test_a_real_device_is_refused_where_there_is_none_and_the_virtual_one_stays() -> None:
    device.choose("T4")
    before = virtual_gpu.current()
    try:
        with pytest.raises(DeviceError, match="cuda: this computer has no CUDA GPU"):
            device.choose("cuda")
        assert virtual_gpu.current() is before is not None
    finally:
        device.off()
    with pytest.raises(DeviceError, match=r"cuda:0: .*no CUDA GPU"), gpumem_magic.measure(device="cuda:0"):
        pass


def test_while_virtual_devices_are_on_their_numbers_are_meant() -> None:
    device.choose("2xT4")
    try:
        with gpumem_magic.measure(device="cuda:1") as measured:
            kept = torch.zeros(1000, device="cuda:1")
        assert (measured.report.device.kind, measured.report.device.index) == ("virtual", 1)
        with (
            pytest.raises(DeviceError, match="there are 2 devices here"),
            gpumem_magic.measure(device="cuda:2"),
        ):
            pass
        with gpumem_magic.measure() as measured:
            other = torch.zeros(1000, device="cuda:1")
        assert measured.report.device.index == 1
        del kept, other
    finally:
        device.off()


@pytest.mark.parametrize(("name", "part"), [("mps", "Apple's (MPS)"), ("xpu", "Intel's (XPU)")])
def test_other_accelerators_get_one_honest_line(name: str, part: str) -> None:
    there = SimpleNamespace(is_available=lambda: True)
    absent = SimpleNamespace(is_available=lambda: False)
    fake = SimpleNamespace(
        backends=SimpleNamespace(mps=there if name == "mps" else absent), xpu=there if name == "xpu" else absent
    )
    words = unsupported.why_not(fake)
    assert words is not None
    assert part in words
    assert f"nothing on `{name}` is measured" in words
    assert "\n" not in words


def test_the_line_is_in_the_report_and_the_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsupported, "why_not", lambda _: "This computer's GPU is another's.")
    try:
        with gpumem_magic.measure() as measured:
            pass
        assert measured.report.notes[0].startswith("This computer's GPU is another's. A virtual T4 was turned on")
    finally:
        device.off()
    with pytest.raises(DeviceError, match=r"cuda: This computer's GPU is another's\."):
        device.choose("cuda")
    assert memory_text().startswith("This computer's GPU is another's. No device is on.")


def test_rocm_is_measured_by_the_runtime_s_figures(computer: Computer, monkeypatch: pytest.MonkeyPatch) -> None:
    computer.torch.version.hip = "6.4"
    monkeypatch.setattr(machines, "gpus", lambda _: CudaMachine(computer.torch))
    with gpumem_magic.measure() as measured:
        computer.torch.alloc(30 * MIB)
    row = measured.report.checkpoints[-1]
    assert (row.allocated, row.categories["context"], row.device_used) == (30 * MIB, None, computer.torch.gpus[0].used)
    assert not any("nvidia" in note or "driver" in note for note in measured.report.notes)


# ---- nothing is left behind

ENDINGS = {
    "success": "a = gpu.alloc(30 * MIB)\ngpu.free(a)\n",
    "error": "a = gpu.alloc(30 * MIB)\n1 / 0\n",
    "out of memory": "a = gpu.alloc(MIB)\ngpu.try_alloc(99 << 30)\nraise torch.OutOfMemoryError('CUDA out of memory.')\n",
    "interrupt": "a = gpu.alloc(30 * MIB)\nraise KeyboardInterrupt\n",
    "interrupt in a phase": (
        "layer = torch.nn.Linear(3, 3)\n"
        "def stop(*ignored):\n    raise KeyboardInterrupt\n"
        "layer.register_forward_hook(stop)\n"
        "layer(torch.ones(3))\n"
    ),
    "training": (
        "layer = torch.nn.Linear(3, 3)\noptimizer = torch.optim.Adam(layer.parameters())\n"
        "for i in range(3):\n    a = gpu.alloc(MIB)\n    layer(torch.ones(3)).sum().backward()\n    optimizer.step()\n"
    ),
    "its own peaks": "a = gpu.alloc(30 * MIB)\ngpu.free(a)\npeak = gpu.gpus[0].allocator.peak_allocated\n",
    "syntax": "def (:\n",
}


@pytest.mark.parametrize("cell", ENDINGS.values(), ids=ENDINGS)
def test_nothing_is_left_behind(shell: Any, computer: Computer, cell: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        run(shell, cell)
        peaks = [one.allocator.peak_allocated for one in computer.torch.gpus]
        drawn = torch.random.get_rng_state().tolist()
        torch.manual_seed(0)
        before = everything(computer, shell)
        result, _ = run(shell, "%%gpumem\n" + cell)
        after = everything(computer, shell)
    assert after.pop("random") == drawn
    del before["random"]
    assert after.pop("peaks") >= before.pop("peaks") == peaks
    assert after == before
    assert under_way.current() is None
    if "raise KeyboardInterrupt" in cell:
        assert isinstance(result.error_in_exec, KeyboardInterrupt)
    # What follows is measured as if nothing had been.
    result, out = run(shell, "%%gpumem\nb = gpu.alloc(MIB)\n")
    assert result.success, out
    assert last().checkpoints[-1].allocated == last().checkpoints[0].allocated + MIB


def test_a_failing_reading_costs_a_warning_and_leaves_nothing(
    shell: Any, computer: Computer, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = everything(computer, shell)

    def lost(*arguments: Any) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(computer.torch.cuda, "memory_stats_as_nested_dict", lost)
    result, out = run(shell, "%%gpumem\na = gpu.alloc(30 * MIB)\na\n")
    assert result.success
    assert result.result == shell.user_ns["a"]
    monkeypatch.undo()
    after = everything(computer, shell)
    before.pop("peaks")
    after.pop("peaks")
    assert after == before
    assert "device-side assert" in str(gpumem_magic.last_report()) + out


HALF = """
import os, signal, sys
sys.path[:0] = {path!r}
from cuda_fakes import FakeNvml, FakeTorch
from gpumem_magic.session.recording import open_recording
from gpumem_magic.devices import machines
from gpumem_magic.devices.cuda import CudaMachine
from gpumem_magic.devices.driver import Driver
fake = FakeTorch()
machines.gpus = lambda torch: CudaMachine(fake, Driver(FakeNvml(fake)))
open_recording()
fake.alloc(1 << 20)
print("half way", flush=True)
{end}
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("os._exit(3)", 3),
        ("sys.exit(4)", 4),
        ("", 0),
    ],
)
def test_a_kernel_that_ends_half_way_leaves_no_file_and_no_noise(tmp_path: Path, end: str, status: int) -> None:
    script = HALF.format(path=[str(Path(__file__).parent)], end=end)
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    home.mkdir()
    temporary.mkdir()
    environment = {
        **os.environ,
        "HOME": str(home),
        "TMPDIR": str(temporary),
        "PYTHONPATH": str(Path(gpumem_magic.__file__).parents[1]),
    }
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, cwd=tmp_path, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (status, "half way\n", "")
    assert sorted(tmp_path.rglob("*")) == [home, temporary]


@pytest.mark.parametrize(
    ("name", "total", "others", "called"),
    [
        # As one answered that its driver keeps 480 MiB of: a card of the catalogue's, to the byte
        ("NVIDIA H100 80GB HBM3", 81_079 * MIB, 0, "H100,idle=3MiB"),
        ("NVIDIA H100 80GB HBM3", 40_000 * MIB, 3 * GIB + 1, "H100,total=40000MiB,idle=3076MiB"),
        ("Some GPU", 8 * GIB + 512, 5 * MIB, f"virtual:{8 * GIB + 512}B,idle=8MiB"),
    ],
)
def test_trials_run_on_a_card_like_this_computers(
    name: str, total: int, others: int, called: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fits is asked before the GPU is in use: the driver's figures are all that is known of it."""
    # (The driver's own 3 MiB are others'.)
    fake = FakeTorch(total=total, initialized=False)
    fake.gpus[0].name, fake.gpus[0].others = name, others
    monkeypatch.setattr(machines, "gpus", lambda torch: CudaMachine(fake, Driver(FakeNvml(fake))))
    assert cards.usual() == called
    assert not fake.initialized
