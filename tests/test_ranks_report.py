"""Several ranks in a report's faces: bars on one scale, the worst first, alike ranks as one, those that failed marked."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from matplotlib.patches import Rectangle
from report_samples import colab, trainer

from gpumem_magic.report.model import ReportError
from gpumem_magic.report.ranks import DONE, ENDED, FAILED, GONE, RUNNING
from gpumem_magic.report.side_by_side import OfRank, state_of, together
from gpumem_magic.user_report import Report
from gpumem_magic.views.html import card
from gpumem_magic.views.ranks import table
from gpumem_magic.views.text import render


@pytest.fixture(scope="module")
def report() -> Report:
    """Rank 0 out of memory, ranks 1 and 2 alike, rank 3 killed, 4 silent, 5-7 taken to be as 1."""
    ran = [OfRank(rank, state_of(one), one) for rank, one in enumerate((colab(), trainer(), trainer()))]
    silent = [OfRank(3, GONE, None), OfRank(4, RUNNING, None)]
    return Report.of(together([*ran, *silent], 8, taken={5: 1, 6: 1, 7: 1}))


def test_the_page_has_a_bar_for_each_kind_of_rank_on_one_scale(report: Report) -> None:
    page = card(report, None)
    head = page[: page.index("<hr>")]
    rows = re.findall(r"<tr>(.*?)</tr>", head)[1:]
    widths = [sum(map(float, re.findall(r"width:([\d.e-]+)%", row))) for row in rows]
    alarmed = ["gpumem-alarm" in row for row in rows]
    assert ["rank 0" in rows[0], "rank 3" in rows[1], "rank 4" in rows[2], "ranks 1-2, 5-7" in rows[3]] == [True] * 4
    assert alarmed == [True, True, True, False]
    assert report.ranks is not None
    assert report.ranks.lowest is not None
    assert report.ranks.highest is not None
    share = 100 * report.ranks.lowest / report.ranks.highest
    # Slivers of less than 0.05 % are left out.
    assert widths == [pytest.approx(100, abs=0.3), 0, 0, pytest.approx(share, abs=0.3)]


@pytest.mark.parametrize("bare", [False, True])
def test_the_picture_has_the_same_bars_above_the_report_of_one(report: Report, bare: bool) -> None:
    from gpumem_magic.views.figure import draw

    axes = draw(report, title=not bare, words=not bare).axes[0]
    places = {text.get_text(): text.get_position()[1] for text in axes.texts}
    labels = ["rank 0  out of memory", "rank 3  gone", "rank 4  no answer", "ranks 1-2, 5-7 (shown: 1)"]
    assert [places[label] for label in labels] == sorted(places[label] for label in labels)
    assert places[labels[-1]] < places["Rank 0 of 8:"] < places["before"]
    ends = {
        round(middle, 3): [
            (box.get_x(), box.get_x() + box.get_width())
            for box in axes.patches
            if isinstance(box, Rectangle) and box.get_y() < middle < box.get_y() + box.get_height()
        ]
        for middle in (places[labels[0]], places[labels[3]])
    }
    first, last = ([min(one[0] for one in bars), max(one[1] for one in bars)] for bars in ends.values())
    assert first[0] == pytest.approx(last[0])
    assert report.ranks is not None
    assert report.ranks.highest
    assert (last[1] - last[0]) / (first[1] - first[0]) == pytest.approx(
        (report.ranks.lowest or 0) / report.ranks.highest, abs=0.01
    )


def test_nothing_is_said_twice(report: Report) -> None:
    text = render(report, width=120)
    assert text.startswith("Rank 0 ran out of memory; rank 3 ended without a word")
    assert "Rank 3:" not in text
    assert "Ranks 5-7 did not run" in text
    assert "Rank 0 of 8:" in text


def test_who_hangs_is_told_from_those_who_wait() -> None:
    places = ["barrier (train.py:22)", "train.py:14", "barrier (train.py:22)"]
    ran = [OfRank(rank, ENDED, trainer(), place) for rank, place in enumerate(places)]
    found = Report.of(together(ran, 3))
    assert found.ranks is not None
    assert "at different lines: ranks 0, 2 at barrier (train.py:22); rank 1 at train.py:14." in found.ranks.answer
    assert {row.rank: row.like for row in found.ranks.rows} == {0: None, 1: None, 2: 0}
    text = render(found, width=200)
    assert text.count("Rank 1 was ended while it was at train.py:14") == 1
    # The report of rank 0 follows, and says it there.
    assert "Rank 0 was ended while" not in text
    alike = Report.of(together([OfRank(rank, ENDED, trainer(), places[0]) for rank in range(2)], 2))
    assert alike.ranks is not None
    assert alike.ranks.answer.startswith("Ranks 0-1 were ended. Both ranks peak at ")


@pytest.mark.parametrize(
    ("kind", "told"), [("KeyboardInterrupt", "Of 1 MiB."), ("ValueError", "ValueError at line 9. Of 1 MiB.")]
)
def test_what_ended_a_rank_from_outside_is_told_once(kind: str, told: str) -> None:
    whole = replace(trainer(), error=ReportError(kind, "", 9), answer=f"{kind} at line 9. Of 1 MiB.")
    found = together([OfRank(0, DONE, trainer()), OfRank(1, ENDED, whole, "train.py:9")], 2)
    assert found.ranks is not None
    said = next(row.said for row in found.ranks.rows if row.rank == 1)
    assert said == f"Rank 1 was ended while it was at train.py:9. {told}"


def test_whose_end_came_first_is_told_first() -> None:
    ended = OfRank(0, ENDED, trainer(), "train.py:9", (2,))
    failing = replace(trainer(), error=ReportError("RuntimeError", "", 9))
    ran = [
        ended,
        OfRank(1, FAILED, failing, "", (2,)),
        OfRank(2, GONE, None),
        OfRank(3, ENDED, trainer(), "train.py:9"),
    ]
    found = together(ran, 4)
    assert found.ranks is not None
    told = "Rank 2 ended without a word (killed, as by `kill -9` or for memory of the host); rank 3 was ended; "
    assert found.ranks.answer.startswith(f"{told}rank 1 then failed; the launcher then ended rank 0. ")
    said = next(row.said for row in found.ranks.rows if row.rank == 0)
    assert said.startswith("Rank 0 was ended by the launcher after rank 2 while it was at train.py:9. ")
    alone = together(ran, 4, virtual=True)
    assert alone.ranks is not None
    assert "then" not in alone.ranks.answer, "each ran alone"


def test_the_table_has_the_largest_categories_beside_those_that_differ() -> None:
    def rank(number: int, **sizes: int) -> OfRank:
        whole = trainer()
        sizes = {"optimizer_state": 3000, "gradients": 900, "parameters": 900, **sizes}
        peak = replace(whole.peak, categories={name: size << 20 for name, size in sizes.items()})
        return OfRank(number, state_of(whole), replace(whole, peak=replace(peak, allocated=6000 << 20)))

    ran = [rank(0, inputs=128, activations=1100, rounding=1), rank(1, activations=700, rounding=2)]
    found = Report.of(together(ran, 2))
    assert found.ranks is not None
    heads = table(found.ranks)[0]
    # Rounding differs, too, but by nothing that a reader would see.
    assert heads[3:-1] == ["parameters", "optimizer state", "inputs", "activations"]


def test_of_virtual_ranks_only_those_that_ran_are_told() -> None:
    ran = OfRank(3, state_of(trainer()), trainer())
    found = Report.of(together([ran], 8, virtual=True))
    assert found.ranks is not None
    assert [row.rank for row in found.ranks.rows] == [3]
    assert "Rank 3 of 8:" in render(found)


def test_ranks_whose_contexts_differ_are_alike() -> None:
    """NCCL has more buffers on a rank with more neighbours; what is allocated is the same."""
    one = trainer()
    more = one.peak.categories | {"context": (one.peak.categories["context"] or 0) + one.peak.allocated}
    other = replace(one, peak=replace(one.peak, categories=more))
    shown = together([OfRank(0, DONE, one), OfRank(1, DONE, other)], 2)
    assert shown.ranks is not None
    assert [(row.rank, row.like, row.differs) for row in shown.ranks.rows] == [(0, None, ""), (1, 0, "")]
