"""`benchmarks/stand_in_runtime`, as far as it needs no CUDA build: its cases, its stubs, and what it says of two sequences."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import warm

from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.card.generations import parse_version

_warm = pytest.fixture(autouse=True)(warm.in_place_of_python)

DATA = Path(__file__).resolve().parent / "data"
FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "stand_in_runtime"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield runpy.run_path(str(FOLDER / "__main__.py"), run_name="stand_in_runtime")
    for module in ("building", "samples", "saved"):
        sys.modules.pop(module, None)


@pytest.fixture
def building(tool: dict[str, Any]) -> Any:
    return importlib.import_module("building")


def test_every_case_has_a_name_of_its_own_and_two_parts_that_are_python(tool: dict[str, Any]) -> None:
    cases = tool["read"]((FOLDER / "cases.txt").read_text(encoding="utf-8"))
    names = [case.name for case in cases]
    assert len(names) == len(set(names)) >= 400
    assert len({(case.setup, case.expression) for case in cases}) == len(cases)
    for case in cases:
        assert " " not in case.name
        compile(case.setup, case.name, "exec")
        compile(f"out = ({case.expression})", case.name, "exec")


def test_a_case_may_have_a_colon_and_bars_in_its_code(tool: dict[str, Any]) -> None:
    (case,) = tool["read"]("# a group\n\nname: x=r(2) || m || x[:, 0: 1]\n")
    assert case == ("name", "x=r(2) || m", "x[:, 0: 1]")


def test_allocations_in_order_and_frees_are_compared_apart(tool: dict[str, Any]) -> None:
    cases = tool["read"]("same: a || a\nfrees: b || b\nsizes: c || c\nfails: d || d\nhere: e || e\n")
    one = [["+", 8], ["+", 4], ["-", 0], ["-", 1]]
    turned = [["+", 8], ["+", 4], ["-", 1], ["-", 0]]
    swapped = [["+", 4], ["+", 8], ["-", 0], ["-", 1]]
    there = {"same": one, "frees": one, "sizes": one, "fails": "crashed with signal 11", "here": []}
    here = {"same": one, "frees": turned, "sizes": swapped, "fails": one, "here": "ValueError: no"}
    text = "\n".join(tool["words"](cases, there, here))
    assert text.endswith("2 of 4 cases alike (allocations), 1 alike with their frees.")
    assert "frees: frees in another order  (b || b)\n  A +8 +4 -0 -1\n  B +8 +4 -1 -0" in text
    assert "sizes: other allocations  (c || c)\n  A +8 +4 -0 -1\n  B +4 +8 -0 -1" in text
    assert "fails: left out, over the stand-in runtime: crashed with signal 11" in text
    assert "here: other allocations  (e || e)\n  A \n  B ValueError: no" in text
    assert "same" not in text


def test_stubs_are_what_a_wheel_asks_for_of_libraries_that_are_not_run(building: Any) -> None:
    listing = """
/env/torch/lib/libtorch_cuda.so:
                 U cudaLaunchKernel@libcudart.so.12
                 U __cudaRegisterVar@libcudart.so.12
                 U cublasSgemm_v2@libcublas.so.12
                 U cublasLtMatmul@libcublasLt.so.12
                 U cusolverDnSgetrf@@libcusolver.so.11
                 U cudnnCreate@libcudnn.so.9
                 U cusparseLtInit@libcusparseLt.so.0
                 U memcpy@GLIBC_2.14
                 w cudaOther@libcudart.so.12
                 U _ZN2at6Tensor3runEv
