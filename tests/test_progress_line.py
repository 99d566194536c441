"""The line that says what is run now: in a notebook's output, where the answer comes, and in a terminal, where it goes."""

from __future__ import annotations

import io
from typing import Any

import IPython.display
import pytest

from gpumem_magic.views import progress_line
from gpumem_magic.views.progress_line import ProgressLine


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a notebook's one output has shown, in order."""
    shown: list[Any] = []

    class Handle:
        def update(self, thing: Any, raw: bool = False) -> None:
            shown.append(thing)

    def display(thing: Any, **options: Any) -> Handle:
        shown.append(thing)
        return Handle()

    monkeypatch.setattr(IPython.display, "display", display)
    monkeypatch.setattr(progress_line, "in_terminal", lambda: False)
    monkeypatch.setattr("IPython.core.interactiveshell.InteractiveShell.initialized", lambda: True)
    return shown


def test_the_answer_takes_its_place_in_a_notebook(outputs: list[Any]) -> None:
    line = ProgressLine()
    assert not line.become("nothing was there")
    line("one")
    line("two")
    assert line.become("the answer")
    line.end()
    assert outputs == [{"text/plain": "one"}, {"text/plain": "two"}, "the answer"]


def test_it_is_empty_where_no_answer_came_and_nowhere_if_quiet(outputs: list[Any]) -> None:
    line = ProgressLine()
    line("one")
    line.end()
    assert outputs == [{"text/plain": "one"}, {"text/plain": ""}]
    outputs.clear()
    line = ProgressLine(quiet=True)
    line("one")
    assert not line.become("the answer")
    line.end()
    assert outputs == []


def test_a_terminal_line_is_written_over_and_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("IPython.core.interactiveshell.InteractiveShell.initialized", lambda: False)
    monkeypatch.setenv("COLUMNS", "20")
    terminal = _Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    line = ProgressLine()
    line("x" * 50)
    line.end()
    assert terminal.getvalue() == "\r\x1b[K" + "x" * 19 + "\r\x1b[K"
    monkeypatch.setattr("sys.stderr", io.StringIO())
    line = ProgressLine()
    line("to a file")
    line.end()
