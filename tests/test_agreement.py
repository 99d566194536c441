"""Our categories against those of PyTorch's own tools, on five models: MemTracker's, and the profiler's; and a large model."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import gpumem_magic
from gpumem_magic.virtual import gpu

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:Module is None:UserWarning")


@pytest.fixture
def agreement(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[1] / "benchmarks"), *sys.path])
    # The other tools know nothing of libraries' workspaces, which come and go from 2.15 on, and may decide where the peak is.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "0")
    return importlib.import_module("agreement")


@pytest.mark.parametrize("number", range(5))
def test_every_category_is_as_memtracker_counts_it(agreement: Any, number: int) -> None:
    case = agreement.CASES[number]
    mine, theirs = agreement.ours(case, hooks=True), agreement.memtracker(case)
    counters = mine["optimizer state"] - theirs["optimizer state"]
    # Adam's counters, 4 bytes for each parameter, are not on the device.
    assert -400 <= counters <= 0
    assert (counters == 0) is case.sgd
    assert mine["parameters"] == theirs["parameters"]
    assert mine["inputs and buffers"] == theirs["inputs and buffers"]
    # A gradient is one from its birth here, and from its arrival at the parameter there.
    assert mine["gradients"] >= theirs["gradients"]
    assert mine["gradients"] + mine["work"] == theirs["gradients"] + theirs["work"]
    assert abs(mine["work"] - theirs["work"]) <= 0.02 * theirs["work"]


def test_the_comparison_would_show_a_difference(agreement: Any) -> None:
    same = dict.fromkeys(agreement.KINDS, 1000)
    assert agreement.worst(same, same) == 0
    assert agreement.worst(same, {**same, "parameters": 900}) == pytest.approx(0.02)
    assert agreement.worst(same, {**same, "work": 900}) == pytest.approx(0.02)
    assert agreement.worst(same, {**same, "work": 900, "gradients": 1100}) == 0


@pytest.mark.filterwarnings("ignore")
def test_every_category_is_as_the_profiler_counts_it_on_the_host(agreement: Any) -> None:
    small = agreement.Case("ResNet", agreement._bottlenecks([2, 2, 2, 2]), agreement._images(4, 96), sgd=True)
    for case in (agreement.CASES[1], small):
        mine, theirs = agreement.ours(case), agreement.profiled(case)
        assert mine["parameters"] == theirs["parameters"]
        assert mine["gradients"] + mine["work"] == pytest.approx(theirs["gradients"] + theirs["work"], rel=0.02)
        assert agreement.worst(mine, theirs) <= 0.02


def test_a_llama_of_7_billion_with_lora_has_its_sizes_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of the 32 layers: `benchmarks/seven_billion.py` builds all, and says how long that takes."""
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[1] / "benchmarks"), *sys.path])
    benchmark = importlib.import_module("seven_billion")
    gpu.turn_on("A100-80GB")
    try:
        with gpumem_magic.measure() as measured:
            model = benchmark.build(layers=2)
            tokens = torch.zeros(1, 64, dtype=torch.int64, device="cuda")
            model(input_ids=tokens, labels=tokens).loss.backward()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        after = measured.report.checkpoints[-1].categories
        frozen = 2 * 32000 * 4096 + 2 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096) + 4096
        # A matrix of 4096 x 8 and one of 8 x 4096 for each of two projections in each layer.
        assert sum(parameter.numel() for parameter in trained) == 2 * 2 * 2 * 8 * 4096
        assert after["parameters"] == 2 * (frozen + 2 * 2 * 2 * 8 * 4096)
        assert after["gradients"] == 2 * 2 * 2 * 2 * 8 * 4096
        del model, tokens, trained
    finally:
        gpu.turn_off()
