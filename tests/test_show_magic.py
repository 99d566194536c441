"""`%gpumem_load`: snapshot files in IPython, as reports and as a timeline; errors in one line; nothing heavy is imported."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hostile_snapshots import recording
from IPython.utils.capture import capture_output
from shell_fakes import clean_shell

import gpumem_magic
from gpumem_magic.notebook.load import files_here
from gpumem_magic.notebook.magics import GpuMemMagics
from gpumem_magic.timeline_page.view import TimelineView
from gpumem_magic.user_report import Report


@pytest.fixture
def shell() -> Iterator[Any]:
    with clean_shell() as shell:
        shell.run_line_magic("load_ext", "gpumem_magic")
        yield shell


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    names = ["rank 0.pickle", "rank1.pickle"]
    for seed, name in enumerate(names, start=3):
        (tmp_path / name).write_bytes(pickle.dumps(recording(random.Random(seed), 50), 4))
    return names


@pytest.fixture
def displayed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    things: list[Any] = []
    monkeypatch.setattr("IPython.display.display", things.append)
    return things


def run(shell: Any, line: str) -> str:
    """What a line printed; an error's text is among it."""
    with capture_output(display=False) as captured:
        shell.run_cell(line)
    return str(captured.stdout + captured.stderr)


def test_a_report_and_its_timeline_are_shown(shell: Any, files: list[str], displayed: list[Any]) -> None:
    assert run(shell, "%gpumem_load rank1.pickle -o found") == ""
    view, timeline = displayed
    assert view.report == gpumem_magic.load("rank1.pickle")
    assert isinstance(timeline, TimelineView)
    assert shell.user_ns["found"] is view.report


def test_several_files_are_a_list_and_one_timeline(shell: Any, files: list[str], displayed: list[Any]) -> None:
    assert run(shell, "%gpumem_load 'rank 0.pickle' rank1.pickle --output both") == ""
    *views, timeline = displayed
    reports = [view.report for view in views]
    assert [view.name for view in views] == ["both[0]", "both[1]"]
    assert shell.user_ns["both"] == reports == [gpumem_magic.load(name) for name in files]
    assert len(timeline.sources) >= 2


def test_names_may_come_from_variables(shell: Any, files: list[str], displayed: list[Any]) -> None:
    shell.user_ns["name"] = "rank1.pickle"
    assert run(shell, "%gpumem_load {name} --no-timeline --at end") == ""
    (view,) = displayed
    assert type(view.report) is Report
    assert eval(view.name) == view.report, "what the last line says to type"


def test_quiet_writes_and_binds_and_shows_nothing(shell: Any, files: list[str], displayed: list[Any]) -> None:
    assert run(shell, "%gpumem_load rank1.pickle -q -o found --html out.html") == ""
    assert displayed == []
    assert isinstance(shell.user_ns["found"], Report)
    assert Path("out.html").read_text("utf-8").startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "required: FILE"),
        ("none.pickle", "cannot read none.pickle: No such file or directory"),
        ("rank1.pickle --at 99999", "no event '99999'"),
        ("rank1.pickle --device 7", "it has no device 7"),
        ("rank1.pickle --device one", "invalid int value"),
        ("rank1.pickle -o 2x", "'2x' is not a name for a variable"),
        ("rank1.pickle -o class", "'class' is not a name for a variable"),
        ("rank1.pickle --html nowhere/out.html", "nowhere"),
        ("'rank1.pickle", "No closing quotation"),
        ("rank1.pickle --wrong", "unrecognized arguments: --wrong"),
        ("evil.pickle", "it holds a global"),
        (".", "it is a folder"),
    ],
)
def test_errors_are_one_line(shell: Any, files: list[str], displayed: list[Any], line: str, words: str) -> None:
    Path("evil.pickle").write_bytes(b"\x80\x04cos\nsystem\n.")
    text = run(shell, f"%gpumem_load {line}").strip()
    assert words in text
    assert text.startswith("UsageError: ")
    assert "\n" not in text
    assert displayed == []
    assert "x" not in shell.user_ns


def test_files_and_flags_are_completed(files: list[str], tmp_path: Path) -> None:
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "b.pickle.gz").write_bytes(b"")
    (tmp_path / "train.py").write_text("")
    (tmp_path / ".hidden").mkdir()
    assert files_here("") == ["deeper/", "rank 0.pickle", "rank1.pickle"]
    assert files_here("deeper/b") == ["deeper/b.pickle.gz"]
    assert files_here("nowhere/b") == []
    complete = GpuMemMagics.gpumem_load.parser.complete
    assert complete(SimpleNamespace(line="%gpumem_load ", symbol="")) == files_here("")
    assert "--html" in complete(SimpleNamespace(line="%gpumem_load --h", symbol="--h"))


def test_reading_a_file_needs_no_torch(files: list[str]) -> None:
    program = (
        "import sys, gpumem_magic\n"
        "report = gpumem_magic.load('rank1.pickle')\n"
        "assert str(report)\n"
        "assert 'matplotlib' not in sys.modules\n"
        "report.timeline().save('out.html')\n"
        "print(sorted({'torch', 'matplotlib', 'pynvml'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
