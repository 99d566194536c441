"""How much of what should be said a report says, and how soon."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from situations.reading import Situation

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

from test_innocent_cells import DESCRIBING

# The worst first. Of an innocent twin only "false" and "right" are said.
GRADES = ("false", "wrong", "silent", "partly", "full", "right")
_LINES = 2


def first_lines(text: str) -> str:
    """The first two lines of a report's text; what was wrapped is one line."""
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(" ") and lines:
            lines[-1] += f" {line.strip()}"
        elif line.strip():
            lines.append(line)
    return "\n".join(lines[:_LINES])


def missing(situation: Situation, words: str) -> list[str]:
    """The kinds of facts that the words don't show."""
    return [
        kind
        for kind, patterns in situation.facts.items()
        if not all(re.search(pattern, words, re.I | re.S) for pattern in patterns)
    ]


def grade(situation: Situation, words: str, causes: Sequence[str]) -> str:
    """One of `GRADES`: everything is said; the cause, or where and what to do; something else is blamed; or nothing is."""
    blamed = set(causes) - DESCRIBING
    if situation.is_innocent:
        return "false" if blamed else "right"
    lacks = missing(situation, words)
    if not lacks:
        return "full"
    if "cause" not in lacks or ("place" in situation.facts and "remedy" in situation.facts and lacks == ["cause"]):
        return "partly"
    return "wrong" if blamed else "silent"
