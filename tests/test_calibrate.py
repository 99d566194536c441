"""`gpumem calibrate`: on a device whose constants are known it finds those; what it keeps, virtual GPUs use; without a GPU it
is one line."""

from __future__ import annotations

import json
import os
import stat
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpumem_magic.cli import main
from gpumem_magic.commands.calibrate import both_ways, device_text, words
from gpumem_magic.units import MIB
from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.card import calibration, measuring
from gpumem_magic.virtual.card.calibration import BadCalibration, Calibration
from gpumem_magic.virtual.card.catalog import CATALOG, DeviceSpec, GpuModel, describe, parse
from gpumem_magic.virtual.card.generations import LARGE_WORKSPACE, WORKSPACE
from gpumem_magic.virtual.card.measuring import NoGpu, measure, measure_apart


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
    ("device", "context", "libraries", "workspace"),
    [
        ("A100-40GB,context=777MiB", 777, 0, WORKSPACE),
        ("H100", 619, 66 + 8, LARGE_WORKSPACE),
        ("T4,idle=3MiB", 400, 0, WORKSPACE),
    ],
)
def test_it_finds_the_constants_of_a_device_that_has_them(
    device: str, context: int, libraries: int, workspace: int
) -> None:
    gpu.turn_on(device)
    found = measure(torch, 0)
    assert found.context_bytes == context * MIB
    assert found.context_with_libraries_bytes == (context + libraries) * MIB
    assert found.cublas_workspace_bytes == workspace
    model = CATALOG[device.partition(",")[0]]
    assert (found.total_bytes, found.smi_total_bytes) == (model.total_bytes, model.smi_total_bytes)
    assert found.measured == "process"


def test_what_it_prints_is_a_device_that_is_like_the_measured_one() -> None:
    gpu.turn_on("A100-40GB,context=777MiB")
    found = measure(torch, 0)
    assert device_text(found) in words(found)
    spec = parse(device_text(found))
    assert isinstance(spec, DeviceSpec)
    (model,) = spec.models
    assert (model.context_bytes, model.total_bytes) == (found.context_bytes, found.total_bytes)


def test_a_gpu_that_the_catalogue_does_not_know_has_a_text_too() -> None:
    found = Calibration("Some GPU, new", "2.13", 10 << 30, None, 300 * MIB, 310 * MIB + 1, WORKSPACE, "difference")
    spec = parse(device_text(found))
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


# ---- what is kept