"""
    names = building.emulated(listing)
    assert names == {"cudaLaunchKernel", "__cudaRegisterVar", "cublasSgemm_v2", "cublasLtMatmul", "cusolverDnSgetrf"}
    assert building.successes({"b", "a"}) == "int a() { return 0; }\nint b() { return 0; }\n"


def test_a_folder_without_headers_is_one_line(building: Any, tmp_path: Path) -> None:
    bare = building.Wheel(tmp_path, "2.13.0", (), (tmp_path,))
    with pytest.raises(building.Unfit, match=r"^no cuda_runtime_api\.h beside that PyTorch: [^\n]*$"):
        building.build(bare, tmp_path)


@pytest.mark.parametrize(
    ("python", "said"),
    [
        ("/nowhere/python", "the other Python cannot be run: /nowhere/python: No such file"),
        ("", "which is no CUDA build"),
    ],
)
def test_an_environment_that_does_not_fit_is_one_line(python: str, said: str) -> None:
    import torch

    if not python and torch.version.cuda:
        pytest.skip("this environment has a CUDA build")
    done = subprocess.run(
        [sys.executable, str(FOLDER), "--python", python or sys.executable], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.startswith("Not compared: ")
    assert done.stderr.count("\n") == 1


# ---- PyTorch's own samples


def test_operators_that_differ_are_grouped_the_most_calls_first(tool: dict[str, Any]) -> None:
    there = {
        "add float32 0 forward": [["+", 4]],
        "add float32 1 forward": [["+", 8]],
        "mul float32 0 forward": [["+", 4], ["+", 8], ["-", 0], ["-", 1]],
        "sub int64 0 forward": [["+", 4]],
        "sub int64 0 backward": [["+", 4]],
        "div float32 0 forward": "crashed with signal 11",
        "exp float32 0 forward": [["+", 4]],
    }
    here = {
        "add float32 0 forward": [["+", 12]],
        "add float32 1 forward": [["+", 8]],
        "mul float32 0 forward": [["+", 4], ["+", 8], ["-", 1], ["-", 0]],
        "sub int64 0 forward": [],
        "sub int64 0 backward": "RuntimeError: no",
        "exp float32 0 forward": [["+", 4]],
    }
    lines = "\n".join(tool["grouped"](there, here)).split("\n\n")
    assert lines == [
        "\nsub: other allocations in 2  (int64 0 forward)\n  A +4\n  B ",
        "add: other allocations in 1  (float32 0 forward)\n  A +4\n  B +12",
        "mul: frees in another order in 1  (float32 0 forward)\n  A +4 +8 -0 -1\n  B +4 +8 -1 -0",
        "Left out, since nothing of them runs over the stand-in runtime: div",
        "3 of 6 calls alike (allocations), 2 alike with their frees; 4 operators.",
    ]


def test_a_solvers_workspace_is_said_to_be_empty(building: Any) -> None:
    declared = """
      cusolverStatus_t CUSOLVERAPI cusolverDnSgetrf_bufferSize(
        cusolverDnHandle_t handle, int m, int n, float *A, int lda, int work, int *Lwork);
      cusolverStatus_t CUSOLVERAPI cusolverDnSgesvd_bufferSize(
        cusolverDnHandle_t handle, int m, double tolerance, float *A, size_t *workspaceInBytes, size_t * bufferOnHost);
    """
    first, second, third = building.successes(
        {"cusolverDnSgetrf_bufferSize", "cusolverDnSgesvd_bufferSize", "cusolverDnSgetrf"}, declared
    ).splitlines()
    places = "void *a0, void *a1, void *a2, void *a3, void *a4"
    assert first == (f"int cusolverDnSgesvd_bufferSize({places}) {{ *(size_t *)a3 = 0; *(size_t *)a4 = 0; return 0; }}")
    assert second == "int cusolverDnSgetrf() { return 0; }"
    assert third == (f"int cusolverDnSgetrf_bufferSize({places}, void *a5, void *a6) {{ *(int *)a6 = 0; return 0; }}")


def test_a_tensor_is_packed_with_the_way_it_lies(tool: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    samples = importlib.import_module("samples")
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: self)
    tensor = torch.arange(12.0).view(3, 4).t()[1:].requires_grad_()
    packed = pickle.loads(pickle.dumps(samples.Packed(tensor)))
    again = packed.unpacked()
    assert torch.equal(again, tensor)
    assert again.requires_grad
    assert (again.stride(), again.storage_offset()) == (tensor.stride(), tensor.storage_offset()) == ((1, 4), 1)
    with pytest.raises(TypeError, match="conjugated"):
        samples.Packed(torch.zeros(2, dtype=torch.complex64).conj())


@pytest.fixture
def device() -> Iterator[None]:
    gpu.turn_on("A100-40GB")
    yield
    gpu.turn_off()


def driven(ways: Any) -> dict[str, Any]:
    """What each way gave, as both sides run them: each result is sent back."""
    found, step = {}, next(ways, None)
    while step is not None:
        way, work = step
        found[way] = work()
        try:
            step = ways.send(found[way])
        except StopIteration:
            step = None
    return found


def test_an_operator_runs_forward_backward_twice_in_place_and_into_a_result(tool: dict[str, Any], device: None) -> None:
    samples = importlib.import_module("samples")
    sine = SimpleNamespace(op=torch.sin, inplace_variant=torch.sin_, supports_gradgrad=True, supports_out=True)
    ((given, gradients),) = samples.pickled([((torch.zeros(3, requires_grad=True), (), {}), True)])
    found = driven(samples.ways("operators", sine, "sin", "float32", given, gradients))
    assert list(found) == ["forward", "backward", "twice", "in-place", "out"]
    assert found["forward"].device.type == "cuda"
    assert found["forward"].requires_grad
    first, second = found["twice"]
    assert (first[0].requires_grad, second[0].shape) == (True, (3,))
    assert not found["out"].requires_grad


def test_a_module_runs_for_training_for_inference_and_with_autocast(tool: dict[str, Any], device: None) -> None:
    samples = importlib.import_module("samples")
    linear = SimpleNamespace(module_cls=torch.nn.Linear)
    ((given, _),) = samples.pickled([(((3, 5), {}, (torch.zeros(2, 3, dtype=torch.float16),), {}), True)])
    found = driven(samples.ways("modules", linear, "nn_Linear.eval", "float16", given, True))
    assert list(found) == ["forward", "backward", "inference", "autocast", "autocast-backward"]
    assert (found["forward"].dtype, found["inference"].is_inference()) == (torch.float16, True)
    # The gradients of the weight and the bias.
    assert [one.shape for one in found["backward"]] == [(5, 3), (5,)]


def test_an_optimizer_runs_in_each_of_its_kinds(tool: dict[str, Any], device: None) -> None:
    samples = importlib.import_module("samples")
    sgd = SimpleNamespace(
        optim_cls=torch.optim.SGD,
        optim_inputs_func=lambda device: [SimpleNamespace(kwargs={"lr": 0.1})],
        supported_impls=("foreach", "differentiable", "fused"),
        step_requires_closure=False,
    )
    groups = list(samples.of_optimizer("SGD", sgd))
    assert {name for name, _, _ in groups} == {"SGD.loop", "SGD.foreach", "SGD.fused"}
    flags = {name: pickle.loads(found[0][0]) for name, _, found in groups}
    assert flags["SGD.loop"] == {"lr": 0.1, "foreach": False, "fused": False}
    assert flags["SGD.fused"] == {"lr": 0.1, "foreach": False, "fused": True}
    found = driven(samples.ways("optimizers", sgd, "SGD.loop", "float32", groups[0][2][0][0], False))
    assert list(found) == ["first", "second", "third"]


def test_optimizers_run_where_pytorchs_tests_do_not_list_them(
    tool: dict[str, Any], device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 2.2."""
    monkeypatch.setitem(sys.modules, "torch.testing._internal.common_optimizers", None)
    samples = importlib.import_module("samples")
    optimizers = samples.database("optimizers")
    assert "Optimizer" not in optimizers
    for name, takes_a_closure in (("AdamW", False), ("LBFGS", True)):
        assert optimizers[name].step_requires_closure is takes_a_closure
        ((given, _),) = samples.pickled([({"lr": 0.1}, False)])
        found = driven(samples.ways("optimizers", optimizers[name], f"{name}.loop", "float32", given, False))
        assert list(found) == ["first", "second", "third"]


