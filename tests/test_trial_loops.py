"""What follows a loop that a trial cuts short is run: after an epoch, after the training, in functions, methods and own files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent
from types import SimpleNamespace
from typing import Any

import pytest
from causes_cells import Notebook, notebook

from gpumem_magic.trials.loops import CHEAP_EVENTS, TrialLimit
from gpumem_magic.trials.one_run import tried
from gpumem_magic.trials.programs import ScriptProgram
from gpumem_magic.trials.tried import FITS, MEMORY, Tried
from gpumem_magic.virtual import gpu

CARD = "virtual:256MiB,context=0MiB,idle=0MiB"
HEAD = """
import sys
import torch
from torch import nn
rows = int(sys.argv[-1].partition("=")[2])
net = nn.Linear(1024, 1024, bias=False).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
"""
STEPS = """
for _ in range(12):
    optimizer.zero_grad()
    net(torch.randn(rows, 1024).cuda()).relu().sum().backward()
    optimizer.step()
"""
# Each step of a training takes about 12 KiB a row, this 64 for all that it keeps.
EVALUATION = """
kept = [net(torch.randn(rows, 1024).cuda()) for _ in range(8)]
"""
EPOCHS = f"""
for epoch in range(4):
{indent(STEPS, "    ")}
{indent(EVALUATION, "    ")}
    kept = None
"""
# What an epoch leaves lives beside the next one's steps.
CARRIED = f"""
for epoch in range(4):
{indent(STEPS, "    ")}
    carried = net(torch.randn(3 * rows, 1024).cuda()).exp()
"""
# The third epoch alone does more, and says so by its number.
LATE = f"""
for epoch in range(4):
{indent(STEPS, "    ")}
    if epoch == 2:
{indent(EVALUATION, "        ")}
"""
GROWING = f"""
best = []
for epoch in range(4):
{indent(STEPS, "    ")}
    best.append([one.detach().clone() for one in net.parameters()] * 1 + [torch.empty(rows, 1024).cuda()])
"""


def in_function(body: str) -> str:
    return f"def main():\n{indent(body, '    ')}\nmain()\n"


def of_script(folder: Path, text: str, rows: int) -> Tried:
    # As a command has it: no card is on.
    gpu.turn_off()
    script = folder / "train.py"
    script.write_text(text, "utf-8")
    return tried(ScriptProgram(str(script), []), CARD, {"--rows": rows})


@pytest.fixture(scope="module")
def book() -> Iterator[Notebook]:
    with notebook(CARD) as found:
        yield found


def passes(book: Notebook, body: str) -> bool:
    """Whether all of a cell runs."""
    with book.forgetting():
        book.cell(f"%gpumem_device {CARD}")
        report = book.measured(body)
        assert report.error is None or report.error.requested is not None, report.error
        return report.error is None


def limits(book: Notebook, body: str) -> tuple[int, int]:
    """Rows with which a program passes and rows with which it fails where all of it is run, close to each other."""
    low, high = 1024, 16 * 1024
    while high - low > 1024:
        middle = (low + high) // 2
        low, high = (middle, high) if passes(book, whole(body, middle)) else (low, middle)
    assert 1024 < low < high < 16 * 1024
    return low, high


def whole(body: str, rows: int) -> str:
    return f"import sys\nsys.argv = ['', '--rows={rows}']\n{HEAD}{body}"


@pytest.mark.parametrize(
    "body", [EPOCHS, CARRIED, LATE, GROWING, STEPS + EVALUATION], ids=["epochs", "carried", "late", "growing", "end"]
)
def test_a_trial_ends_as_the_whole_program_would(body: str, book: Notebook, tmp_path: Path) -> None:
    most, too_many = limits(book, body)
    for text in (HEAD + body, HEAD + in_function(body)):
        fitting, failing = of_script(tmp_path, text, most), of_script(tmp_path, text, too_many)
        assert (fitting.ending, failing.ending) == (FITS, MEMORY)
        # Where a loop reads its number, it is run to its end.
        assert fitting.repeats == (body is not LATE)
        assert not fitting.cut


def test_loops_of_methods_and_of_own_files_end_too(book: Notebook, tmp_path: Path) -> None:
    steps, evaluation = indent(STEPS, "        "), indent(EVALUATION, "        ")
    (tmp_path / "engine.py").write_text(
        f"import torch\nclass Engine:\n    def fit(self, net, optimizer, rows):\n{steps}\n"
        f"    def check(self, net, rows):\n{evaluation}\n",
        "utf-8",
    )
    text = f"from engine import Engine\n{HEAD}\nEngine().fit(net, optimizer, rows)\nEngine().check(net, rows)\n"
    most, too_many = limits(book, STEPS + EVALUATION)
    fitting, failing = of_script(tmp_path, text, most), of_script(tmp_path, text, too_many)
    assert (fitting.ending, failing.ending) == (FITS, MEMORY)
    assert fitting.iterations < 12
    assert not fitting.cut


def test_functions_of_earlier_cells_go_on_behind_their_loops(book: Notebook) -> None:
    make = "net = nn.Linear(1024, 1024, bias=False).cuda()\noptimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
    with book.forgetting():
        book.cell(f"%gpumem_device {CARD}")
        book.cell(f"def train(net, optimizer, rows):\n{indent(STEPS, '    ')}\n{indent(EVALUATION, '    ')}\n")
        book.cell(f"%%gpumem --fit rows=1024,2048,4096,8192 -o fits\n{make}rows = 8\ntrain(net, optimizer, rows)")
        fits = book.shell.user_ns["fits"]
        assert fits.largest in (1024, 2048, 4096)
        report = book.measured(f"{make}train(net, optimizer, {fits.largest})")
        assert report.error is None
        report = book.measured(f"{make}train(net, optimizer, {2 * fits.largest})")
        assert report.error is not None
        assert report.error.requested


def test_loops_end_where_trials_share_what_comes_before_them(book: Notebook) -> None:
    """Each is a copy of the process that began, in which the limit was made."""
    with book.forgetting():
        book.cell(f"%gpumem_device {CARD}")
        book.cell(
            "%%gpumem --fit rows=1..64 -q -o fits\nnet = nn.Linear(64, 64).cuda()\nrows = 8\n"
            "optimizer = torch.optim.SGD(net.parameters())\n"
            "for _ in range(20):\n    net(torch.ones(rows, 64, device='cuda')).sum().backward()\n    optimizer.step()\n"
        )
        assert all(one.iterations < 20 for one in book.shell.user_ns["fits"].trials)


@pytest.mark.parametrize(("events", "turns"), [(CHEAP_EVENTS, 4), (0, None)])
def test_a_loop_without_steps_ends_after_so_many_turns_that_worked(events: int, turns: int | None) -> None:
    further: Any = SimpleNamespace(events=0, are_known=lambda: False)
    limit = TrialLimit(3, further, [], os.getpid)
    loop: Any = SimpleNamespace(index=1, kind="for")
    limit.statement_began(loop)
    ended = None
    for turn in range(1, 10):
        if limit.should_end(loop, (turn,), False):
            ended = turn
            break
        further.events += events
    assert ended == turns
