"""What is said of a batch: how many items it has, what it takes, and what half of it would save."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from causes_cells import Notebook, notebook

from gpumem_magic import Report
from gpumem_magic.report.model import Cause
from gpumem_magic.units import MIB

# A decoder's steps, gathered for one loss: some tensors have the items in front, some items and steps in one.
STEPS = """
head = nn.Linear(256, 32000).cuda()
steps = [head(torch.randn({items}, 256).cuda()) for _ in range(40)]
target = torch.randint(0, 32000, ({items} * 40,)).cuda()
loss = nn.functional.cross_entropy(torch.stack(steps, 1).flatten(0, 1), target)
loss.backward()
"""
# A loss that works with a copy of its own of a tensor that does not lie plainly.
TRANSPOSED = """
head = nn.Linear(256, 32000).cuda()
x, target = torch.randn({items}, 40, 256).cuda(), torch.randint(0, 32000, ({items}, 40)).cuda()
nn.functional.cross_entropy(head(x).transpose(1, 2), target).backward()
"""
# Weights of which each is made of those before it.
COMPUTED = """
own = nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048)).cuda()
weights = dict(own.named_parameters())
for _ in range(12):
    loss = torch.func.functional_call(own, weights, (torch.randn(32, 2048).cuda(),)).mean()
    slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
    weights = {name: one - slope for (name, one), slope in zip(weights.items(), slopes, strict=True)}
torch.func.functional_call(own, weights, (torch.randn(32, 2048).cuda(),)).mean().backward()
"""
OUTPUTS = """
wide = nn.Linear(1024, 16384).cuda()
kept = []
for _ in range(6):
    batch = torch.randn(4096, 1024).cuda()
    out = wide(batch).sigmoid()
    {keep}
out.mean().backward()
"""


@pytest.fixture(scope="module")
def book() -> Iterator[Notebook]:
    with notebook() as found:
        yield found


def of_the_batch(report: Report) -> Cause | None:
    return next((cause for cause in report.causes if cause.name == "whole_batch"), None)


@pytest.mark.parametrize("cell", [STEPS, TRANSPOSED])
def test_half_the_batch_saves_what_is_said(book: Notebook, cell: str) -> None:
    with book.forgetting():
        whole = book.measured(cell.format(items=64))
    with book.forgetting():
        half = book.measured(cell.format(items=32))
    cause = of_the_batch(whole)
    assert cause is not None
    assert "The batch of 64 items takes " in cause.text
    said = re.fullmatch(r"Half the batch would take about (\d+) MiB less\.", cause.remedy)
    assert said is not None, cause.remedy
    # Smaller tensors leave other remainders in their blocks.
    assert int(said[1]) == pytest.approx((whole.peak.allocated - half.peak.allocated) / MIB, rel=0.03)


def test_weights_that_a_step_computes_are_neither_parameters_nor_a_batch(book: Notebook) -> None:
    with book.forgetting():
        report = book.measured(COMPUTED)
    assert report.peak.categories["parameters"] == 2 * (2048 * 2048 + 2048) * 4
    assert report.peak.allocated > 4 * report.peak.categories["parameters"]
    assert of_the_batch(report) is None


def test_nothing_is_promised_of_a_smaller_batch_where_several_are_kept(book: Notebook) -> None:
    with book.forgetting():
        last = book.measured(OUTPUTS.format(keep="kept = [out]"))
    with book.forgetting():
        everything = book.measured(OUTPUTS.format(keep="kept.append(out)"))
    assert of_the_batch(last) is not None
    assert of_the_batch(everything) is None