# ---- Many cases in one process


@pytest.fixture
def running(tool: dict[str, Any]) -> Iterator[Any]:
    yield importlib.import_module("running")
    sys.modules.pop("running", None)


def test_cases_run_in_one_process_until_one_crashes_or_ends_it(running: Any) -> None:
    def work(first: int) -> Iterator[Any]:
        for number in range(first, 6):
            if number == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            if number == 4:
                os._exit(3)
            yield os.getpid()

    found = list(running.until_all_are_done(work, 6))
    assert found[2] == f"crashed with signal {signal.SIGKILL.value}"
    assert found[4] == "ended its process"
    processes = found[:2] + found[3:4] + found[5:]
    assert [processes.count(process) for process in processes] == [2, 2, 1, 1]
    assert os.getpid() not in processes


def test_a_case_that_fails_leaves_nothing_to_the_next(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "first_products", lambda: None)
    monkeypatch.setattr(running, "recorded", lambda call: ([call() or os.environ.get("STAND_IN_TOLD")], None))
    monkeypatch.setattr(running, "usable", lambda: True)
    begun: list[int] = []
    cases = [
        ("told=3; torch.use_deterministic_algorithms(True)", "1"),
        ("torch.backends.cudnn.enabled = False", "missing"),
        (
            "x = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.enabled",
            "0 / (x == (False, True) and 1)",
        ),
    ]
    found = list(running.run(lambda: begun.append(1), cases))
    assert begun == [1]
    assert found == [["3"], "NameError: name 'missing' is not defined", [None]]


