"""`benchmarks/stand_in_runtime`, as far as it needs no CUDA build: its cases, its stubs, and what it says of two sequences."""

from __future__ import annotations

import importlib
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "stand_in_runtime"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield runpy.run_path(str(FOLDER / "__main__.py"), run_name="stand_in_runtime")
    sys.modules.pop("building", None)


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
