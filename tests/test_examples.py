"""The examples of reports in docs/examples are what their cells show today."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import warm

_warm = pytest.fixture(autouse=True)(warm.in_place_of_python)

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "docs" / "examples"


def test_the_examples_are_todays() -> None:
    texts = [path.read_text("utf-8") for path in sorted(EXAMPLES.glob("*.txt"))]
    assert len(texts) >= 10
    versions = {found[1] for text in texts if (found := re.search(r"^The cell \(.*, torch (.+)\):$", text, re.M))}
    if versions != {torch.__version__}:
        pytest.skip(f"the examples were written with torch {', '.join(versions)}")
    command = [sys.executable, str(ROOT / "benchmarks" / "examples.py"), "--compare"]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_each_answers_in_its_first_lines_and_is_short() -> None:
    for path in EXAMPLES.glob("*.txt"):
        report = path.read_text("utf-8").partition("\n---")[0].splitlines()
        # What fills the memory comes first, or that nothing is to be mended, and where the peak is after it.
        assert report[0].startswith(("Of ", "`", "Out of memory", "There is no GPU", "Nothing piles up")), path.name
        assert max(map(len, report)) <= 100, path.name
        assert len(report) <= 75, path.name
