"""The rows of a report as a tree of entries, and which of them are shown where nothing can be opened."""

from __future__ import annotations

from dataclasses import replace

import pytest
import report_samples as samples
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumem_magic.report.model import Row, Skipped
from gpumem_magic.report.rows import ALIKE, MOST, REST, ROW, SEVERAL, STILL, TURN, Entry, entries, opened
from gpumem_magic.user_report import Report
from gpumem_magic.views.lines import numbers_of, shown_lines
from gpumem_magic.views.opened_row import OpenedRows

MIB = samples.MIB


def state(line: int, held: int, *, peak: int = 0, turn: tuple[int, ...] = (), loops: tuple[int, ...] = ()) -> Row:
    """A statement after which so many MiB are held, with a peak of so many inside it."""
    made = samples.row(f"statement({line})", samples.state(activations=held), line=line, iteration=turn, peak=peak)
    return replace(made, loops=loops)


def report_of(rows: list[Row]) -> Report:
    first = samples.row("", samples.state(activations=0), kind="before", label="before")
    last = replace(rows[-1], kind="after", label="after", statement="", line=0, iteration=(), loops=())
    return replace(samples.small(), checkpoints=(first, *rows, last))


def words(report: Report, most: int = MOST) -> list[tuple[object, ...]]:
    return [
        (entry.kind, *entry.outer, entry.first, entry.last) if entry.turns else (entry.kind, entry.row.line)
        for entry, _ in opened(report, most)
    ]


def rows_in(entry: Entry) -> list[Row]:
    """What it stands for, read from what it opens into."""
    if entry.kind in (ROW, REST) and not (entry.kind == REST and entry.inner):
        return [entry.row]
    return [row for inner in entry.inner for row in rows_in(inner)]


def steady(turns: int, loops: tuple[int, ...] = (3,), outer: tuple[int, ...] = (), start: int = 0) -> list[Row]:
    """The first turn leaves 30 MiB more, the others what they found."""
    rows = []
    for turn in range(1, turns + 1):
        left = 30 if start == 0 else start
        rows += [
            state(4, left + 20 if turn > 1 or start else 20, turn=(*outer, turn), loops=loops),
            state(5, left, peak=left + 40, turn=(*outer, turn), loops=loops),
        ]
    return rows


def test_turns_that_moved_memory_alike_are_one_entry() -> None:
    found = entries(report_of(steady(9)))
    assert [(entry.kind, entry.first, entry.last) for entry in found[1:-1]] == [(TURN, 1, 1), (ALIKE, 2, 9)]
    alike = found[2]
    assert [entry.kind for entry in alike.inner] == [ROW, ROW, REST]
    rest = alike.inner[-1]
    assert (rest.first, rest.last, rest.like, rest.turns, rest.change) == (3, 9, 2, 7, 0)
    assert rest.row.peak_allocated == 70 * MIB
    assert words(report_of(steady(9))) == [(ROW, 0), (ROW, 4), (ROW, 5), (ROW, 4), (ROW, 5), (REST, 3, 9), (ROW, 0)]


def test_turns_that_each_keep_the_same_are_alike_and_say_what_all_kept() -> None:
    rows = [state(4, 20 * turn, peak=20 * turn + 5, turn=(turn,), loops=(3,)) for turn in range(1, 31)]
    found = entries(report_of(rows))[1]
    assert (found.kind, found.first, found.last, found.change) == (ALIKE, 1, 30, 600 * MIB)
    assert found.inner[-1].change == 580 * MIB
    rows[11] = replace(rows[11], peak_allocated=rows[11].peak_allocated + 100 * MIB)
    kinds = [(entry.kind, entry.first, entry.last) for entry in entries(report_of(rows))[1:-1]]
    assert kinds == [(ALIKE, 1, 11), (TURN, 12, 12), (ALIKE, 13, 30)]


def test_turns_that_allocate_nothing_are_one_entry_whatever_they_run() -> None:
    rows = [state(4 + n, 30, turn=(turn,), loops=(3,)) for turn in range(1, 7) for n in range(turn)]
    rows = [state(2, 30), *rows]
    found = entries(report_of(rows))[1:-1]
    assert [(entry.kind, entry.first, entry.last) for entry in found] == [(ROW, 0, 0), (ALIKE, 1, 6)]
    # One of them holds something for a moment.
    rows[-1] = replace(rows[-1], peak_allocated=31 * MIB)
    found = entries(report_of(rows))[1:-1]
    assert [(entry.kind, entry.first, entry.last) for entry in found] == [(ROW, 0, 0), (ALIKE, 1, 5), (TURN, 6, 6)]


