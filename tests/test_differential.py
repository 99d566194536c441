"""The fuzzers of `differential` see what they are there to see, and a small sample of what they do at length."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "differential"))

import contextlib
import pickle
import random
from itertools import islice

import files
import generate
import hostile_snapshots
import sources
from cells import Comparison, story
from compare import Difference, differences, explained, without_chance
from interrupts import SCENARIOS, Interrupts
from run import Case, Kind, Zygote
from state import described

pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not hasattr(__import__("os"), "pidfd_open"), reason="forks and waits as only Linux can")

# Each line does something that a measuring must not; where it is to be seen.
SPOILT = {
    "x = 2": "/shell/namespace/x",
    "y = 1": "/shell/namespace/keys",
    "print('more')": "/cells/0/shown",
    "import warnings; warnings.warn('one')": "/cells/0/shown",
    "import this_is_nowhere": "/cells/0/error_in_exec",
    "import wave": "/interpreter/modules/new",
    "import signal; signal.signal(signal.SIGUSR1, print)": "/interpreter/signals",
    "import sys; sys.setprofile(lambda *a: None)": "/interpreter/profile",
    "import sys; sys.settrace(lambda *a: None)": "/interpreter/trace",
    "import builtins; builtins.len = lambda x: 3": "/interpreter/builtins/other",
    "import os; os.environ['MORE'] = '1'": "/interpreter/environment/new",
    "open('more.txt', 'w').close()": "/files/more.txt",
    "import torch; torch.cuda.synchronize = print": "/interpreter/torch's attributes/other",
    "import random; random.random()": "/interpreter/random",
    "import torch; torch.rand(1)": "/interpreter/torch/random",
    "import torch; torch.overrides.TorchFunctionMode().__enter__()": "/interpreter/torch/function modes",
    "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()": "/interpreter/threads",
    "import os; os.write(1, b'more')": "/written to stdout",
    "import gc; gc.disable()": "/interpreter/gc",
    "get_ipython().events.register('post_run_cell', print)": "/shell/events/post_run_cell",
    "del In": "/shell/missing",
}


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote(Kind(sys.executable, device="T4"))
    yield zygote
    zygote.close()


@pytest.mark.parametrize("spoilt", SPOILT)
def test_what_a_cell_does_is_seen(zygote: Zygote, spoilt: str) -> None:
    plain = zygote.run(Case("plain", ["x = 1"]), "plain")
    other = zygote.run(Case("spoilt", [f"x = 1; {spoilt}"]), "plain")
    assert any(one.place.startswith(SPOILT[spoilt]) for one in differences(plain, other))


def test_two_plain_runs_are_alike(zygote: Zygote) -> None:
    for number in range(3):
        case = Case("generated", [generate.cell(random.Random(number))], [generate.PRELUDE])
        assert not differences(zygote.run(case, "plain"), zygote.run(case, "plain")), number


@pytest.mark.parametrize(
    ("cell", "is_free"),
    [
        ("import torch\nx = torch.empty(9).tolist()", True),
        ("import torch\nx = torch.nn.utils.skip_init(torch.nn.Linear, 3, 4).weight.tolist()", True),
        ("import numpy\nx = numpy.recarray(3, [('a', 'i4')]).tolist()", True),
        ("import torch\nx = torch.empty(9).zero_().tolist()", False),
        ("import gc\nx = gc.collect()", True),
        ("import gc\ny = []\ny.append(y)\nx = gc.isenabled()", False),
    ],
)
def test_what_nothing_settles_differs_in_plain_runs(zygote: Zygote, cell: str, is_free: bool) -> None:
    """Contents of memory that nobody wrote, and the garbage that is about: a difference there is one of chance."""
    runs = [zygote.run(Case("free", [cell]), "plain", shake=number)["shell"]["namespace"]["x"] for number in range(3)]
    assert (len(set(runs)) > 1) == is_free


@pytest.mark.parametrize(
    ("cell", "interactivity"),
    [
        ("%time y = 1", "last_expr"),
        (">>> y = 1\n>>> 1 / 0\n>>> z = 2\n>>> w = 3", "last_expr"),
        ("y = 1\nx: int", "last_expr_or_assign"),
        ("import os.path\n   ...: < {1: 2}", "last_expr"),
    ],
)
def test_cells_that_are_hard_to_compare(zygote: Zygote, cell: str, interactivity: str) -> None:
    comparison = Comparison(zygote.kind, zygote)
    case = Case("hard", [cell], interactivity=interactivity)
    assert comparison.compare(case, "quiet", kernel=False) == []
    assert not comparison.reasons


def test_a_report_is_told_from_what_the_cell_shows(zygote: Zygote) -> None:
    comparison = Comparison(zygote.kind, zygote)
    for cell in ("display('mine')\nx = 1", "import torch\ny = torch.ones(3, device='cuda')", "1 / 0"):
        assert comparison.compare(Case("shown", [cell]), "shown", kernel=False) == []


def test_generated_cells_are_the_same_measured(zygote: Zygote) -> None:
    """A sample: `tests/differential/cells.py` compares ten thousand."""
    source = random.Random(20)
    comparison = Comparison(zygote.kind, zygote)
    for case, number in zip(sources.generated(source), range(24), strict=False):
        comparison.run(case, ("quiet", "counters", "auto")[number % 3], kernel=number % 4 == 0)
    for case in islice(sources.tools.cases(source), 10):
        comparison.run(case, "quiet", kernel=False)
    stories = [story(one) for one in comparison.found if one["comes again"]]
    assert not stories, "\n".join(stories)
    assert comparison.counts["cells"] > 40


def test_last_digits_are_explained_where_lapack_works_and_nowhere_else() -> None:
    torch = __import__("torch")
    value, near, other = (described(torch.tensor([1.0, one])) for one in (2.0, 2.000001, 2.1))
    for cell, measured, is_explained in (
        ("torch.linalg.lstsq(A, B)", near, True),
        ("torch.linalg.lstsq(A, B)", other, False),
        ("A + B", near, False),
    ):
        one = Difference("/shell/namespace/X", value, measured)
        assert (explained(one, [cell], {"cells": []}) is not None) is is_explained


def test_beside_what_differs_by_chance_a_difference_is_seen() -> None:
    """A random name in a text is no reason to look at nothing of it."""
    plain = [{"shown": f"tmp{name} and 3 files"} for name in ("aa", "ab", "ac", "ad")]
    other = Difference("/shown", plain[0]["shown"], "tmpzz and 3 folders")
    assert without_chance([other], plain) == ([other], 0)
    assert without_chance([Difference("/shown", plain[0]["shown"], "tmpzz and 3 files")], plain) == ([], 0)
    assert without_chance([other], [*plain, {"shown": "nothing"}]) == ([], 1)


def test_what_measuring_changes_comes_again_and_chance_does_not(
    zygote: Zygote, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison = Comparison(zygote.kind, zygote)
    ask = "from gpumem_magic.recording import under_way\nasked = under_way.is_any()"
    comparison.run(Case("asks", [ask]), "quiet", kernel=False)
    assert [one["comes again"] for one in comparison.found] == [True]
    differing = iter([[Difference("/interpreter/threads", [], ["late"])], []])
    monkeypatch.setattr(comparison, "compare", lambda *_, **__: next(differing))
    comparison.run(Case("is late", ["x = 1"]), "quiet", kernel=False)
    assert "not when run again" in story(comparison.found[1])
    assert comparison.counts["with differences"] == comparison.counts["that differed once"] == 1


def test_interrupts_leave_nothing() -> None:
    """A sample of `tests/differential/interrupts.py`, which does a thousand."""
    names = ("operators", "device on", "into", "await")
    warm = tuple(cell for name in names[:3] for cell in (*SCENARIOS[name][0], SCENARIOS[name][1]))
    interrupts = Interrupts(Kind(sys.executable, warm=warm), "3")
    try:
        for name in names * 2:
            interrupts.once(name)
    finally:
        interrupts.zygote.close()
    assert not interrupts.found, "\n".join(interrupts.found)
    assert interrupts.counts["interrupts"] >= 5


def test_mutants_are_alive_and_nothing_of_them_runs(tmp_path: Path) -> None:
    """A sample of `tests/differential/files.py`: read by Python's own pickle some of these files would make the canary."""
    canary, path = tmp_path / "canary", tmp_path / "case.pickle"
    (tmp_path / "bases").mkdir()
    real = {"small.pickle": pickle.dumps(hostile_snapshots.recording(random.Random(1), 3), 4)}
    mutants = files.Mutants(real, random.Random(4), canary)
    reader = files.Reader(tmp_path, files.Counter())
    alive = 0
    for _ in range(60):
        content = mutants._opcodes(real["small.pickle"])
        path.write_bytes(content)
        assert reader.read(path, len(content), everything=False) == "refused"
        assert not canary.exists()
        assert not reader.events
        with contextlib.suppress(Exception):
            pickle.loads(content)
        if canary.exists():
            alive += 1
            canary.rmdir() if canary.is_dir() else canary.unlink()
    assert alive > 5
    assert files.elements("<p><svg onload=x><script>y</script>") == {"svg onload": 1, "script": 1}
