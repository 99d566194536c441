"""What CUDA builds of PyTorch asked their allocator for, call by call, as `benchmarks/stand_in_runtime` had them say it without a
GPU (`tests/data/asked_by_builds.txt`: version, what comes before, the call, and what it allocated and gave back)."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.operators import quantiles

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


def test_quantiles_put_together_here_ask_for_what_cpps_do(
    tool: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device of the installed PyTorch's side C++ puts them together; the rule for the other side asks for the same there."""
    side = (2, 14) if quantiles._RUNS_PLACES_FIRST else (2, 12)
    calls = [
        (f"a=r(3,10,7{gradient});q={share}", f"torch.{name}(a,q,{rest}interpolation='{way}')")
        for gradient in ("", ",grad=True")
        for name in ("quantile", "nanquantile")
        for share in ("0.3", "torch.tensor([.1,.5],device=d)")
        for rest in ("", "dim=1,", "dim=2,keepdim=True,")
        for way in ("linear", "nearest", "midpoint")
    ]
    gpu.turn_on(f"A100,torch={side[0]}.{side[1]},context=0MiB")
    try:
        tool["first_products"]()
        by_cpp = [tool["asked_for"](*call) for call in calls]
        monkeypatch.setattr(quantiles, "_RUNS_PLACES_FIRST", not quantiles._RUNS_PLACES_FIRST)
        assert [tool["asked_for"](*call) for call in calls] == by_cpp
    finally:
        gpu.turn_off()