def test_skipped_turns_join_those_they_repeat_and_no_others() -> None:
    rows = steady(8)
    gap = replace(rows[5], kind="skipped", line=3, iteration=(4,), statement="", peak_allocated=70 * MIB)
    for like, expected in ((3, [(TURN, 1), (ALIKE, 2)]), (None, [(TURN, 1), (ALIKE, 2), (REST, 4), (ALIKE, 7)])):
        shown = [*rows[:6], replace(gap, skipped=Skipped(4, 6, like)), *rows[12:]]
        found = entries(report_of(shown))[1:-1]
        assert [(entry.kind, entry.first) for entry in found] == expected
        assert found[-1].last == 8


def test_epochs_fold_as_batches_do() -> None:
    rows: list[Row] = []
    for epoch in range(1, 5):
        rows.append(state(3, 0 if epoch == 1 else 30, turn=(epoch,), loops=(2,)))
        inner = steady(6, (2, 3), (epoch,), 0 if epoch == 1 else 30)
        rows += inner
        rows.append(state(9, 30, peak=90, turn=(epoch,), loops=(2,)))
    found = entries(report_of(rows))[1:-1]
    assert [(entry.kind, entry.first, entry.last) for entry in found] == [(TURN, 1, 1), (ALIKE, 2, 4)]
    assert [(entry.kind, entry.outer, entry.first, entry.last) for entry in found[0].inner[1:-1]] == [
        (TURN, (1,), 1, 1),
        (ALIKE, (1,), 2, 6),
    ]
    assert len(opened(report_of(rows))) < 20
    assert (REST, 3, 4) in words(report_of(rows))


def test_statements_in_a_run_that_moved_nothing_are_one_entry() -> None:
    rows = [state(1, 5), state(2, 5), state(3, 5), state(4, 5, peak=9), state(5, 5)]
    found = entries(report_of(rows))
    assert [(entry.kind, len(entry.rows)) for entry in found] == [
        (ROW, 1),
        (ROW, 1),
        (STILL, 2),
        (ROW, 1),
        (ROW, 1),
        (ROW, 1),
    ]
    assert found[2].moved_at_all == 0
    # What went back to the device is no stillness.
    emptied = replace(rows[1], categories={**rows[1].categories, "cached": 50 * MIB})
    assert all(entry.kind != STILL for entry in entries(report_of([rows[0], emptied, *rows[2:4]])))


def test_statements_of_two_functions_are_no_run() -> None:
    rows = [state(line, 20) for line in (3, 4, 8, 9)]
    rows = [
        replace(row, label=f"{name}: {row.label}")
        for row, name in zip(rows, ("step", "step", "main", "main"), strict=True)
    ]
    rows = [state(2, 20), *rows, state(30, 40)]
    shown = [line.text for line in shown_lines(report_of(rows))]
    assert shown[2:4] == ["step: lines 3-4: no change", "main: lines 8-9: no change"]


def test_a_cell_of_sixty_lines_that_all_move_memory_has_thirty_entries() -> None:
    rows = [state(line, 10 * line + (100 if line == 40 else 0)) for line in range(1, 61)]
    shown = opened(report_of(rows))
    assert len(shown) <= MOST
    largest = next(entry for entry, _ in shown if entry.row.line == 40)
    assert largest.kind == ROW
    assert any(entry.kind == SEVERAL for entry, _ in shown)
    joined = [row for entry, _ in shown for row in entry.rows]
    assert joined == list(report_of(rows).checkpoints)


def test_the_failing_row_and_the_peak_are_never_folded_away() -> None:
    rows = steady(40)
    rows.append(replace(state(4, 400, turn=(41,), loops=(3,)), kind="error"))
    rows[31] = replace(rows[31], peak_allocated=500 * MIB)
    shown = [entry for entry, _ in opened(report_of(rows), most=12)]
    assert any(entry.kind == ROW and entry.row.kind == "error" for entry in shown)
    assert any(entry.kind == ROW and entry.row.peak_allocated == 500 * MIB for entry in shown)


def test_iterations_inside_a_call_are_turns_too() -> None:
    train = samples.trainer().checkpoints[2]
    start, turn = train.parts
    turns = [replace(turn, label=f"iteration {number}") for number in range(2, 7)]
    gap = replace(turn, kind="skipped", label="iterations 7-17", parts=(), skipped=Skipped(7, 17, 6))
    last = replace(turn, label="iteration 18")
    report = replace(samples.trainer(), checkpoints=(replace(train, parts=(start, *turns, gap, last)),))
    (found,) = entries(report)
    assert [(entry.kind, entry.first, entry.last) for entry in found.inner] == [(ROW, 1, 1), (ALIKE, 2, 18)]
    depths = [(entry.row.label, depth) for entry, depth in opened(report)]
    assert depths[1:3] == [("iteration 1", 1), ("forward", 2)]
    assert ("iteration 18", 1) in depths


