"""Whole programs, predicted event by event: what an H100 80GB HBM3 (driver 580.159, torch 2.11.0+cu130) was asked for, in order.

The files in `data/recorded` were written there by `benchmarks/recordings/own.py record`.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import warm
from torch_versions import TORCH

from gpumem_magic.snapshot.pairing import pair

HERE = Path(__file__).resolve().parent
# What they leave in cycles goes when Python's collector comes, which counts what was made since the process began.
COLLECTED = {"maml_functional"}
RECORDED = sorted((HERE / "data" / "recorded").glob("*.json.gz"))


@pytest.fixture(scope="module")
def own() -> ModuleType:
    spec = importlib.util.spec_from_file_location("own", HERE.parent / "benchmarks" / "recordings" / "own.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# (It was tried with 2.11, 2.13 and 2.14: what PyTorch's Python code asks for changes with its version.)
@pytest.mark.skipif(TORCH < (2, 11), reason="PyTorch's own Python code was another")
@pytest.mark.parametrize("place", RECORDED, ids=[place.name.partition(".")[0] for place in RECORDED])
def test_a_program_asks_for_what_it_asked_the_card_for(
    own: ModuleType, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = place.name.partition(".")[0]
    if name not in COLLECTED:
        monkeypatch.setattr(own, "PYTHON", warm.executable())
    found = own.predicted(name, own.programs()[name], place, "H100,torch=2.11")
    assert not isinstance(found, str), found
    real, virtual, pairing = found
    assert len(pairing.a) > 100
    assert not pairing.alone_a
    assert not pairing.alone_b
    assert pairing.exact == pairing.freed_alike == len(pairing.pairs)
    assert virtual.growth == real.growth
    assert (virtual.peak_reserved, virtual.segments) == (real.peak_reserved, real.segments)


def test_a_recording_is_kept_without_its_stacks_and_read_again(own: ModuleType, tmp_path: Path) -> None:
    text = "import torch\nx = torch.zeros(1000, device='cuda')\ndel x\ny = torch.zeros(3, device='cuda')\n"
    snapshot = own.run("small", text, "T4", tmp_path)
    kept = own.reduced(snapshot.read_bytes(), "small")
    assert kept["action"] == ["segment_alloc", "alloc", "free_requested", "free_completed", "alloc"]
    assert kept["size"] == [2 << 20, 4000, 4000, 4000, 12]
    assert (kept["line"][1], kept["line"][-1]) == (2, 4)
    place = tmp_path / "small.json.gz"
    place.write_bytes(gzip.compress(json.dumps(kept).encode()))
    real, virtual, pairing = own.predicted("small", text, place, "T4")
    assert pairing.pairs == pair(real, virtual).pairs == [(0, 0), (1, 1)]
    figures = own.figures(real, virtual, pairing)
    assert list(figures.values())[:5] == ["2", "100.00 %", "100.00 %", "100.00 %", "+0.000 %"]


def test_a_program_that_needs_what_is_missing_is_left_out(own: ModuleType, tmp_path: Path) -> None:
    assert own.run("small", "import nowhere_to_be_found\n", "T4", tmp_path) == (
        "ModuleNotFoundError: No module named 'nowhere_to_be_found'"
    )
    environment = "#env A=1\nimport os\nassert os.environ['A'] == '2'\n"
    assert own.run("small", environment, "T4", tmp_path) == "AssertionError"
    assert sys.modules.get("nowhere_to_be_found") is None
