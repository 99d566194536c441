"""Extensions that a program builds while it runs: those in C++ are built, kernels in CUDA are refused at once."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.cpp_extension as cpp_extension

from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.engine.refusals import CannotRun

pytestmark = pytest.mark.skipif(torch.backends.cuda.is_built(), reason="a build for a card links them")


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of what was handed to the compiler."""
    build, found = cpp_extension._jit_compile, []

    def compile_nothing(*args: Any, **kwargs: Any) -> None:
        found.append(inspect.signature(build).bind(*args, **kwargs).arguments["name"])

    compile_nothing.__signature__ = inspect.signature(build)  # type: ignore[attr-defined]
    monkeypatch.setattr(cpp_extension, "_jit_compile", compile_nothing)
    yield found
    gpu.turn_off()


def _build(tmp_path: Path) -> None:
    cpp_extension.load_inline(
        "own_kernel", ["void f();"], ["__global__ void k() {}"], functions=["f"], build_directory=str(tmp_path)
    )


def test_kernels_in_cuda_are_refused_in_one_line(builds: list[str], tmp_path: Path) -> None:
    machine = gpu.turn_on("T4")
    source = tmp_path / "kernel.cu"
    source.write_text("")
    with pytest.raises(CannotRun, match=r"cannot run the CUDA kernels of `own_kernel`.* real GPU$"):
        _build(tmp_path)
    with pytest.raises(CannotRun, match="`of_a_file`"):
        cpp_extension.load("of_a_file", [str(source)], build_directory=str(tmp_path))
    assert builds == []
    assert [note for note in machine.notes() if "CUDA kernels were not built (of_a_file, own_kernel)" in note]


def test_extensions_in_cpp_are_built(builds: list[str], tmp_path: Path) -> None:
    machine = gpu.turn_on("T4")
    cpp_extension.load_inline("in_cpp", ["void f();"], functions=["f"], build_directory=str(tmp_path))
    assert builds == ["in_cpp"]
    assert not [note for note in machine.notes() if "CUDA kernels" in note]


def test_without_the_device_a_compiler_is_asked(builds: list[str], tmp_path: Path) -> None:
    gpu.turn_on("T4")
    gpu.turn_off()
    _build(tmp_path)
    assert builds == ["own_kernel"]


@pytest.mark.parametrize("values", ["stand-in", "real"])
def test_a_kernels_text_is_refused_in_one_line(values: str) -> None:
    before = torch.cuda._compile_kernel
    machine = gpu.turn_on(f"T4,values={values}")
    try:
        with pytest.raises(CannotRun, match=r"^the virtual GPU cannot run the CUDA kernel `add`, .* real GPU$"):
            torch.cuda._compile_kernel('extern "C" __global__ void add(float* a) {}', "add")
        assert [note for note in machine.notes() if "CUDA kernels were not built (add)" in note]
    finally:
        gpu.turn_off()
    assert torch.cuda._compile_kernel is before
