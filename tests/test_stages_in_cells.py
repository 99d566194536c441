"""A training step with a cell for each stage: what an earlier cell left behind keeps its meaning in the next."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from causes_cells import Notebook, notebook

from gpumem_magic.report.model import ReportData

MIB = 1 << 20
SETUP = """
import torch
from torch import nn
import torch.nn.functional as F
model = nn.Linear(512, 8192).cuda()
x, y = torch.randn(4096, 512, device="cuda"), torch.zeros(4096, dtype=torch.long, device="cuda")
"""


@pytest.fixture
def book() -> Iterator[Notebook]:
    with notebook("T4", SETUP) as found:
        yield found


def measured(book: Notebook, cell: str) -> ReportData:
    said = book.cell(f"%%gpumem -q -o report\n{cell}")
    assert "Error" not in said, said
    report = book.shell.user_ns["report"]
    assert isinstance(report, ReportData)
    return report


def test_what_a_graph_keeps_beyond_its_cell_are_activations(book: Notebook) -> None:
    forward = measured(book, "logits = model(x)\nloss = F.cross_entropy(logits, y)")
    # The logits, and their logarithms, which only the graph holds.
    assert (forward.peak.categories["activations"] or 0) // MIB == 2 * 128
    backward = measured(book, "loss.backward()")
    for report in (forward, backward):
        assert report.peak.categories["unknown"] == 0
    assert (backward.peak.categories["activations"] or 0) // MIB == 2 * 128


def test_a_forward_that_nobody_measured_left_activations(book: Notebook) -> None:
    book.cell("loss = (model(x).relu() ** 2).sigmoid().mean()")
    backward = measured(book, "loss.backward()")
    # What `relu` and `sigmoid` gave, and the batch.
    before = backward.checkpoints[0].categories
    assert [(before[name] or 0) // MIB for name in ("activations", "unknown")] == [2 * 128 + 8, 0]


def test_a_loops_variable_keeps_only_the_last(book: Notebook) -> None:
    report = measured(
        book,
        "kept = []\nfor _ in range(4):\n    batch = torch.randn(2048, 512, device='cuda')\n"
        "    kept.append(model(batch).relu().sum())",
    )
    batches = [one for one in report.peak.tensors if one.shape == (2048, 512)]
    assert sum(one.count for one in batches) == 4
    assert [one.count for one in batches if one.kept_by == "batch"] == [1]
    assert report.answer.startswith("`kept`")
    assert "saved for backward, and no backward ran here" in report.answer


def test_an_optimizers_states_are_compared_with_its_own_parameters(book: Notebook) -> None:
    report = measured(
        book,
        "other = nn.Linear(512, 8192).cuda()\noptimizer = torch.optim.Adam(model.parameters())\n"
        "for _ in range(2):\n    model(x[:8]).sum().backward()\n    optimizer.step()",
    )
    (states,) = (one for one in report.causes if one.name == "optimizer_states")
    assert "2 x the 16.0 MiB of the parameters that it steps" in states.text


def test_a_budget_names_the_largest_part(book: Notebook) -> None:
    said = book.cell("%%gpumem -q --budget 1MiB\n(model(x).relu() ** 2).sigmoid().mean().backward()")
    assert "but the budget is 1.0 MiB; the largest part of the peak: activation gradients (" in said
