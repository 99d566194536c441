"""The benchmark of what measuring costs: it runs on both roads, calls a dry run one, and judges goals only on a real GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import warm

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import overhead  # noqa: E402

_warm = pytest.fixture(autouse=True)(warm.in_place_of_python)


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "overhead.py"), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("road", ["IPython", "none"])
def test_a_dry_run_measures_every_side_and_is_called_one(road: str, tmp_path: Path) -> None:
    path = tmp_path / "ratios.json"
    quick = ["--virtual", "T4", "--steps-ms", "5", "--pairs", "1", "--seconds", "0.02", "--json", str(path)]
    said = run(*quick, *(["--without-ipython"] if road == "none" else []))
    assert "NOT FIGURES OF A GPU" in said
    assert ("without IPython" in said) == (road == "none")
    assert ", met" not in said
    assert "MISSED" not in said
    (sides,) = json.loads(path.read_text())["ratios"].values()
    wanted = {"plain again", "%%gpumem", "%%gpumem --no-lines", "%gpumem_watch", "torch.profiler"}
    assert wanted <= set(sides)
    assert all(len(ratios) == 1 and ratios[0] > 0 for ratios in sides.values())
    for name in wanted:
        assert f"| {name} |" in said


def test_the_goal_is_judged_by_the_median_and_only_for_us() -> None:
    bench = overhead.Bench(5.0, {}, 1)
    bench.found = {
        "%%gpumem": overhead.Found([1.00, 1.02, 9.0], [0.5] * 3, [5.0] * 3),
        "%gpumem_watch": overhead.Found([1.05, 1.06, 1.07], [0.5] * 3, [5.0] * 3),
        "torch.profiler": overhead.Found([1.5, 1.5, 1.5], [0.5] * 3, [5.0] * 3),
    }
    _, _, cell, watch, profiler = overhead.lines([bench], real=True)
    assert cell == "| 5.0 ms | %%gpumem | 1.020 | 1.000 to 9.000 | 0.50 s | 1.03, met |"
    assert watch.endswith("| 1.03, MISSED |")
    assert profiler.endswith("|  |")
    assert overhead.lines([bench], real=False)[2].endswith("| 1.03 |")


def test_without_a_gpu_it_says_so_in_a_line() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this computer has a GPU")
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "overhead.py")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "there is no GPU here" in done.stderr
    assert "Traceback" not in done.stderr
