"""`benchmarks/compiled.py --against`: what was recorded on a card, cut into steps and compared."""

from __future__ import annotations

import importlib
import json
import lzma
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import warm

_warm = pytest.fixture(autouse=True)(warm.in_place_of_python)

KIB = 1 << 10
ROOT = Path(__file__).parents[1]
RECORDED = sorted(Path(__file__).with_name("data").joinpath("compiled").glob("*.xz"))


@pytest.fixture(scope="module")
def compared() -> Iterator[Any]:
    """The module, which lies beside the package."""
    folder = str(ROOT / "benchmarks")
    sys.path.insert(0, folder)
    yield importlib.import_module("compiled_compared")
    sys.path.remove(folder)


def saved(folder: Path, *sizes: int, error: str = "") -> Path:
    """A block in the building, and in one step as many as `sizes`, each freed behind the next one's birth."""
    events: list[list[Any]] = [["segment_alloc", 0, 1 << 21, 0, 0], ["alloc", 0, KIB, 0, 0]]
    place, earlier = 4 * KIB, None
    for size in sizes:
        events.append(["alloc", place, size, 0, 1])
        if earlier is not None:
            events += [[f"free_{how}", *earlier, 0, 1] for how in ("requested", "completed")]
        place, earlier = place + 4 * KIB, (place, size)
    counts = len(sizes), max(0, len(sizes) - 1)
    rows = [
        {"step": step, "allocated": KIB, "reserved": 1 << 21, "max_allocated": peak, "allocations": made, "frees": gone}
        for step, peak, made, gone in (
            ("begin", 0, 0, 0),
            ("made", KIB, 1, 0),
            ("step 1", sum(sizes), 1 + counts[0], counts[1]),
        )
    ]
    frames = [["net.py", "make", 3], ["net.py", "run", 7]]
    data = {
        "name": "net",
        "error": error,
        "libraries": {},
        "rows": rows,
        "events": events,
        "stacks": [[0], [1]],
        "frames": frames,
    }
    path = folder / f"{len(list(folder.iterdir()))}.xz"
    path.write_bytes(lzma.compress(json.dumps(data).encode()))
    return path


def test_events_are_the_steps_in_which_they_came(tmp_path: Path, compared: Any) -> None:
    found = compared.read(saved(tmp_path, 512, 1024))
    counts = {name: [event.action for event in part.events] for name, part in found.parts.items()}
    assert counts["begin"] == []
    assert counts["made"] == ["segment_alloc", "alloc"]
    assert counts["step 1"] == ["alloc", "alloc", "free_requested", "free_completed"]


def test_steps_are_compared_allocation_by_allocation(tmp_path: Path, compared: Any) -> None:
    real, virtual = compared.read(saved(tmp_path, 512, 2048, 1024)), compared.read(saved(tmp_path, 512, 1000))
    steps = real.parts["step 1"], virtual.parts["step 1"]
    found = compared.compared(*steps)
    # 1,000 bytes lie in a block of 1,024.
    assert (found.pairs, found.exact, found.alone_a) == ([(0, 0), (2, 1)], 1, [1])
    assert "2,048 bytes  net.py:7 run" in compared.explained(*steps)
    assert f"{-(2048 + 24):+,}" in compared.line(real, virtual)


def test_what_failed_on_the_card_is_said(tmp_path: Path, compared: Any) -> None:
    failed = compared.read(saved(tmp_path, 512, error="RuntimeError: no"))
    assert "on the card RuntimeError: no" in compared.line(failed, failed)


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda path: path.stem)
def test_later_steps_are_those_of_a_real_h100(recorded: Path, tmp_path: Path, compared: Any) -> None:
    """Recorded on 26 November 2026 (driver 580.159, PyTorch 2.11, CUDA 13.0), without the stacks; each allocation of what the
    compiler of the installed version makes, and where it is freed."""
    here = tmp_path / recorded.name
    command = [
        sys.executable,
        ROOT / "benchmarks" / "compiled_programs.py",
        recorded.stem,
        here,
        "--device",
        "H100,torch=2.11",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300
    )
    assert done.returncode == 0, done.stderr
    real, virtual = compared.read(recorded), compared.read(here)
    assert real.libraries["device"] == "NVIDIA H100 80GB HBM3"
    for step in ("step 2", "step 3", "step 4"):
        found = compared.compared(real.parts[step], virtual.parts[step])
        assert len(found.pairs) == len(found.a) == len(found.b) == found.exact == found.freed_alike > 0
        keys = ("allocated", "max_allocated", "reserved")
        assert [virtual.parts[step].figures[key] for key in keys] == [real.parts[step].figures[key] for key in keys]
