"""Nothing of the program's runs because we look: no method, property, mode or metaclass of any object that it has, anywhere."""

from __future__ import annotations

from collections import Counter
from typing import Any

import hostile_objects
import pytest
import torch
from causes_cells import Notebook, notebook
from hostile_objects import counted, hostile

import gpumem_magic
from gpumem_magic.owners.search import find_owners
from gpumem_magic.virtual import gpu
from gpumem_magic.widgets import watch

MIB = 1 << 20

# Each runs plainly and measured. All variables of `hostile` are there.
CELLS = {
    "beside them": "made = mib(64)",
    "named": "made = mib(64)\nthings = [" + ", ".join(
        ("spiedobject", "spieddict", "spiedlist", "spiedlinear", "optimizer", "proxy", "raising", "uninitialised", "mock",
         "loud", "wrapped", "keyed", "nested", "spieduserdict", "spiedstr", "living_proxy", "the_class")
    ) + "]\ndel things",
    "modes": """made = mib(64)
layer = nn.Linear(64, 64).cuda()
with FunctionMode(), DispatchMode():
    out = layer(mib(1)[:4096].view(64, 64))
    out.sum().backward()
    kept = out.detach()""",
    "sparse in a mode": """with DispatchMode():
    made = mib(64)
    coo = torch.eye(64, device="cuda").to_sparse()
    again = coo""",
    "a step": """made = mib(64)
for one in optimizer_of_model.param_groups[0]["params"]:
    one.grad = torch.ones_like(one)
optimizer_of_model.step()
optimizer_of_model.zero_grad()""",
    "subclasses in a forward": "made = mib(64)\nlayer = nn.Linear(7, 7)\nout = layer(loud)\nout.sum().backward()",
    "its own error": "made = mib(64)\nraise spiedbaseexception",
    "an error in a function": """made = mib(64)
def fails(*mine):
    listed, one = list(mine), mine[0]
    raise ValueError(3)
fails(loud, keyed)""",
    "a result": "made = mib(64)\n[spiedobject, spieddict][0:0]",
}  # fmt: skip


def filled(book: Notebook) -> None:
    namespace = book.shell.user_ns
    namespace.update(hostile())
    namespace.update(FunctionMode=hostile_objects.FunctionMode, DispatchMode=hostile_objects.DispatchMode)
    book.cell(
        "model = nn.Linear(64, 64).cuda()\noptimizer_of_model = type(optimizer)(model.parameters(), lr=0.1, momentum=0.9)"
    )


def test_the_counters_count() -> None:
    gpu.turn_on("T4")
    try:
        things = hostile()
        with counted() as calls:
            isinstance(things["spiedobject"], torch.Tensor)
            hash(type(things["spieddict"]))
            things["loud"].sum()
            things["wrapped"] + 1
            with hostile_objects.FunctionMode(), hostile_objects.DispatchMode():
                torch.ones(2)
        seen = {call.split(".")[0] for call in calls}
        assert {"SpiedObject", "Spiedobject"} & seen
        assert {"class Spieddict", "Loud", "Wrapped", "FunctionMode", "DispatchMode"} <= seen
        with pytest.raises(RuntimeError, match="never ask me"):
            isinstance(things["raising"], torch.Tensor)
        with pytest.raises(ReferenceError):
            isinstance(things["proxy"], torch.Tensor)
    finally:
        things.clear()
        gpu.turn_off()


@pytest.mark.parametrize("name", CELLS)
def test_a_measured_cell_runs_what_a_plain_one_runs(name: str) -> None:
    with notebook("T4") as book:
        filled(book)
        counts = []
        for first_line in ("", "%%gpumem -q\n"):
            book.cell("made = out = layer = kept = coo = again = None")
            with counted() as calls:
                book.cell(first_line + CELLS[name])
            counts.append(Counter(calls))
        assert counts[1] - counts[0] == Counter()
        report = gpumem_magic.last_report()
        assert report is not None
        assert report.peak.allocated - report.checkpoints[0].allocated >= 64 * MIB
        assert not [note for note in report.notes if "failed" in note]
        assert {owner.name for owner in report.owners} >= {"made", "model"}


def test_who_free_and_the_watch_ask_nothing() -> None:
    with notebook("T4") as book:
        filled(book)
        book.cell("made = mib(64)")
        watching = watch.start(book.shell, 50.0, static=True)
        with counted() as calls:
            text = book.cell("%gpumem_who --cycles")
            book.cell("%gpumem_who made")
            book.cell("%gpumem_who --modules")
            book.cell("%gpumem_free --dry-run traceback out cycles cache")
            watching.look()
        watching.stop()
        assert calls == []
        assert "made" in text
        assert "no name was found" not in text


def test_every_byte_has_an_owner_whatever_holds_it() -> None:
    machine = gpu.turn_on("T4")
    try:
        things: dict[str, Any] = hostile()
        with counted() as calls:
            holdings = find_owners(machine, things, None, cycles=True)
        assert calls == []
        assert holdings.lost == ()
        assert {one.place for one in holdings.held} == {
            "keyed['key']",
            "optimizer.param_groups[0]['params'][0]",
            "parameter",
            "spieddict['a']",
            "spiedlist[0]",
            "spiedtuple[0]",
            "spieduserdict.data['a']",
            "wrapped.inner",
        }
    finally:
        things.clear()
        gpu.turn_off()


@pytest.mark.parametrize("trouble", ["proxy", "raising", "uninitialised", "mock"])
def test_the_peak_is_right_beside_each(trouble: str) -> None:
    with notebook("T4") as book:
        book.shell.user_ns[trouble] = hostile()[trouble]
        report = book.measured(f"made = torch.empty(256 << 20, device='cuda')\nsame = {trouble}\ndel made")
        assert 1 << 30 <= report.peak.allocated < (1 << 30) + MIB
        assert [point.line for point in report.checkpoints if point.kind == "statement"] == [2, 3, 4]
        assert not [note for note in report.notes if "failed" in note]


FEW_FRAMES = """import sys
def allowed(limit):
    try:
        sys.setrecursionlimit(limit)
    except RecursionError:
        return False
    return True
def deep(left):
    return left if not left else deep(left - 1)
found = []
before = sys.getrecursionlimit()
try:
    least = next(limit for limit in range(9, before) if allowed(limit))
    for room in (5, 20, 80):
        sys.setrecursionlimit(least + room)
        found.append(room)
        while len(found) < room:
            found.append(deep(2))
finally:
    sys.setrecursionlimit(before)
made = mib(64)
"""


def test_a_program_that_allows_itself_few_frames_has_them() -> None:
    with notebook() as book:
        report = book.measured(FEW_FRAMES)
        assert report.error is None, report.error
        assert len(book.shell.user_ns["found"]) == 80
        # What follows is told again.
        assert report.checkpoints[-1].allocated == 64 * MIB
        assert any(row.statement == "made = mib(64)" for row in report.checkpoints)