def test_calls_of_two_kinds_that_are_put_together_keep_their_own_numbers() -> None:
    """Both are counted from one, so that a row for all of them would have a last number below its first."""
    calls = [f"{name} {number}" for name in ("forward of Encoder", "forward of Decoder") for number in range(1, 9)]
    parts = []
    for place, label in enumerate(calls):
        made = samples.row("", samples.state(activations=3 * place + place % 2), kind="part", label=label)
        parts.append(made)
    parts[-1] = replace(parts[-1], peak_allocated=300 * MIB)
    whole = replace(state(4, 100, peak=300), parts=tuple(parts))
    shown = [entry for entry, _ in opened(report_of([whole, state(5, 200)]), most=9)]
    joined = [entry for entry in shown if entry.kind == SEVERAL]
    assert len(joined) == 2
    assert all(entry.first <= entry.last for entry in joined)
    assert [entry.turns for entry in joined] == [len(entry.rows) for entry in joined]


@pytest.mark.parametrize("statement", ["", "thread.join()"])
def test_a_thousand_calls_of_modules_that_take_turns_are_no_thousand_lines(statement: str) -> None:
    """Calls in another thread, as in a program of remote calls: no loop is known of them, and no statement of their own."""
    names = ("forward of Model", "forward of Loss", "backward of Loss")
    parts = tuple(
        samples.row(statement, samples.state(activations=20 + place % 3), kind="part", label=names[place % 3])
        for place in range(3000)
    )
    report = report_of([state(4, 20)])
    last = replace(report.checkpoints[-1], parts=parts, peak_allocated=22 * MIB)
    report = replace(report, checkpoints=(*report.checkpoints[:-1], last))
    assert len(opened(report)) <= MOST
    told = [line.text for line in shown_lines(report)]
    assert [text for text in told if "parts: forward of Model, forward of Loss" in text], told


@pytest.mark.parametrize("name", ["forward", "forward {}"])
def test_parts_of_one_name_that_move_alike_are_all_put_together_and_others_stay(name: str) -> None:
    """The forwards of a generation, each of which keeps a little more."""
    forwards = [
        samples.row(
            "", samples.state(activations=100 + place), kind="part", label=name.format(2 * place + 1), peak=130 + place
        )
        for place in range(60)
    ]
    encoder = samples.row("", samples.state(activations=100), kind="part", label="forward", peak=300)
    mark = samples.row("", samples.state(activations=160), kind="part", label="decoded", peak=191)
    whole = replace(state(4, 100, peak=300), parts=(encoder, *forwards, mark))
    shown = [entry for entry, _ in opened(report_of([whole, state(5, 200)]))]
    (joined,) = [entry for entry in shown if entry.kind == SEVERAL]
    assert joined.rows == tuple(forwards)
    assert [entry.row.label for entry in shown if len(entry.rows) == 1 and entry.row.kind == "part"] == [
        "forward",
        "decoded",
    ]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(0, 60)), min_size=1, max_size=60),
    st.integers(4, 40),
)
def test_every_row_is_in_one_entry(moves: list[tuple[int, int, int]], most: int) -> None:
    """Loops at lines 2 and 4, in and out of which the rows go as they like."""
    rows: list[Row] = []
    outer, inner = 0, 0
    for depth, held, peak in moves:
        if depth == 1:
            outer, inner = outer + 1, 0
        inner += depth > 1
        turn = ((), (outer,), (outer, inner), (outer, inner))[depth]
        loops = ((), (2,), (2, 4), (2, 4))[depth]
        rows.append(state(depth + 5, held, peak=peak, turn=turn, loops=loops))
    report = report_of(rows)
    found = entries(report)
    assert [row for entry in found for row in entry.rows] == list(report.checkpoints)
    assert [row for entry in found for row in rows_in(entry)] == list(report.checkpoints)
    shown = [entry for entry, _ in opened(report, most)]
    assert [row for entry in shown for row in entry.rows] == list(report.checkpoints)
    # Each change is measured from the row before, so that they add up.
    assert sum(entry.change or 0 for entry in shown) == rows[-1].allocated


def test_the_iterations_of_an_inner_loop_are_numbered_in_one_way_in_text_and_on_the_page() -> None:
    outer = state(2, 10, turn=(1,), loops=(2,))
    inner = [state(3, 10 + 20 * turn, turn=(1, turn), loops=(2, 3)) for turn in range(2, 14)]
    report = report_of([outer, state(3, 30, turn=(1, 1), loops=(2, 3)), *inner, state(2, 300, turn=(2,), loops=(2,))])
    folded = [line for line in shown_lines(report) if line.is_folded]
    assert [line.iteration for line in folded] == ["1.2-1.13:"]
    assert "iterations 1.2-1.13: as 1.1" in OpenedRows(report).html()
    entry = folded[0].entry
    assert entry is not None
    assert numbers_of(replace(entry, first=13)) == "1.13"
    assert numbers_of(replace(entry, first=1, last=1_200, outer=())) == "1-1,200"
