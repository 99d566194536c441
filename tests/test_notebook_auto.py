"""`%gpumem_auto`, `%gpumem_history` and budgets: what they say is what the cells did, and off leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from causes_cells import Notebook, notebook
from hypothesis import given
from hypothesis import strategies as st

from gpumem_magic.devices import machines
from gpumem_magic.notebook import auto
from gpumem_magic.notebook.history import CellHistory, CellRecord, State, added, waterfall

MIB = 1 << 20


@pytest.fixture
def book() -> Iterator[Notebook]:
    with notebook() as book:
        yield book
        auto.forget()


def callbacks(book: Notebook) -> dict[str, list[Any]]:
    return {name: list(found) for name, found in book.shell.events.callbacks.items()}


def test_every_cell_is_recorded_and_off_leaves_nothing(book: Notebook) -> None:
    before = callbacks(book)
    assert book.cell("%gpumem_auto").startswith("Cells are not recorded")
    assert book.cell("%gpumem_auto on").startswith("Every cell is recorded from now on")
    book.cell("x = mib(8)")
    book.cell("y = mib(100)\ndel y")
    book.cell("del x\n1 / 0")
    assert book.cell("%gpumem_auto on").startswith("Every cell is recorded already")
    records = [one for one in auto.history().records if not one.title.startswith("%")]
    assert [(one.title, one.change // MIB, one.error) for one in records] == [
        ("x = mib(8)", 8, None),
        ("y = mib(100)", 0, None),
        ("del x", -8, "ZeroDivisionError"),
    ]
    assert [one.peak for one in records] == [8 * MIB, 108 * MIB, None]
    book.cell("%gpumem_auto off")
    assert callbacks(book) == before
    book.cell("z = mib(1)")
    assert "z = mib(1)" not in book.cell("%gpumem_history")
    assert book.cell("%gpumem_auto off").strip() == "Cells were not recorded."


def test_what_was_there_before_is_no_cells_doing(book: Notebook) -> None:
    book.cell("x = mib(8)")
    book.cell("%gpumem_auto on\ny = mib(2)")
    first = auto.history().records[-1]
    assert (first.change // MIB, first.after.allocated // MIB) == (2, 10)
    book.cell("del x, y")


def test_running_a_cell_again_that_adds_is_said(book: Notebook) -> None:
    book.cell("%gpumem_auto on\nkept = []")
    assert book.cell("kept.append(mib(30))") == ""
    text = book.cell("kept.append(mib(30))").strip()
    assert text.startswith("gpumem: running this cell again left another 30.0 MiB (its last run was In [")
    assert "^ running this cell again left another 30.0 MiB" in book.cell("%gpumem_history")


def test_running_a_cell_again_that_replaces_is_silent(book: Notebook) -> None:
    book.cell("%gpumem_auto on")
    for _ in range(3):
        assert book.cell("x = mib(30)") == ""
        book.cell("other = globals().get('other', []) + [mib(5)]")
    history = book.cell("%gpumem_history")
    assert "x = mib(30)" in history


@pytest.mark.parametrize(
    "cell", ["%%time\nx = mib(8)", "%%capture\nx = mib(8)", "%%gpumem -q\nx = mib(8)", "%time x = mib(8)"]
)
def test_other_magics_keep_working(book: Notebook, cell: str) -> None:
    book.cell("%gpumem_auto on")
    book.cell(cell)
    (one,) = [one for one in auto.history().records if one.title == cell.partition("\n")[0]]
    assert one.change == 8 * MIB


def test_a_failure_of_ours_ends_it_with_one_line(book: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("no way")

    book.cell("%gpumem_auto on")
    monkeypatch.setattr(machines, "in_use", broken)
    text = book.cell("value = 41 + 1")
    assert text.strip() == "gpumem: cells are no longer recorded (RuntimeError: no way)"
    assert book.shell.user_ns["value"] == 42
    assert book.cell("value = 43") == ""


def test_without_a_device_nothing_is_recorded(book: Notebook) -> None:
    book.cell("%gpumem_device off\n")
    book.cell("%gpumem_auto on")
    book.cell("x = 1")
    assert auto.history().records == []
    assert book.cell("%gpumem_history").strip() == "No cell has been recorded yet."


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("%gpumem_auto maybe", "invalid choice: 'maybe'"),
        ("%gpumem_history all", "%gpumem_history: unrecognized arguments: all"),
        ("%gpumem_history", "it shows the cells since `%gpumem_auto on`, and that has not been run"),
        ("%gpumem --budget 10GB x = 1", "write GiB"),
        ("%gpumem --max-delta lots x = 1", "not a size"),
    ],
)
def test_wrong_lines_are_one_clear_line(book: Notebook, line: str, words: str) -> None:
    (text,) = book.cell(line).strip().splitlines()
    assert text.startswith("UsageError: ")
    assert words in text


def test_unloading_ends_it(book: Notebook) -> None:
    before = callbacks(book)
    book.cell("%gpumem_auto on")
    book.cell("%reload_ext gpumem_magic")
    book.cell("%unload_ext gpumem_magic")
    assert callbacks(book) == before
    book.cell("%load_ext gpumem_magic")


def test_the_history_is_bounded() -> None:
    history = CellHistory()
    state = State(0, 0, None)
    for number in range(CellHistory.LIMIT + 5):
        history.add(CellRecord(number, str(number), "x", state, state))
    assert len(history.records) == CellHistory.LIMIT
    assert "5 earlier runs are left out." in waterfall(history.records, history.left_out)


sizes = st.integers(0, 40 << 30)


@given(sizes, sizes, sizes, sizes)
def test_added_is_never_more_than_the_run_itself_added(a: int, b: int, c: int, d: int) -> None:
    first = CellRecord(1, "k", "x", State(a, a, None), State(b, b, None))
    again = CellRecord(2, "k", "x", State(c, c, None), State(d, d, None))
    sentence = added(first, again)
    assert (sentence is not None) == (min(d - b, d - c) >= MIB)
    assert len(waterfall([first, again]).splitlines()) == (5 if sentence else 4)


# ---- budgets


def test_a_budget_that_is_kept_says_nothing(book: Notebook) -> None:
    assert book.cell("%%gpumem -q --budget 100MiB --max-delta 50MiB\nx = mib(30)\ny = mib(60)\ndel y") == ""


def test_a_peak_beyond_the_budget_fails_the_cell(book: Notebook) -> None:
    text = book.cell("%%gpumem -q --budget 50MiB\nx = mib(30)\ny = mib(60)\ndel y\ndone = True")
    assert "BudgetExceeded: the peak was 90.0 MiB at `y = mib(60)`, line 3, but the budget is 50.0 MiB" in text
    # A third of it: most is not held by anybody at the end.
    assert "; the largest part of the peak: inputs (90.0 MiB)" in text
    assert "; most is held by `z` (60.0 MiB)" in book.cell("%%gpumem -q --budget 50MiB\nz = mib(60)\ndel x")
    assert book.shell.user_ns["done"] is True
    result = book.shell.run_cell("%%gpumem -q --budget 50MiB\nx = mib(90)")
    assert type(result.error_in_exec).__name__ == "BudgetExceeded"


def test_what_is_left_beyond_the_allowance_fails_the_cell(book: Notebook) -> None:
    text = book.cell("%%gpumem -q --max-delta 20MiB\nx = mib(30)")
    assert "the cell left 30.0 MiB more allocated than it found, but only 20.0 MiB is allowed" in text


def test_warn_does_not_fail(book: Notebook) -> None:
    text = book.cell("%%gpumem -q --max-delta 20MiB --warn\nx = mib(30)").strip()
    assert text.startswith("gpumem: the cell left 30.0 MiB more")
    assert "Error" not in text


def test_the_users_own_error_is_the_only_one(book: Notebook) -> None:
    with_budget = book.shell.run_cell("%%gpumem -q --budget 20MiB\nx = mib(30)\n1 / 0")
    assert isinstance(with_budget.error_in_exec, ZeroDivisionError)
