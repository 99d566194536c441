"""The tests for computers with a GPU, on a virtual one that answers as a real one, so that their bodies are right before."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

GPU = Path(__file__).parent / "gpu"


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *arguments],
        cwd=GPU.parents[1], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def test_they_pass_on_a_virtual_gpu() -> None:
    # The large models take most of the time, and differ in size only.
    said = run(str(GPU), "--virtual", "A100-40GB", "-k", "not costs and not bert and not resnet50 and not gpt2")
    found = re.search(r"(\d+) passed, (\d+) skipped", said)
    assert found is not None, said
    assert int(found[1]) >= 14
    assert "has not used CUDA yet has no stand-in" in said


def test_the_costs_are_printed_and_nothing_is_asserted_of_them() -> None:
    said = run(str(GPU), "--virtual", "T4", "-k", "costs and linear")
    assert re.search(r"linear: [\d.]+ s plain, [\d.]+ s measured, ratio [\d.]+; [\d,]+ events", said)


def test_without_a_gpu_they_are_skipped_with_a_reason() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this computer has a GPU")
    said = run(str(GPU), "-k", "streams")
    assert "needs a GPU that PyTorch can use" in said