def test_a_device_with_an_error_that_stays_ends_the_process_and_the_next_case_has_another(
    running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken: list[int] = []

    def synchronize() -> None:
        if broken:
            raise RuntimeError("CUDA error: device-side assert triggered")

    def recorded(call: Any) -> tuple[list[int], None]:
        call()
        synchronize()
        return [os.getpid()], None

    monkeypatch.setattr(running, "first_products", lambda: None)
    monkeypatch.setattr(running, "recorded", recorded)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(running, "zeros", broken.append)
    cases = [("pass", "1"), ("pass", "r(1)"), ("pass", "1"), ("pass", "1")]
    first, failed, *others = running.until_all_are_done(lambda done: running.run(int, cases[done:]), 4)
    assert failed == "RuntimeError: CUDA error: device-side assert triggered"
    assert others[0] == others[1] != first


def test_a_case_that_wants_it_has_a_process_in_which_nothing_ran(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[int] = []
    monkeypatch.setattr(running, "first_products", lambda: products.append(1))
    monkeypatch.setattr(running, "recorded", lambda call: ([os.getpid(), len(products)], call()))
    monkeypatch.setattr(running, "usable", lambda: True)
    cases = [("pass", "1"), ("pass", "1"), ("fresh; pass", "1"), ("fresh; pass", "1"), ("pass", "1")]
    found = list(running.until_all_are_done(lambda done: running.run(int, cases[done:]), 5))
    processes, counts = zip(*found, strict=True)
    assert counts == (1, 1, 0, 0, 1)
    assert [processes.index(process) for process in processes] == [0, 0, 2, 3, 4]


def test_a_case_that_takes_too_long_is_ended(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(first: int) -> Iterator[Any]:
        for number in range(first, 3):
            if number == 1:
                time.sleep(60)
            yield number

    monkeypatch.setattr(running, "PATIENCE", 1)
    assert list(running.until_all_are_done(work, 3)) == [0, "took more than 1 s", 2]


def test_a_file_keeps_the_gpu_what_was_run_and_what_it_was_asked_for(
    tool: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a GPU of this computer: the virtual one, in whose place running.py puts it."""
    saved = importlib.import_module("saved")
    named = {"name": "NVIDIA H100 80GB HBM3", "torch": "2.11.0+cu130"}
    monkeypatch.setattr(saved, "about", lambda: named)
    began = json.dumps

    def asked(value: Any, file: Any = None) -> None:
        file.write(began({**value, "virtual": "H100,torch=2.11"}))

    monkeypatch.setattr(saved.json, "dump", asked)
    cases = [("one", "x=r(100)", "x+1"), ("wrong", "x=r(100)", "y+1"), ("two", "x=r(10,10)", "x.sum()")]
    file = str(tmp_path / "h100.jsonl.xz")
    saved.save(file, {"cases": cases}, processes=2, minutes=5)
    about, request, there = saved.read(file, "")
    assert about == named
    assert [tuple(case) for case in request["cases"]] == cases
    assert there == {"one": [["+", 400]], "wrong": "NameError: name 'y' is not defined", "two": [["+", 4]]}
    assert tool["against"](file, None, ["o"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(
        "PyTorch 2.11.0+cu130 on NVIDIA H100 80GB HBM3 (A), H100,torch=2.11 on the virtual GPU (B)\n"
    )
    assert said.endswith("2 of 2 cases alike (allocations), 2 alike with their frees.\n")


def test_sweeps_draw_the_same_cases_for_a_seed_and_others_for_another(tool: dict[str, Any]) -> None:
    sweeps = importlib.import_module("sweeps")
    cases = sweeps.drawn(0)
    assert cases == sweeps.drawn(0) != sweeps.drawn(1)
    names = [name for name, _, _ in cases]
    assert len(set(names)) == len(names) > 10_000
    for name, setup, expression in cases:
        compile(f"{setup}\nout = ({expression})", name, "exec")
    # A run that is cut has some of each kind.
    kinds = {name.split("_0_")[0] for name in names}
    assert {name.split("_0_")[0] for name in names[: len(names) // 8]} == kinds


@pytest.mark.skipif(parse_version(torch.__version__) < (2, 11), reason="some cases need functions of 2.11")
def test_a_virtual_h100_is_asked_for_what_a_real_one_was(
    tool: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """626 cases, kept by --save on an H100: every third of those that agreed when they were, every fourth of attention's, and
    162 of sweeps, of each kind one."""
    assert tool["against"](str(DATA / "operators-nvidia-h100-80gb-hbm3.jsonl.xz"), None, None) == 0
    said = capsys.readouterr().out
    assert said.endswith("\n626 of 626 cases alike (allocations), 626 alike with their frees.\n"), said


def test_half_a_line_of_a_run_that_was_ended_is_left_out(tool: dict[str, Any]) -> None:
    saved = importlib.import_module("saved")
    assert saved.answers('["one", [["+", 400]]]\n["two", [["+", 4') == {"one": [["+", 400]]}


def test_a_card_that_the_catalogue_does_not_know_is_one_line(tool: dict[str, Any]) -> None:
    assert tool["key_of"]("NVIDIA H100 80GB HBM3") == "H100"
    with pytest.raises(
        importlib.import_module("building").Unfit, match=r"^no card of the catalogue says that it is a K6;"
    ):
        tool["key_of"]("K6")


def test_a_whole_program_leaves_its_snapshot_also_where_it_fails(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nimport torch\n"
        "kept = torch.empty(int(sys.argv[1]), device='cuda')\n"
        "assert __name__ == '__main__' and sys.argv[0].endswith('program.py')\n"
        "raise ValueError('its own')\n"
    )
    out = tmp_path / "virtual.pickle"
    command = [sys.executable, str(FOLDER / "whole.py"), str(out), "T4,torch=2.13", str(program), "5000"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ValueError: its own")
    (trace,) = pickle.loads(out.read_bytes())["device_traces"]
    assert [event["size"] for event in trace if event["action"] == "alloc"] == [20_000]


def test_a_program_that_is_not_named_is_asked_for(tool: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["stand_in_runtime", "--python", sys.executable, "--script"])
    with pytest.raises(SystemExit) as ended:
        tool["main"]()
    assert ended.value.code == 2
