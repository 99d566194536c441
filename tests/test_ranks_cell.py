"""`%%gpumem --ranks`: a cell as ranks of many, each in a process of its own; the notebook's own process runs nothing of it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from causes_cells import Notebook, notebook

import gpumem_magic
from gpumem_magic.report.ranks import DONE, OUT_OF_MEMORY
from gpumem_magic.session import device as choosing

if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)
if not hasattr(os, "fork"):
    pytest.skip("this system has no fork", allow_module_level=True)

CELL = """
import os
import torch.distributed as dist
dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
sent = ["from rank 0"] if rank == 0 else [None]
dist.broadcast_object_list(sent, src=0)
print(sent, dist.get_world_size(), os.environ["LOCAL_WORLD_SIZE"])
size = 3 if rank == dist.get_world_size() - 1 else 1
kept = torch.empty(size << 20, device="cuda")
"""


@pytest.fixture(scope="module")
def book() -> Iterator[Notebook]:
    with notebook("T4") as found:
        yield found


def test_ranks_that_may_differ_run_and_one_report_has_all(book: Notebook) -> None:
    before = dict(os.environ)
    said = book.cell("%%gpumem -q -o report --ranks 4" + CELL)
    report = book.shell.user_ns["report"]
    assert gpumem_magic.last_report() is report
    assert report.ranks is not None
    assert report.ranks.virtual
    found = [(row.rank, row.state, row.peak_allocated, row.measured) for row in report.ranks.rows]
    assert found == [(3, DONE, 12 << 20, True), *((rank, DONE, 4 << 20, rank < 3) for rank in range(3))]
    assert said == "['from rank 0'] 4 4\n", "one rank's words stand for all"
    # Nothing of it happened here.
    assert not {"kept", "rank", "dist"} & set(book.shell.user_ns)
    assert dict(os.environ) == before
    assert not torch.distributed.is_initialized()
    machine = choosing.virtual()
    assert machine is not None
    assert machine.spec.text == "T4"
    assert "gives each rank its own" not in " ".join(report.notes)


def test_ranks_on_the_cards_that_hold_a_tensor_are_told_why_there_are_no_more(book: Notebook) -> None:
    book.cell("there = torch.empty(5 << 20, device='cuda')")
    book.cell("%%gpumem -q -o report --ranks 2\nimport os\ntorch.cuda.set_device(int(os.environ['RANK']))")
    report = book.shell.user_ns["report"]
    assert report.error is not None
    assert "share its 1 card, as tensors of the notebook are there: `%gpumem_device 2xT4`" in report.notes[0]
    book.cell("del there")


def test_a_named_rank_runs_with_the_one_that_it_hears(book: Notebook) -> None:
    """The tensors that are there stay on the one device that they are on."""
    book.cell("there = torch.empty(5 << 20, device='cuda')")
    said = book.cell(
        "%%gpumem -q -o report --ranks 64 --as 63" + CELL + "if rank: torch.empty(1 << 40, device='cuda')\n"
    )
    del book.shell.user_ns["there"]
    report = book.shell.user_ns["report"]
    assert report.ranks is not None
    assert report.ranks.world == 64
    rows = [(row.rank, row.state, row.peak_allocated) for row in report.ranks.rows]
    assert rows == [(63, OUT_OF_MEMORY, (20 + 12) << 20), (0, DONE, (20 + 4) << 20)]
    assert report.error.requested == 4 << 40
    assert said == "['from rank 0'] 64 1\n"


def test_what_ranks_share_has_its_category(book: Notebook) -> None:
    """Pieces of distributed tensors, sharded parameters while they are whole, and what stages of a pipeline send."""
    book.cell(
        """%%gpumem -q -o report --ranks 2
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
dist.init_process_group("nccl")
def train(model):
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 1024, device="cuda")).sum().backward()
    optimizer.step()
    return optimizer
model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(2)])
for part in (*model, model):
    fully_shard(part)
optimizer = train(model)
model.set_requires_gradient_sync(False)
accumulated = model(torch.randn(8, 1024, device="cuda")).sum().backward()
del model, optimizer
part = nn.Linear(1024, 1024, bias=False).cuda()
rank = dist.get_rank()
schedule = Schedule1F1B(PipelineStage(part, rank, 2, torch.device("cuda")), 2, loss_fn=lambda y, _: y.sum())
given = torch.zeros(8192, 1024, device="cuda")
schedule.step(*(() if rank else (given,)), target=given)
"""
    )
    report = book.shell.user_ns["report"]
    rows = {row.statement.partition(" ")[0]: row for row in report.checkpoints}
    kinds = ("parameters", "gradients", "optimizer_state")
    # Half of 2 x 4 MiB, as much for their gradients, and AdamW's two moments.
    assert [rows["optimizer"].categories[kind] >> 20 for kind in kinds] == [4, 4, 8]
    # Those of the whole parameters wait beside those of the pieces.
    assert [rows["accumulated"].categories[kind] >> 20 for kind in kinds] == [4, 4 + 8, 8]
    # At the end of the forward the last layer is whole.
    forward = next(part for part in rows["optimizer"].parts if part.label == "forward")
    assert [forward.categories[kind] >> 20 for kind in ("parameters", "activations")] == [8, 0]
    assert [(row.rank, row.state) for row in report.ranks.rows] == [(1, DONE), (0, DONE)]
    last, first = (row.categories for row in report.ranks.rows)
    # Two pieces of 16 MiB: the last stage receives them and has their outputs, the first receives their gradients.
    assert "unknown" not in last
    assert "unknown" not in first
    assert last["activations"] >> 20 == 64


@pytest.mark.parametrize(
    "flags",
    ["--ranks 4 --as 4", "--as 0", "--ranks 2 --fit n=1..2", "--ranks 2 --budget 1GiB", "--ranks 2 --device cuda:0"],
)
def test_what_does_not_go_together_is_one_line(flags: str, book: Notebook) -> None:
    assert "UsageError: %%gpumem" in book.cell(f"%%gpumem {flags}\nn = 1")
    assert "n" not in book.shell.user_ns


def test_a_notebook_with_a_process_group_is_told_in_one_line_and_ranks_run_without_it(book: Notebook) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        said = book.cell("%%gpumem -q --ranks 4" + CELL)
        assert "UsageError: %%gpumem --ranks: this notebook's process has a process group already" in said
        assert "twice" not in said
        assert torch.distributed.is_initialized()
    finally:
        torch.distributed.destroy_process_group()
    assert book.cell("%%gpumem -q --ranks 4" + CELL) == "['from rank 0'] 4 4\n"
