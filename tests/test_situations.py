"""What reports say about situations from public threads: never less than `benchmarks/situations/scores.json` has."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import warm

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

from situations import grading, reading  # noqa: E402

_warm = pytest.fixture(autouse=True)(warm.in_place_of_python)

SCORES: dict[str, str] = json.loads((reading.HERE / "scores.json").read_text("utf-8"))
SITUATIONS = {one.name: one for one in reading.situations()}
SAMPLE = [one for one in SITUATIONS.values() if one.sample]


@cache
def _tried() -> dict[str, Any]:
    """The sample's grades, from a process of its own: it splits off others, which a test runner's threads would not survive."""
    answer = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "situations"), "--sample", "--json"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", [one.name for one in SAMPLE])
def test_no_answer_gets_worse(name: str) -> None:
    tried = _tried()
    if name in tried["skipped"]:
        assert not SITUATIONS[name].cells or "No module named" in tried["skipped"][name], tried["skipped"][name]
        pytest.skip(tried["skipped"][name])
    assert grading.GRADES.index(tried["grades"][name]) >= grading.GRADES.index(SCORES[name])


def test_all_patterns_can_be_read_and_all_grades_are_known() -> None:
    for one in SITUATIONS.values():
        for patterns in one.facts.values():
            assert all(re.compile(pattern) for pattern in patterns)
        assert set(one.facts) <= set(reading.KINDS)
    assert set(SCORES.values()) <= set(grading.GRADES)
    assert set(SCORES) <= set(SITUATIONS)


def test_grades() -> None:
    guilty = reading.Situation("a", "T4", ("",), {"cause": ("leak",), "place": (r"x\.y",), "remedy": ("clear",)})
    assert grading.grade(guilty, "a leak in x.y: clear it", ["growth"]) == "full"
    assert grading.grade(guilty, "a leak", ["growth"]) == "partly"
    assert grading.grade(guilty, "x.y: clear it", ["growth"]) == "partly"
    assert grading.grade(guilty, "it is the weather", ["growth"]) == "wrong"
    assert grading.grade(guilty, "x.y", []) == "silent"
    innocent = reading.Situation("b", "T4", ("",))
    assert grading.grade(innocent, "", ["optimizer_states"]) == "right"
    assert grading.grade(innocent, "", ["growth"]) == "false"


def test_the_first_two_lines_come_with_what_was_wrapped() -> None:
    assert grading.first_lines("one\n  more\n\ntwo\nthree\n") == "one more\ntwo"
