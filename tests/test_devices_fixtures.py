"""Recorded runs of the real device's road (`tests/gpu/record_fixture.py` makes them): rows, peaks and categories hold."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import fixtures
import pytest
import warm

from gpumem_magic.allocator.replay import replay
from gpumem_magic.attribution.view import DeviceView
from gpumem_magic.report.build import build
from gpumem_magic.report.notes import gaps_of

_warm = pytest.fixture(autouse=True)(warm.in_place_of_python)

DATA = Path(__file__).parent / "data"
PATHS = sorted(DATA.glob("*.json.gz"))


def test_there_are_fixtures() -> None:
    assert len(PATHS) >= 2


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_rows_and_peaks_are_what_pytorch_said(path: Path) -> None:
    fixture = fixtures.load(path)
    recording = fixture.recording
    view = DeviceView(recording, recording.primary)
    points = [point for point in recording.checkpoints if point.kind == "statement"]
    assert len(points) == len(fixture.told)
    for point, (allocated, reserved, highest) in zip(points, fixture.told, strict=True):
        position = point.moment.positions[recording.primary]
        assert (view.timeline.allocated_at(position), view.timeline.reserved_at(position)) == (allocated, reserved)
        # PyTorch's peak is since the run began; each row's tells that up to it.
        assert view.timeline.peak(0, position)[0] == highest
    assert gaps_of(view) == []


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_categories_are_what_they_were(path: Path) -> None:
    fixture = fixtures.load(path)
    report = build(fixture.recording)
    assert [dict(row.categories) for row in report.checkpoints] == fixture.categories
    for row in report.checkpoints:
        assert (row.categories["unknown"] or 0) <= 0.01 * row.allocated
    by_line = {row.line: row.categories for row in report.checkpoints if row.iteration in ((), (1,))}
    assert by_line[6]["gradients"] == by_line[2]["parameters"]
    assert (by_line[7]["optimizer_state"] or 0) >= 2 * (by_line[2]["parameters"] or 0)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_the_emulator_makes_the_same_decisions(path: Path) -> None:
    fixture = fixtures.load(path)
    log = fixture.recording.logs[fixture.recording.primary]
    result = replay(log.start, log.events, log.settings)
    assert result.agrees
    assert (result.allocator.allocated, result.allocator.reserved) == fixture.told[-1][:2]


def test_a_recorder_makes_them_and_says_how_big(tmp_path: Path) -> None:
    script = Path(__file__).parent / "gpu" / "record_fixture.py"
    path = tmp_path / "made.json.gz"
    made = subprocess.run(
        [sys.executable, str(script), "linear", str(path), "--virtual", "T4", "--iterations", "2"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    assert re.search(r"made\.json\.gz: \d+ events, 11 rows", made.stdout)
    fixture = fixtures.load(path)
    assert [row[:2] for row in fixture.told] == [
        (point.moment.counters[0].allocated, point.moment.counters[0].reserved)
        for point in fixture.recording.checkpoints
        if point.kind == "statement"
    ]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_nobodys_names_are_in_them(path: Path) -> None:
    import gzip

    text = gzip.decompress(path.read_bytes()).decode()
    assert not re.search(r"[/\\]\w+[/\\]|GPU-|@", text)
    assert json.loads(text)["facts"]["uuid"] is None
    assert path.stat().st_size < 200_000