LAZY = Calibration(
    name="Tesla T4",
    torch="2.13.0+cu130",
    total_bytes=15_655_829_504,
    smi_total_bytes=15_360 * MIB,
    context_bytes=101 * MIB,
    context_with_libraries_bytes=187 * MIB,
    cublas_workspace_bytes=4 * MIB,
    measured="process",
    library_bytes={"cuBLAS": 50 * MIB, "cuDNN": 36 * MIB},
    driver="580.65.06",
    date="2026-11-20",
)
EAGER = replace(LAZY, context_bytes=600 * MIB, context_with_libraries_bytes=700 * MIB)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in a configuration folder of the test's own."""
    monkeypatch.delenv(calibration.VARIABLE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "gpumem_magic" / "calibration.json"


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """A GPU that measures as `LAZY` and `EAGER`. Returns what was asked of it."""
    asked: list[tuple[int, str]] = []

    def measured(index: int, loading: str) -> Calibration:
        asked.append((index, loading))
        return {"lazy": LAZY, "eager": EAGER}[loading]

    monkeypatch.setattr(measuring, "check", lambda torch, index: None)
    monkeypatch.setattr(measuring, "measure_apart", measured)
    return asked


def model_of(text: str) -> GpuModel:
    spec = parse(text)
    assert isinstance(spec, DeviceSpec)
    return spec.models[0]


def test_what_was_measured_is_kept_and_the_virtual_gpu_has_it(
    kept: Path, a_gpu: list[tuple[int, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", "--device", "1"]) == 0
    assert a_gpu == [(1, "lazy"), (1, "eager")]
    out = capsys.readouterr().out
    assert f"Saved in {kept}" in out
    assert "growth at first use: cuBLAS 50.0 MiB, cuDNN 36.0 MiB" in out
    assert "(CUDA_MODULE_LOADING=EAGER): 700 MiB" in out
    assert calibration.load() == {"Tesla T4": replace(LAZY, context_eager_bytes=700 * MIB)}

    model = model_of("T4")
    assert (model.context_bytes, model.cublas_workspace_bytes) == (187 * MIB, 4 * MIB)
    assert (model.total_bytes, model.smi_total_bytes) == (15_655_829_504, 15_360 * MIB)
    assert not model.context_is_estimate
    assert model_of("2xT4,loading=lazy") == model
    assert model_of("T4,loading=eager").context_bytes == 700 * MIB
    # What is asked for is had, and what another version would do is the catalogue's.
    assert model_of("T4,context=99MiB").context_bytes == 99 * MIB
    assert model_of("T4,context=99MiB").calibrated == ""
    assert model_of("T4,torch=1.10").calibrated == ""
    assert model_of("A100-40GB") == CATALOG["A100-40GB"]

    # A machine that runs has it too: the context, and the workspace in PyTorch's memory.
    gpu.turn_on("T4")
    again = measure(torch, 0)
    assert again.context_with_libraries_bytes == 187 * MIB
    assert again.cublas_workspace_bytes == 4 * MIB


def test_a_device_of_another_era_stays_what_it_was(kept: Path) -> None:
    v100 = CATALOG["colab-2021"]
    assert v100.name == CATALOG["V100-16GB"].name
    calibration.save(replace(LAZY, name=v100.name))
    assert model_of("colab-2021") == v100
    assert model_of("V100-16GB").context_bytes == 187 * MIB


def test_the_device_says_that_its_figures_are_measured_and_since_when(kept: Path) -> None:
    from gpumem_magic.notebook.devices import state
    from gpumem_magic.session.device import choose

    calibration.save(LAZY)
    said = choose("T4")
    measured = "measured on this computer on 2026-11-20 with torch 2.13.0+cu130, driver 580.65.06"
    assert measured in said
    assert measured in state().splitlines()[0]
    assert "T4: measured here on 2026-11-20" in describe()
    row = next(line for line in describe().splitlines() if line.startswith("T4 "))
    assert "187 MiB" in row
    assert "about" not in row
    assert "measured" not in choose("L4")


def test_show_and_forget(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--show"]) == 0
    assert capsys.readouterr().out.startswith("Nothing is saved")
    calibration.save(LAZY)
    calibration.save(replace(LAZY, name="NVIDIA L4"))
    assert main(["calibrate", "--show"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(str(kept))
    assert out.count("measured on 2026-11-20 with torch 2.13.0+cu130, driver 580.65.06") == 2
    assert main(["calibrate", "--forget"]) == 0
    assert str(kept) in capsys.readouterr().out
    assert not kept.exists()
    assert model_of("T4") == CATALOG["T4"]
    assert main(["calibrate", "--forget"]) == 0
    assert capsys.readouterr().out == "gpumem: nothing was saved\n"


def entry(**changed: Any) -> bytes:
    return json.dumps({"format": 1, "gpus": [{**asdict(LAZY), **changed}]}).encode()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b" " * (1 << 21), "too large"),
        (b"[]", "no list of GPUs"),
        (b'{"format": 2, "gpus": []}', "another version"),
        (b'{"format": 1, "gpus": [7]}', "not an object"),
        (b'{"format": 1, "gpus": [{}]}', "name is not"),
        (entry(context_with_libraries_bytes=-1), "context_with_libraries_bytes is not a size"),
        (entry(total_bytes=True), "total_bytes is not a size"),
        (entry(total_bytes=1e9), "total_bytes is not a size"),
        (entry(total_bytes=1 << 62), "total_bytes is not a size"),
        (entry(context_with_libraries_bytes=1 << 40), "larger than the GPU"),
        (entry(name="two\nlines"), "name is not"),
        (entry(date="yesterday"), "Invalid isoformat"),
        (entry(library_bytes={"cuBLAS": "much"}), "cuBLAS"),
        (entry(smi_total_bytes="x"), "smi_total_bytes is not a size"),
    ],
)
def test_a_bad_file_is_one_warning_and_is_ignored(
    kept: Path, content: bytes, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kept.parent.mkdir(parents=True)
    kept.write_bytes(content)
    with pytest.warns(UserWarning, match="this calibration can't be used") as said:
        model = model_of("T4")
    assert model == CATALOG["T4"]
    assert len(said) == 1
    assert "\n" not in str(said[0].message)
    assert str(kept) in str(said[0].message)
    with pytest.raises(BadCalibration):
        calibration.load()
    assert main(["calibrate", "--show"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "this calibration can't be used" in err
    if "cuBLAS" not in why:
        assert why in err
    # It can be measured again, and forgotten.
    calibration.save(LAZY)
    assert calibration.load() == {"Tesla T4": LAZY}


def test_entries_of_a_later_release_may_say_more(kept: Path) -> None:
    kept.parent.mkdir(parents=True)
    kept.write_bytes(entry(nccl_bytes=5))
    assert calibration.load() == {"Tesla T4": LAZY}


def test_it_is_written_whole_or_not_at_all(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calibration.save(LAZY)
    before = kept.read_bytes()

    def full(source: Any, target: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            calibration.save(replace(LAZY, name="NVIDIA L4"))
    assert kept.read_bytes() == before
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]


def test_where_it_cannot_be_written_is_one_line(
    tmp_path: Path, a_gpu: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.delenv(calibration.VARIABLE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    assert calibration.load() == {}
    assert main(["calibrate"]) == 2
    out, err = capsys.readouterr()
    assert "context:" in out
    assert err.count("\n") == 1
    monkeypatch.setenv(calibration.VARIABLE, "")
    assert main(["calibrate"]) == 2
    assert "nowhere to save it" in capsys.readouterr().err
    assert calibration.forget() is None


def test_the_variable_names_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(calibration.VARIABLE, str(tmp_path / "mine.json"))
    assert calibration.save(LAZY) == tmp_path / "mine.json"
    assert model_of("T4").context_bytes == 187 * MIB


@pytest.mark.parametrize(
    ("platform", "environment", "end"),
    [
        ("linux", {"XDG_CONFIG_HOME": "relative"}, ".config/gpumem_magic/calibration.json"),
        ("darwin", {}, "Library/Application Support/gpumem_magic/calibration.json"),
        ("win32", {}, "AppData/Roaming/gpumem_magic/calibration.json"),
        ("win32", {"APPDATA": "/roaming"}, "/roaming/gpumem_magic/calibration.json"),
    ],
)
def test_the_folder_is_the_platforms(
    platform: str, environment: dict[str, str], end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (calibration.VARIABLE, "XDG_CONFIG_HOME", "APPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert calibration.file_path().as_posix().endswith(end)


def test_a_measured_virtual_gpu_is_not_kept(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpu.turn_on("T4")
    assert main(["calibrate"]) == 0
    assert "nothing is saved" in capsys.readouterr().out
    assert not kept.exists()


def test_without_the_eager_context_the_rest_is_kept() -> None:
    def measured(index: int, loading: str) -> Calibration:
        if loading == "eager":
            raise NoGpu("too little memory")
        return LAZY

    assert both_ways(0, measured) == LAZY
    assert calibration.applied(CATALOG["T4"], "eager", {"Tesla T4": LAZY}) == CATALOG["T4"]


def test_a_process_of_its_own_measures_with_pytorchs_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = tmp_path / "answer.json"
    answer.write_text(json.dumps(asdict(LAZY)))
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        "assert os.environ['CUDA_MODULE_LOADING'] == 'EAGER' and 'PYTORCH_CUDA_ALLOC_CONF' not in os.environ\n"
        "assert sys.argv[1:] == ['-m', 'gpumem_magic.virtual.card.measuring', '3']\n"
        f"print('a greeting')\nprint(open({str(answer)!r}).read())\n"
    )
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    monkeypatch.setattr(sys, "executable", str(python))
    assert measure_apart(3, "eager") == LAZY
    answer.write_text("{}")
    with pytest.raises(NoGpu, match="no usable answer: name is not"):
        measure_apart(3, "eager")
    with pytest.raises(NoGpu, match="ended with status 1: AssertionError"):
        measure_apart(4, "eager")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this computer has a GPU")
def test_the_process_says_why_it_could_not(monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(Path(__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))
    with pytest.raises(NoGpu, match="ended with status 1: calibrate measures a real NVIDIA GPU"):
        measure_apart(0, "lazy")


def test_no_file_says_nothing(kept: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model_of("T4") == CATALOG["T4"]
