"""What CUDA builds of PyTorch asked their allocator for, call by call, as `benchmarks/stand_in_runtime` had them say it without a
GPU (`tests/data/asked_by_builds.txt`: version, what comes before, the call, and what it allocated and gave back)."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpumem_magic.virtual import gpu

HERE = Path(__file__).parent
ASKED: dict[str, list[tuple[str, str, str]]] = {}
for line in (HERE / "data" / "asked_by_builds.txt").read_text(encoding="utf-8").splitlines():
    if line and not line.startswith("#"):
        _version, _setup, _call, _events = line.split(" | ")
        ASKED.setdefault(_version, []).append((_setup, _call, _events))


@pytest.fixture(scope="module")
def tool() -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        folder = HERE.parent / "benchmarks" / "stand_in_runtime"
        patch.syspath_prepend(str(folder))
        yield runpy.run_path(str(folder / "running.py"), run_name="running")


@pytest.mark.parametrize("version", ASKED)
def test_a_build_asked_for_the_same(tool: dict[str, Any], version: str) -> None:
    gpu.turn_on(f"A100,torch={version},context=0MiB")
    try:
        tool["first_products"]()
        found = []
        for setup, call, _ in ASKED[version]:
            found.append((setup, call, " ".join(f"{what}{number}" for what, number in tool["asked_for"](setup, call))))
            tool["as_at_first"]()
    finally:
        gpu.turn_off()
    assert found == ASKED[version]
