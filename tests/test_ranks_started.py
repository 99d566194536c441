"""Ranks that a measured cell starts itself, as real processes: each measures itself, and the cell shows one report."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from causes_cells import Notebook, notebook

from gpumem_magic.report.model import ReportData
from gpumem_magic.report.ranks import DONE, ENDED, FAILED, GONE, OUT_OF_MEMORY
from gpumem_magic.session import launches

if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)
if not hasattr(os, "fork"):
    pytest.skip("this system has no fork", allow_module_level=True)

SETUP = """
import os, signal, time
import torch, torch.multiprocessing as mp
from gpumem_magic.files.rank_files import is_alive

def work(rank, kind, others):
    torch.cuda.set_device(rank)
    kept = torch.empty((rank + 1) << 20, device="cuda")
    # (What happens to rank 0 happens once it has begun.)
    while kind and rank == 1 and not others[0]:
        time.sleep(0.01)
    if kind == "too_much" and rank == 1:
        torch.empty(1 << 40, device="cuda")
    if kind == "killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "interrupted" and rank == 1:
        os.kill(os.getppid(), signal.SIGINT)
    if kind:
        others[rank] = 1
        wait()

def wait():
    time.sleep(600)

def start(kind="", count=2):
    others = mp.get_context("fork").Array("i", count)
    mp.start_processes(work, (kind, others), nprocs=count, start_method="fork")
"""


@pytest.fixture(scope="module")
def book() -> Iterator[Notebook]:
    with notebook("T4", SETUP) as found, pytest.MonkeyPatch.context() as patch:
        patch.setattr(launches, "_PATIENCE", 300.0)
        yield found


def found(book: Notebook) -> ReportData:
    assert multiprocessing.active_children() == []
    report = book.shell.user_ns["report"]
    assert isinstance(report, ReportData)
    return report


def rows(report: ReportData) -> list[tuple[int, str, int | None]]:
    assert report.ranks is not None
    assert not report.ranks.virtual
    return [(row.rank, row.state, row.peak_allocated) for row in report.ranks.rows]


def test_each_has_a_device_and_the_report_is_the_worst_ranks(book: Notebook) -> None:
    before = torch.multiprocessing.start_processes, multiprocessing.get_context
    assert (
        book.cell("%%gpumem -q -o report\nstart(count=3)\nhere = torch.empty(1 << 18, device='cuda'); del here") == ""
    )
    report = found(book)
    assert rows(report) == [(rank, DONE, (rank + 1) << 22) for rank in (2, 1, 0)]
    assert report.remarks[-1].startswith("The process that started them: Of 1.0 MiB at the peak, ")
    assert before == (torch.multiprocessing.start_processes, multiprocessing.get_context)
    assert torch.cuda.device_count() == 1, "what the ranks have is theirs"


def test_an_error_is_as_without_the_magic_and_the_others_reports_are_there(book: Notebook) -> None:
    book.cell("def fails(rank):\n    raise ValueError(f'of rank {rank}')")
    cell = "mp.start_processes(fails, nprocs=1, start_method='fork')"
    plain, measured = book.cell(cell), book.cell(f"%%gpumem -q -o report\n{cell}")

    def told(said: str) -> str:
        """(A cell has a number, and a line more where it is measured.)"""
        return re.sub(r"(\[|ipython-input-|line |-> )\d+(-\w+)?", "", said)

    assert "ValueError: of rank 0" in told(plain)
    assert told(measured) == told(plain)
    report = found(book)
    assert rows(report) == [(0, FAILED, 0)]
    assert report.ranks is not None
    assert report.ranks.rows[0].where.endswith(":2")


def test_one_out_of_memory_and_one_that_waits(book: Notebook) -> None:
    said = book.cell("%%gpumem -q -o report\nstart('too_much')")
    assert "ProcessRaisedException" in said
    report = found(book)
    assert rows(report) == [(1, OUT_OF_MEMORY, 8 << 20), (0, ENDED, 4 << 20)]
    assert report.error is not None
    assert report.error.requested == 4 << 40
    # No statement of the cell is known to have failed there.
    assert "`error`" not in report.answer
    assert all(group.statement != "error" for group in report.error.tensors)
    assert "The allocator emptied its cache to make room." in report.notes


def test_a_status_is_a_failure_unless_it_is_zero(book: Notebook, tmp_path: Path) -> None:
    book.cell(
        "import os\n"
        "from gpumem_magic.files.rank_files import is_alive\n"
        "def leaves(rank, place):\n"
        "    if rank == 0:\n"
        "        place.symlink_to(str(os.getpid()))\n"
        # (PyTorch ends the other, once this one has failed.)
        "    while rank and (not place.is_symlink() or is_alive(int(os.readlink(place)))):\n"
        "        pass\n"
        "    raise SystemExit(3 * rank)"
    )
    book.shell.user_ns["place"] = tmp_path / "first"
    said = book.cell("%%gpumem -q -o report\nmp.start_processes(leaves, (place,), 2, start_method='fork')")
    assert "process 1 terminated with exit code 3" in said
    report = found(book)
    assert report.ranks is not None
    first, second = report.ranks.rows
    assert (first.rank, first.state, second.rank, second.state) == (1, FAILED, 0, DONE)
    assert first.where.endswith(":8")


def test_one_killed_and_one_that_waits(book: Notebook) -> None:
    said = book.cell("%%gpumem -q -o report\nstart('killed')")
    assert "process 1 terminated with signal SIGKILL" in said
    assert rows(found(book)) == [(1, GONE, None), (0, ENDED, 4 << 20)]


def test_an_interrupt_ends_all_that_wait(book: Notebook) -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    said = book.cell("%%gpumem -q -o report\nstart('interrupted')")
    assert "KeyboardInterrupt" in said
    report = found(book)
    assert rows(report) == [(1, ENDED, 8 << 20), (0, ENDED, 4 << 20)]
    assert report.ranks is not None
    assert report.ranks.answer.startswith("Ranks 0-1 were ended.")


@pytest.fixture
def own_handlers() -> Iterator[None]:
    """PyTorch's elastic launcher leaves handlers of its own."""
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)


@pytest.mark.usefixtures("own_handlers")
def test_accelerates_launcher(book: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    state = pytest.importorskip("accelerate.state")
    # It starts nothing where there is an `Accelerator`, as after another test, or where this was imported before.
    state.AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.delitem(sys.modules, "bitsandbytes", raising=False)
    said = book.cell(
        """%%gpumem -q -o report
from accelerate import Accelerator, notebook_launcher
def train():
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(1024, 1024, bias=False))
    accelerator.backward(model(torch.randn(8, 1024, device=accelerator.device)).sum())
notebook_launcher(train, num_processes=2)
"""
    )
    assert "Error" not in said
    report = found(book)
    assert [(rank, state) for rank, state, _ in rows(report)] == [(0, DONE), (1, DONE)]
    # Four MiB; as much for its gradient, and for the bucket in which it is sent.
    assert [report.peak.categories[kind] for kind in ("parameters", "gradients")] == [4 << 20, 8 << 20]
