"""What reports said of programs on an H100 80GB HBM3 (torch 2.11.0+cu130), beside those of a virtual one.

`benchmarks/recordings/h100_reports.json.gz` has what `benchmarks/recordings/reports.py record` keeps of a report, of runs there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import warm
from torch_versions import TORCH

_warm = pytest.fixture(autouse=True)(warm.in_place_of_python)

RECORDINGS = Path(__file__).resolve().parents[1] / "benchmarks" / "recordings"


@pytest.fixture(scope="module")
def reports() -> Iterator[ModuleType]:
    sys.path.insert(0, str(RECORDINGS))
    import reports

    yield reports
    sys.path.remove(str(RECORDINGS))


def test_every_report_of_the_card_adds_up(reports: ModuleType) -> None:
    kept = reports.read(RECORDINGS / "h100_reports.json.gz")
    assert kept.keys() <= reports.programs().keys()
    assert len(kept) > 50
    for name, one in kept.items():
        assert sum(one["peak"].values()) == one["allocated"], name
        assert one["status"] == 0, name
    assert [name for name, one in kept.items() if one["unknown"] > one["allocated"] // 1000] == [
        "decode_with_own_cache"
    ]


# (What PyTorch's Python code asks for changes with its version.)
@pytest.mark.skipif(TORCH < (2, 11), reason="PyTorch's own Python code was another")
def test_a_programs_report_is_the_cards(reports: ModuleType) -> None:
    kept = reports.read(RECORDINGS / "h100_reports.json.gz")["wgan_gp"]
    assert reports.differences(kept, reports.said("wgan_gp", reports.programs()["wgan_gp"], "H100,torch=2.11")) == []


def test_what_differs_is_told_but_for_figures_in_words(reports: ModuleType) -> None:
    real = {
        "status": 0,
        "allocated": 1000,
        "peak": {"parameters": 600, "workspace": 400},
        "end": {"parameters": 600},
        "where": "loss.backward(), line 3",
        "causes": ["steady"],
        "answer": "Of 1.0 GiB at the peak, 600 B are parameters.",
    }
    assert reports.differences(real, {**real, "answer": "Of 1,001 MiB at the peak, 601 B are parameters."}) == []
    virtual = {**real, "peak": {"parameters": 600, "temporaries": 400}, "causes": []}
    assert [one.partition(":")[0] for one in reports.differences(real, virtual)] == [
        "peak, temporaries",
        "peak, workspace",
        "causes",
    ]
    assert reports.differences(real, {"failed": "ModuleNotFoundError"}) == ["failed: ModuleNotFoundError"]
    assert reports.names_of(reports.differences(real, virtual)) == ["peak", "causes"]
