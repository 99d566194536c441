"""Long runs on a real device: what is kept is bounded, the peak is exact, and what was left out is counted."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from allocator_programs import PeaksSince
from cuda_fakes import FakeNvml, FakeTorch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpumem_magic.devices.cuda import CudaMachine
from gpumem_magic.devices.driver import Driver
from gpumem_magic.recording.recorder import Recorder
from gpumem_magic.recording.thinning import MOST
from gpumem_magic.report.build import build
from gpumem_magic.report.model import ReportData, Row
from gpumem_magic.units import MIB


class Run:
    """A recorder with little room, and a program's allocations by name."""

    def __init__(self, most: int, ring: int = 60) -> None:
        self.torch = FakeTorch()
        self.most = most
        self.machine = CudaMachine(self.torch, Driver(FakeNvml(self.torch)), ring)
        self.recorder = Recorder(self.machine, most=most)
        self.heaviest = 0
        self.recorder.start()

    def row(self, line: int, iteration: tuple[int, ...] = (), loops: tuple[int, ...] = ()) -> None:
        self.recorder.checkpoint("statement", f"line {line}", f"line {line}", line, iteration, loops)
        self.look()

    def look(self) -> None:
        marks = self.log.marks
        self.heaviest = max(self.heaviest, len(self.recorder._checkpoints), len(marks) // 3)

    @property
    def log(self) -> Any:
        return self.recorder.logs[0]._opened

    def spike(self, size: int) -> None:
        self.torch.free(self.torch.alloc(size))

    def end(self) -> ReportData:
        report = build(self.recorder.finish())
        assert not any("add up" in note or "gpumem_magic failed" in note for note in report.notes), report.notes
        for row in every_row(report.checkpoints):
            sizes = {name: size or 0 for name, size in row.categories.items()}
            outside = sizes["context"] + sizes["other_processes"]
            assert sum(sizes.values()) - outside == row.reserved
            assert sum(sizes.values()) == row.device_used
        return report


def every_row(rows: tuple[Row, ...]) -> Iterator[Row]:
    for row in rows:
        yield row
        yield from every_row(row.parts)


def test_the_rows_of_a_loop_are_those_of_the_whole_loop() -> None:
    run = Run(most=200)
    base = run.torch.alloc(8 * MIB)
    run.row(2)
    for turn in range(1, 601):
        batch = run.torch.alloc(2 * MIB)
        run.row(4, (turn,), (3,))
        run.spike(60 * MIB if turn == 234 else 4 * MIB)
        run.row(5, (turn,), (3,))
        if turn == 401:
            run.torch.alloc(16 * MIB)
        run.torch.free(batch)
        run.row(6, (turn,), (3,))
    run.torch.free(base)
    assert run.heaviest <= 220
    report = run.end()
    assert report.peak.peak_allocated == (8 + 2 + 60) * MIB
    (folded,) = report.folded
    assert (folded.line, folded.total, folded.kept) == (3, 600, 8)
    turns = [row.iteration[0] for row in report.checkpoints if row.line == 5]
    assert turns == [1, 2, 3, 234, 401, 598, 599, 600]
    peaks = {row.iteration[0]: row.peak_allocated for row in report.checkpoints if row.line == 5}
    # Its events are gone, and the counters tell no peak below the highest: what is shown is what is known.
    assert 10 * MIB <= peaks.pop(401) <= 14 * MIB
    assert peaks == {
        **dict.fromkeys((1, 2, 3), 14 * MIB),
        234: 70 * MIB,
        **dict.fromkeys((598, 599, 600), 30 * MIB),
    }
    assert [row.allocated for row in report.checkpoints if row.line == 6][-1] == 24 * MIB
    assert any("iterations in its middle were measured and not kept" in note for note in report.notes)


@pytest.mark.parametrize("turns", [30, 300])
def test_iterations_inside_a_statement_keep_their_numbers(turns: int) -> None:
    run = Run(most=200)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for turn in range(1, turns + 1):
        kept = run.torch.alloc(2 * MIB)
        model(torch.ones(2)).sum().backward()
        run.spike(50 * MIB if turn == 150 else MIB)
        optimizer.step()
        run.torch.free(kept)
        run.look()
    run.row(2)
    assert run.heaviest <= 220
    report = run.end()
    row = next(row for row in report.checkpoints if row.line == 2)
    labels = [part.label for part in row.parts if part.kind == "part"]
    expected = {f"iteration {number}" for number in (1, 2, 3, turns - 2, turns - 1, turns)}
    if turns == 300:
        expected.add("iteration 150")
        assert report.peak.peak_allocated == 52 * MIB
        assert "iteration 150" in report.peak.where
    assert expected <= set(labels)
    assert [(folded.line, folded.total) for folded in report.folded] == [(2, turns)]
    assert [int(label.split()[1]) for label in labels] == sorted(int(label.split()[1]) for label in labels)
    # An iteration's peak is its own, not that of those left out before it.
    last = row.parts[-1]
    assert last.peak_allocated <= 3 * MIB


@pytest.mark.parametrize("in_rows", [False, True])
@pytest.mark.parametrize("turns", [12, 300])
def test_iterations_that_repeat_are_those_that_ran(turns: int, in_rows: bool) -> None:
    run = Run(most=200, ring=4000)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for turn in range(1, turns + 1):
        model(torch.ones(2)).sum().backward()
        run.spike(MIB)
        optimizer.step()
        if in_rows:
            run.row(3, (turn,), (2,))
    run.row(4)
    (said,) = [note for note in run.end().notes if "repeat exactly" in note]
    found = re.fullmatch(r"Iterations (\d+)-(\d+) of (\d+) repeat exactly\.", said)
    assert found is not None
    first, last, total = map(int, found.groups())
    assert (last, total) == (turns, turns)
    # What was not kept is not said to repeat.
    assert first <= 2 if turns == 12 else 150 < first < 298


def test_inner_loops_are_counted_in_all() -> None:
    run = Run(most=100)
    for epoch in range(1, 4):
        for batch in range(1, 101):
            run.spike(2 * MIB)
            run.row(4, (epoch, batch), (2, 3))
        run.spike(9 * MIB)
        run.row(5, (epoch,), (2,))
    report = run.end()
    totals = {folded.line: folded.total for folded in report.folded}
    assert totals[3] == 300
    assert {row.iteration for row in report.checkpoints if row.line == 5} >= {(1,), (3,)}
    assert {row.peak_allocated // MIB for row in report.checkpoints if row.line == 4} <= {0, 2}
    assert report.peak.peak_allocated == 9 * MIB


@example(steps=[0] * 26 + [700, 0, 0, 0], ring=4, most=17)
@example(steps=[0] * 28 + [700, MIB], ring=4, most=16)
@settings(max_examples=15)
@given(
    steps=st.lists(st.sampled_from([0, 700, MIB, 5 * MIB, 30 * MIB]), min_size=30, max_size=80),
    ring=st.integers(4, 200),
    most=st.integers(16, 80),
)
def test_whatever_is_left_out_the_figures_of_what_is_shown_are_the_counters(
    steps: list[int], ring: int, most: int
) -> None:
    run = Run(most, ring)
    device = run.machine.devices[0]
    told: dict[tuple[int, int], tuple[int, int]] = {}
    peaks = PeaksSince(run.torch.gpus[0].allocator)
    live: list[int] = []
    for turn, size in enumerate(steps, start=1):
        for line in (3, 4):
            if size:
                live.append(run.torch.alloc(size))
            if len(live) > 3:
                run.torch.free(live.pop(0))
            run.row(line, (turn,), (2,))
            now = device.counters()
            told[line, turn] = now.allocated, now.reserved
    report = run.end()
    rows = [row for row in report.checkpoints if row.kind == "statement"]
    assert all((row.allocated, row.reserved) == told[row.line, row.iteration[0]] for row in rows)
    assert report.peak.peak_allocated == peaks.allocated
    totals = {folded.line: folded.total for folded in report.folded}
    shown = {row.iteration for row in rows}
    assert totals.get(2, len(shown)) == len(steps)


def test_an_hour_fits_into_200_mib() -> None:
    """Host memory of a run that is five times too long for what is kept, scaled to what is kept in earnest."""
    most = 200
    tracemalloc.start()
    try:
        run = Run(most)
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        for turn in range(5 * most // 2):
            run.spike(MIB)
            run.row(3, (turn + 1,), (2,))
            run.row(4, (turn + 1,), (2,))
        highest = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    run.end()
    print(f"{highest / most * MOST / MIB:.0f} MiB for what is kept of the longest run")
    assert highest / most * MOST < 80 * MIB
