"""`gpumem calibrate`: on a device whose constants are known it finds those; without a GPU it is one line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpumem_magic.cli import main
from gpumem_magic.commands.calibrate import Calibration, NoGpu, measure, words
from gpumem_magic.units import MIB
from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.catalog import CATALOG, DeviceSpec, parse
from gpumem_magic.virtual.generations import LARGE_WORKSPACE, WORKSPACE


@pytest.fixture(autouse=True)
def off_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    yield
    gpu.turn_off()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this computer has a GPU")
def test_without_a_gpu_it_is_one_line_and_a_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("gpumem: calibrate measures a real NVIDIA GPU")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("device", "context", "workspace"),
    [("A100-40GB,context=777MiB", 777, WORKSPACE), ("H100", 481, LARGE_WORKSPACE), ("T4,idle=3MiB", 400, WORKSPACE)],
)
def test_it_finds_the_constants_of_a_device_that_has_them(device: str, context: int, workspace: int) -> None:
    gpu.turn_on(device)
    found = measure(torch, 0)
    assert found.context_bytes == found.context_with_libraries_bytes == context * MIB
    assert found.cublas_workspace_bytes == workspace
    model = CATALOG[device.partition(",")[0]]
    assert (found.total_bytes, found.smi_total_bytes) == (model.total_bytes, model.smi_total_bytes)
    assert found.measured == "process"


def test_what_it_prints_is_a_device_that_is_like_the_measured_one() -> None:
    gpu.turn_on("A100-40GB,context=777MiB")
    found = measure(torch, 0)
    assert found.device_text in words(found)
    spec = parse(found.device_text)
    assert isinstance(spec, DeviceSpec)
    (model,) = spec.models
    assert (model.context_bytes, model.total_bytes) == (found.context_bytes, found.total_bytes)


def test_a_gpu_that_the_catalogue_does_not_know_has_a_text_too() -> None:
    found = Calibration("Some GPU, new", "2.13", 10 << 30, None, 300 * MIB, 310 * MIB + 1, WORKSPACE, "difference")
    spec = parse(found.device_text)
    assert isinstance(spec, DeviceSpec)
    assert (spec.models[0].total_bytes, spec.models[0].context_bytes) == (10 << 30, 311 * MIB)
    assert "before and after" in words(found)


def test_a_number_without_a_gpu_is_refused() -> None:
    gpu.turn_on("2xT4")
    with pytest.raises(NoGpu, match="there is no cuda:2; this process sees 2"):
        measure(torch, 2)


def test_the_constants_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpu.turn_on("T4")
    path = tmp_path / "t4.json"
    assert main(["calibrate", "--json", str(path)]) == 0
    assert "Tesla T4" in capsys.readouterr().out
    assert json.loads(path.read_text(encoding="utf-8"))["context_bytes"] == 400 * MIB
