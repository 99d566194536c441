"""Functions that are rewritten, for rows inside or for loops that can end, and are compiled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from causes_cells import Notebook, notebook

from gpumem_magic.recording.inside import FunctionRewriter
from gpumem_magic.trials.loops import LoopEnds

MODEL = """
class Stack(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x
"""
TRAINING = """
rows = 8
model = torch.compile(Stack().cuda(), fullgraph=True)
optimizer = torch.optim.SGD(model.parameters())
for step in range(8):
    loss = model(torch.ones(rows, 64, device="cuda")).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def book() -> Iterator[Notebook]:
    with notebook("T4", "import torch" + MODEL) as book:
        yield book


def test_rows_inside_a_function_that_is_compiled_leave_it_as_it_was_written(book: Notebook) -> None:
    before = book.shell.user_ns["Stack"].forward.__code__
    said = book.cell("%%gpumem --into Stack.forward" + TRAINING)
    assert "Error" not in said
    assert "--into forward: it was not called, or only as compiled code" in said
    assert book.shell.user_ns["Stack"].forward.__code__ is before
    said = book.cell("%%gpumem --into Stack.forward\nStack().cuda()(torch.ones(2, 64).cuda())")
    assert "only as compiled code" not in said


def test_a_trial_ends_the_loops_around_a_compiled_model_and_leaves_those_inside(book: Notebook) -> None:
    book.cell("%%gpumem --fit rows=1..64 -q -o found" + TRAINING)
    found = book.shell.user_ns["found"]
    assert found.largest == 64, str(found)
    assert all(one.iterations < 8 for one in found.trials)


BROKEN = """
class Telling(Stack):
    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        print("made", x.shape)
        for power in range(2):
            x = x.sin() + power
        return x
"""
BROKEN_TRAINING = """
model = torch.compile(Telling().cuda())
for step in range(3):
    loss = model(torch.ones(8, 64, device="cuda")).sum()
    loss.backward()
"""


@pytest.mark.parametrize("flag", ["--into Telling.forward", "--compare compile", "--fit rows=8..16"])
def test_a_graph_may_break_in_a_function_that_is_rewritten(book: Notebook, flag: str) -> None:
    """Dynamo copies the function's constants then, ours among them."""
    book.cell(BROKEN + "\nrows = 8")
    said = book.cell(f"%%gpumem {flag}{BROKEN_TRAINING.replace('8,', 'rows,')}")
    assert "Error" not in said
    assert "raises" not in said


FUNCTIONS = '''
count = 0
def documented(n):
    """What it does."""
    global count
    given = sorted(locals())
    for i in range(n):
        count += i
    return given, count

def around(n):
    total = 0
    def add(m):
        nonlocal total
        for i in range(m):
            total += i
        return total
    for i in range(n):
        add(i)
    return total

def numbers(n):
    for i in range(n):
        got = yield i
        if got:
            return got
    else:
        return "all"
'''


@pytest.mark.parametrize("how", ["inside", "loops"])
def test_both_bodies_do_what_was_written(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "written.py"
    path.write_text(FUNCTIONS)
    space: dict[str, Any] = {"__name__": "written"}
    exec(compile(path.read_text(), str(path), "exec"), space)
    functions = [space[name] for name in ("documented", "around", "numbers")]
    if how == "inside":
        FunctionRewriter(functions, lambda text: lambda failed: None).install()
    else:
        LoopEnds(_NoLimit()).in_functions(functions)
    assert any(type(one) not in (str, int, type(None), tuple) for one in space["numbers"].__code__.co_consts)
    for compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda compiling=compiling: compiling)
        space["count"] = 0
        assert space["documented"](4) == (["n"], 6)
        assert space["count"] == 6
        assert space["around"](4) == 4
        assert list(space["numbers"](3)) == [0, 1, 2]
        running = space["numbers"](3)
        next(running)
        with pytest.raises(StopIteration, match="stop"):
            running.send("stop")


class _NoLimit:
    def began(self, key: object) -> None: ...

    def ends(self, key: object) -> bool:
        return False
