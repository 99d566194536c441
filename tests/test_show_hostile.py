"""Damaged and hostile files on the whole road to a report and a page: one clear error or a correct load, and nothing executed.

A sample; `tests/differential/files.py` reads twenty thousand, and also holds them against the clock and the memory.
"""

from __future__ import annotations

import json
import pickle
import random
import tracemalloc
from pathlib import Path

import pytest
import torch
from hostile_snapshots import hand_made, mutations, recording, walk

import gpumem_magic
from gpumem_magic.user_report import Report
from gpumem_magic.virtual import gpu

MIB = 1 << 20
LOADS = {
    "overlapping segments",
    "one segment fifty times",
    "a trace for each of a hundred devices",
    "markup everywhere",
    "labels that are none",
    "a start that does not fit",
    "a start that is none",
}
HAND_MADE = sorted(hand_made(Path("canary")))


@pytest.mark.parametrize("name", HAND_MADE)
def test_hand_made_files(name: str, tmp_path: Path) -> None:
    canary, path = tmp_path / "canary", tmp_path / "case.pickle"
    path.write_bytes(hand_made(canary)[name])
    tracemalloc.start()
    try:
        text = walk(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert not canary.exists()
    assert (text == "") == (name in LOADS), text
    assert peak < 100 * MIB


def test_mutated_files(tmp_path: Path) -> None:
    path = tmp_path / "case.pickle"
    outcomes = []
    for content in mutations(seed=20240608, count=400):
        path.write_bytes(content)
        outcomes.append(walk(path))
    assert [one.name for one in tmp_path.iterdir()] == ["case.pickle"]
    loaded = outcomes.count("")
    assert 60 < loaded < 300, "both ways are walked"
    # The same words for many files would say nothing of what is wrong with each.
    assert len({text.partition(": ")[2][:40] for text in outcomes if text}) > 15


def test_texts_of_a_report_file_move_no_cursor(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    with gpumem_magic.measure(device="T4") as measured:
        kept = torch.zeros(2**22, device="cuda")
    del kept
    gpu.turn_off()
    data = measured.report.to_dict()
    hostile = "\x1b[2J\x1b[31mred\u202e"
    data["answer"] = data["peak"]["where"] = hostile
    for row in data["checkpoints"]:
        row["label"] = row["statement"] = hostile
    for group in data["peak"]["tensors"]:
        group.update(statement=hostile, expression=hostile, inner=hostile, kept_by=hostile)
    path.write_text(json.dumps(data))
    report = Report.load(path)
    for text in (str(report), report.explain(), report.show("all")):
        assert "red" in str(text)
        assert "\x1b" not in str(text)
        assert "\u202e" not in str(text)


def test_settings_that_are_no_numbers_are_said(tmp_path: Path) -> None:
    path = tmp_path / "case.pickle"
    data = recording(random.Random(1), 3)
    data["allocator_settings"] = {"roundup_power2_divisions": {"1": float("inf")}}
    path.write_bytes(pickle.dumps(data))
    assert any("settings in the file are not understood" in note for note in gpumem_magic.load(path).notes)
