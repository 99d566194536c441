"""Answers that are tables: the same figures as text and as HTML, and nothing that somebody's name could run."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from IPython.utils.capture import capture_output
from shell_fakes import clean_shell
from test_report_html import HOSTILE, Reader, without_style

from gpumem_magic.notebook.history import CellRecord, State, sheet, waterfall
from gpumem_magic.views import sheet as sheets
from gpumem_magic.views.sheet import CAME, THERE, Sheet

MIB = 1 << 20


def records() -> list[CellRecord]:
    states = [State(size * MIB, size * MIB, None) for size in (0, 10, 40, 5)]
    return [
        CellRecord(number, HOSTILE, HOSTILE, before, after, after.allocated + MIB, HOSTILE if number == 2 else None)
        for number, (before, after) in enumerate(pairwise(states), start=1)
    ]


def test_the_page_has_the_figures_of_the_text_and_hostile_text_stays_text() -> None:
    rows = [("MiB", "held by"), ("1.5", HOSTILE), ("  0.5", "y")]
    made = Sheet(HOSTILE, rows, range(1), f"after {HOSTILE}", code=(1,), bars=[((THERE, 3),), ((CAME, 1),)], whole=4)
    page = made.html()
    assert "<script" not in page
    assert "<img" not in page
    reader = Reader(without_style(page))
    assert {tag for tag, _ in reader.elements} <= {"div", "p", "table", "thead", "tbody", "tr", "th", "td", "code", "i"}
    assert reader.text.count(HOSTILE.partition("`")[0]) == 3
    assert re.findall(r"width:([\d.]+)%", page) == ["75", "25"]
    for cell in ("1.5", "0.5", "held by"):
        assert cell in reader.text
        assert cell in str(made)


def test_history_is_the_waterfall_and_a_table_of_the_same_runs() -> None:
    runs = records()
    made = sheet(runs, left_out=5)
    assert str(made) == waterfall(runs, 5)
    reader = Reader(without_style(made.html()))
    assert sum(tag == "tr" for tag, _ in reader.elements) == len(runs) + 1
    for word in ("[1]", "+10", "+30", "-35", "5 earlier runs are left out."):
        assert word in reader.text
    # A bar is as long as what was there and what came, went, or was there for a moment.
    widths = [sum(map(float, re.findall(r"width:([\d.]+)%", bar))) for bar in made.html().split("gpumem-share")[-3:]]
    assert widths == pytest.approx([100 * 11 / 41, 100, 100 * 40 / 41], abs=0.1)
    assert str(sheet([])) == sheet([]).head == waterfall([])


def test_a_column_for_new_peaks_is_there_where_there_are_some() -> None:
    runs = records()
    assert any(one.peak is not None for one in runs)
    low = [replace(one, peak=None) for one in runs]
    for found, wanted in ((runs, True), (low, False)):
        assert ("new peak" in waterfall(found)) is ("new peak" in sheet(found).html()) is wanted
        assert len({len(row) for row in sheet(found).rows}) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_notebook_gets_both_and_a_terminal_the_text(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Sheet("head", [("MiB", "x"), ("1", "y")])
    if fails:

        def broken(_self: Any) -> str:
            raise RuntimeError("no page")

        monkeypatch.setattr(Sheet, "html", broken)
    with clean_shell():
        for terminal in (True, False):
            monkeypatch.setattr(sheets, "in_terminal", lambda terminal=terminal: terminal)
            with capture_output() as captured:
                sheets.show(made)
            if terminal or fails:
                assert (captured.stdout, captured.outputs) == (f"{made}\n", [])
            else:
                (shown,) = captured.outputs
                assert captured.stdout == ""
                assert shown.data == {"text/plain": str(made), "text/html": made.html()}
