"""cuDNN asked about a card that is not there, and what the virtual GPU makes of its answers. A stub answers in its place."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from scratch_memory import scratch
from torch import nn

import gpumem_magic
from gpumem_magic.units import MIB
from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.card.models import CATALOG
from gpumem_magic.virtual.engine.memory import Convolution
from gpumem_magic.virtual.operators import cudnn_library
from gpumem_magic.virtual.operators.cudnn_answers import strides
from gpumem_magic.virtual.operators.cudnn_library import AskedLibrary, described, written

STUB = Path(__file__).with_name("stub_of_cudnn.c")
A100, T4 = CATALOG["A100-40GB"], CATALOG["T4"]
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="the stub is compiled")


def stub(folder: Path, version: int) -> str:
    file = folder / f"libstub{version}.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-w", "-D_GNU_SOURCE", f"-DVERSION={version}", "-o", file, STUB], check=True
    )
    return str(file)


@pytest.fixture
def library(tmp_path: Path) -> Iterator[AskedLibrary]:
    found = AskedLibrary(str(tmp_path / "nowhere.so"), stub(tmp_path, 92000))
    yield found
    found.close()


def call(**changes: Any) -> Convolution:
    plain: dict[str, Any] = {
        "way": "forward", "fine": (4, 16, 32, 30), "weight": (24, 16, 3, 3), "coarse": (4, 24, 32, 30), "stride": (1, 1),
        "padding": (1, 1), "dilation": (1, 1), "groups": 1, "dtype": torch.float32, "last": False,
    }  # fmt: skip
    return Convolution(**{**plain, **changes})


def sizes(
    library: AskedLibrary, of: Convolution, tf32: bool = True, deterministic: bool = False, model: Any = A100
) -> Any:
    return list(library.workspaces(of, model, tf32, deterministic))


@needs_compiler
def test_plans_come_in_the_order_in_which_pytorch_tries_them(library: AskedLibrary) -> None:
    assert library.version == 92000
    plane = 32 * 30
    assert sizes(library, call()) == [2_000_000 + plane, 3_000_000 + plane, 4_000_000 + plane]
    assert sizes(library, call(), tf32=False) == [3_000_000 + plane, 4_000_000 + plane]
    assert sizes(library, call(), deterministic=True) == [2_000_000 + plane, 3_000_000 + plane]
    # Tensor cores are no matter of TF32 in half precision.
    assert sizes(library, call(dtype=torch.half), tf32=False)[0] == 2_000_000 + plane
    assert sizes(library, call(last=True, way="weight"))[0] == 2_000_001
    assert sizes(library, call(), model=T4) == [2_000_000 + plane, 4_000_000 + plane]
    assert sizes(library, call(dtype=torch.complex64)) == []


@needs_compiler
def test_a_refusal_or_an_end_of_the_process_is_no_answer(library: AskedLibrary) -> None:
    assert sizes(library, call(), model=CATALOG["P100"]) == []
    assert sizes(library, call()) != []
    assert sizes(library, call(), model=CATALOG["H100"]) == []
    # The process is gone.
    assert sizes(library, call()) == []


@needs_compiler
def test_an_interrupted_question_is_asked_anew(library: AskedLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: AskedLibrary) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(AskedLibrary, "_line", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sizes(library, call(last=True))
    # It is not the answer to the first question.
    assert sizes(library, call())[0] == 2_000_000 + 32 * 30


def test_a_python_that_cannot_be_started_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    library = AskedLibrary("libcudnn.so.9")
    assert library.version == 0
    assert sizes(library, call()) == []


@needs_compiler
def test_an_old_library_is_not_asked(tmp_path: Path) -> None:
    old = AskedLibrary(stub(tmp_path, 90701))
    assert old.version == 0
    assert sizes(old, call()) == []
    old.close()


@needs_compiler
def test_a_forked_process_leaves_the_pipe_alone(library: AskedLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_owner", os.getpid() + 1)
    assert sizes(library, call()) == []


@needs_compiler
def test_a_variable_names_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cudnn_library.VARIABLE, stub(tmp_path, 91002))
    cudnn_library.installed.cache_clear()
    try:
        found = cudnn_library.installed()
        assert found is not None
        assert found.version == 91002
        found.close()
    finally:
        cudnn_library.installed.cache_clear()


def test_one_dimension_is_two() -> None:
    one = call(
        fine=(4, 16, 100),
        weight=(24, 16, 5),
        coarse=(4, 24, 50),
        stride=(2,),
        padding=(2,),
        dilation=(1,),
        dtype=torch.half,
    )
    assert written(one) == {
        "way": "forward", "fine": (4, 16, 1, 100), "weight": (24, 16, 1, 5), "coarse": (4, 24, 1, 50), "stride": (1, 2),
        "padding": (0, 2), "dilation": (1, 1), "dtype": "float16", "last": False,
    }  # fmt: skip
    assert written(call())["fine"] == (4, 16, 32, 30)


@pytest.mark.parametrize("shape", [(4, 3, 5, 6), (2, 3, 4, 5, 6)])
def test_strides_are_pytorchs(shape: tuple[int, ...]) -> None:
    last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    tensor = torch.empty(shape)
    assert strides(shape, False) == list(tensor.stride())
    assert strides(shape, True) == list(tensor.to(memory_format=last).stride())


def test_the_card_is_the_catalogues() -> None:
    card = described(T4)
    assert (card["deviceVer"], card["multiProcessorCount"], card["totalGlobalMem"]) == (750, 40, T4.total_bytes)


# ---- on a device


class Answering:
    """An installed cuDNN with these answers."""

    def __init__(self, version: int, *sizes: int) -> None:
        self.version, self.sizes = version, sizes
        self.asked: list[tuple[bool, bool]] = []

    def workspaces(self, call: Convolution, model: Any, tf32: bool, deterministic: bool) -> Iterator[int]:
        self.asked.append((tf32, deterministic))
        yield from self.sizes


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def turned_on(device: str, answers: Answering) -> gpu.VirtualMachine:
        monkeypatch.setattr(cudnn_library, "installed", lambda: answers)
        return gpu.turn_on(device)

    yield turned_on
    torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = False
    torch.backends.cudnn.allow_tf32 = True
    gpu.turn_off()


def layer_and_input() -> tuple[nn.Module, torch.Tensor]:
    layer = nn.Conv2d(16, 24, 3, padding=1, bias=False, device="cuda").requires_grad_(False)
    return layer, torch.zeros(4, 16, 32, 32, device="cuda")


def test_the_first_plan_with_room_is_taken(on: Any) -> None:
    on("virtual:256MiB,context=0,torch=2.13", Answering(92000, 400 * MIB, 48 * MIB, 7 * MIB))
    layer, x = layer_and_input()
    assert scratch(lambda: layer(x)) == 48 * MIB
    # The request that failed was one of PyTorch's own.
    assert torch.cuda.memory_stats()["num_ooms"] == 1


def test_it_is_asked_once_for_each_setting(on: Any) -> None:
    answers = Answering(92000, 8 * MIB)
    on("A100-40GB", answers)
    layer, x = layer_and_input()
    for _ in range(2):
        assert scratch(lambda: layer(x)) == 8 * MIB
    torch.backends.cudnn.allow_tf32 = False
    layer(x)
    torch.backends.cudnn.deterministic = True
    layer(x)
    assert answers.asked == [(True, False), (False, False), (False, True)]


def test_a_search_takes_the_largest_plan_that_a_free_block_has_room_for(on: Any) -> None:
    on("virtual:256MiB,context=0,torch=2.13", Answering(92000, 8 * MIB, 400 * MIB, 100 * MIB, 12 * MIB))
    torch.backends.cudnn.benchmark = True
    layer, x = layer_and_input()
    assert scratch(lambda: layer(x)) == 100 * MIB
    # Later calls take the chosen plan's, of which only the heuristics' first is known.
    assert scratch(lambda: layer(x)) == 8 * MIB
    assert torch.cuda.memory_stats()["num_ooms"] == 0


def test_without_an_answer_it_is_estimated(on: Any) -> None:
    on("A100-40GB,torch=2.6", Answering(92000))
    layer = nn.Conv2d(32, 24, 3, padding=1, bias=False, device="cuda").requires_grad_(False)
    x = torch.zeros(4, 32, 32, 32, device="cuda")
    # (Copies begin at multiples of 16 bytes, for which the allocator has one of its 512 more.)
    assert scratch(lambda: layer(x)) == x.nbytes + layer.weight.nbytes + 512


@pytest.mark.parametrize(
    ("version", "images", "expected"), [("2.2", 1, 128 * MIB), ("2.2", 4, 0), ("2.6", 4, 0), ("2.13", 4, 0)]
)
def test_a_plain_product_is_not_asked_for(on: Any, version: str, images: int, expected: int) -> None:
    answers = Answering(92000, 8 * MIB)
    on(f"A100-40GB,torch={version}", answers)
    layer = nn.Conv2d(16, 24, 1, bias=False, device="cuda").requires_grad_(False)
    x = torch.zeros(images, 16, 32, 32, device="cuda")
    assert scratch(lambda: layer(x)) == expected
    assert answers.asked == []


@pytest.mark.parametrize("option", ["cudnn=estimate", "cudnn=none", "cudnn=5MiB"])
def test_the_user_may_say_so(on: Any, option: str) -> None:
    answers = Answering(92000, 8 * MIB)
    on(f"A100-40GB,{option}", answers)
    layer, x = layer_and_input()
    assert scratch(lambda: layer(x)) != 8 * MIB
    assert answers.asked == []


@pytest.mark.parametrize(("version", "is_estimate"), [("2.13", False), ("2.5", True)])
def test_the_answer_of_another_version_is_an_estimate(on: Any, version: str, is_estimate: bool) -> None:
    on(f"A100-40GB,torch={version}", Answering(92000, 8 * MIB))
    with gpumem_magic.measure() as measured:
        layer, x = layer_and_input()
        layer(x)
    assert measured.report is not None
    assert measured.report.peak.categories["workspace"] == 8 * MIB
    assert any("cuDNN's scratch memory" in note for note in measured.report.notes) is is_estimate


@pytest.mark.parametrize(
    ("version", "tells"), [("2.13", " beside the convolution's tensors."), ("2.5", "(an estimate).")]
)
def test_a_search_that_is_a_good_part_of_the_peak_is_named(on: Any, version: str, tells: str) -> None:
    on(f"A100-40GB,torch={version}", Answering(92000, 8 * MIB, 64 * MIB))
    torch.backends.cudnn.benchmark = True
    with gpumem_magic.measure() as measured:
        layer, x = layer_and_input()
        layer(x)
    assert measured.report is not None
    (cause,) = [one for one in measured.report.causes if one.name == "convolution_scratch"]
    assert cause.text.startswith("cuDNN works with 64.0 MiB")
    assert cause.text.endswith(tells)
