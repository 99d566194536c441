"""The bar of a cell that runs for long: only where somebody looks, only after a while, gone at the end, and never in the way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from causes_cells import notebook
from hypothesis import given
from hypothesis import strategies as st

from gpumem_magic.devices.base import Counters
from gpumem_magic.recording.model import Checkpoint, Moment
from gpumem_magic.widgets import progress
from gpumem_magic.widgets.sampler import THREAD_NAME

MIB = 1 << 20
CELL = """
import threading
kept = []
for turn in range(4):
    kept.append(mib(64))
    waited(2)
print("end")
"""


class Shown:
    """Keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, tuple[float, float]]] = []
        self.gone = 0
        self.news = threading.Semaphore(0)

    def show(self, words: str, shares: tuple[float, float]) -> None:
        assert not self.gone
        self.told.append((words, shares))
        self.news.release()

    def leave(self) -> None:
        self.gone += 1


def threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name == THREAD_NAME]


def run(bar: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, cell: str = CELL, after: float = 0.0) -> str:
    """What a measured cell with this bar puts out. ``waited(n)`` in it waits until the bar has been told n times more."""
    made: list[progress.Progress] = []

    def in_notebook(_shell: Any) -> progress.Progress:
        made.append(progress.Progress(bar, after=after, period=0.01))
        return made[-1]

    def waited(times: int) -> None:
        for _ in range(times):
            assert bar().news.acquire(timeout=300)

    with notebook() as book:
        monkeypatch.setattr(progress, "in_notebook", in_notebook)
        book.shell.kernel = SimpleNamespace()
        book.shell.user_ns["waited"] = waited
        try:
            output = book.cell(f"%%gpumem --table\n{cell}")
        finally:
            del book.shell.kernel
    assert len(made) == 1
    assert threads() == []
    return output


def test_it_says_where_the_cell_is_and_leaves_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Shown()
    output = run(lambda: shown, monkeypatch)
    assert output.startswith("end\n")
    assert shown.gone == 1
    assert len(shown.told) >= 8
    assert any("in iteration" in words for words, _ in shown.told)
    assert any("64.0 MiB allocated" in words or "128 MiB allocated" in words for words, _ in shown.told)
    for _, (now, most) in shown.told:
        assert 0 <= now <= most <= 1
    mosts = [most for _, (_, most) in shown.told]
    assert mosts == sorted(mosts)


def test_a_short_cell_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> Any:
        raise AssertionError("a bar was made")

    assert run(never, monkeypatch, "x = mib(3)\nprint('end')", after=3600.0).startswith("end\n")


def test_a_bar_that_fails_is_only_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> Any:
        raise RuntimeError("no page")

    plain = run(Shown, monkeypatch, "x = mib(3)\nprint('end')", after=3600.0)
    assert run(fails, monkeypatch, "x = mib(3)\nprint('end')") == plain


@pytest.mark.parametrize("ends", ["1 / 0", "raise KeyboardInterrupt"])
def test_it_leaves_with_an_error_too(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Shown()
    output = run(lambda: shown, monkeypatch, f"x = mib(3)\nwaited(1)\n{ends}")
    assert shown.gone == 1
    assert ends.split()[-1] in output or "ZeroDivisionError" in output


def test_nobody_in_front_of_it_no_bar() -> None:
    assert progress.in_notebook(SimpleNamespace()) is None
    runs_alone = SimpleNamespace(get_parent=lambda: {"content": {"allow_stdin": False}})
    assert progress.in_notebook(SimpleNamespace(kernel=runs_alone)) is None
    person = SimpleNamespace(get_parent=lambda: {"content": {"allow_stdin": True}})
    assert isinstance(progress.in_notebook(SimpleNamespace(kernel=person)), progress.Progress)


@given(st.floats(0, 1e6), st.lists(st.integers(1, 9999), max_size=3), st.integers(0, 500))
def test_its_words_are_one_short_line(seconds: float, iteration: list[int], line: int) -> None:
    moment = Moment({}, {})
    last = Checkpoint("statement", "x = 1\n\x1b[2J", "x = 1", line, moment, tuple(iteration), tuple(iteration))
    counters = Counters(3 * MIB, 4 * MIB, None, None, None, None)
    words = progress.words_of(seconds, last, counters, 5 * MIB)
    assert words.isprintable()
    assert len(words) < 120
    assert words.endswith("3.0 MiB allocated, 5.0 MiB at most when looked at")
    assert ("line" in words) == (line > 0)
