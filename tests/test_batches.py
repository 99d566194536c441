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


# Memory runs out in the second epoch's evaluation: most of what there is are the first one's results.
EPOCHS = """
wide = nn.Linear(1024, 16384).cuda()
optimizer = torch.optim.SGD(wide.parameters(), lr=0.1)
kept = []
for epoch in range(3):
    wide(torch.randn(64, 1024).cuda()).mean().backward()
    optimizer.step()
    for _ in range(2):
        out = wide(torch.randn({items}, 1024).cuda()).relu()
        {keep}
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


# What is there before the step leaves little to save.
BEFORE = """
wide = nn.Linear(1024, 16384).cuda()
warm = torch.zeros({beside}, 256, 1024).cuda()
del warm
wide(torch.randn({items}, 1024).cuda()).relu().sum().backward()
"""


def test_where_the_peak_would_lie_then_is_said_where_half_of_it_is_not_saved(book: Notebook) -> None:
    with book.forgetting():
        most = book.measured(BEFORE.format(items=16384, beside=1400))
    with book.forgetting():
        less = book.measured(BEFORE.format(items=8192, beside=1400))
    with book.forgetting():
        alone = book.measured(BEFORE.format(items=16384, beside=1))
    cause, free = of_the_batch(most), of_the_batch(alone)
    assert cause is not None
    assert free is not None
    said = re.fullmatch(
        r"Half the batch would take about (\d+) MiB less, as the peak would then be at line 4\.", cause.remedy
    )
    assert said is not None, cause.remedy
    assert int(said[1]) == pytest.approx((most.peak.allocated - less.peak.allocated) / MIB, rel=0.03)
    assert less.answer.endswith("Peak at `warm = torch.zeros(1400, 256, 1024).cuda()`, line 4.")
    assert "as the peak" not in free.remedy


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


def test_what_earlier_batches_left_is_not_said_to_be_the_one_that_ran_out() -> None:
    with notebook("T4") as book:
        with book.forgetting():
            alone = book.measured(EPOCHS.format(items=200000, keep="pass"))
        with book.forgetting():
            gathered = book.measured(EPOCHS.format(items=32768, keep="kept.append(out)"))
    assert all(report.error is not None and report.error.requested is not None for report in (alone, gathered))
    assert of_the_batch(alone) is not None
    assert of_the_batch(gathered) is None


def test_an_attempt_that_failed_does_not_say_what_half_of_it_would_take() -> None:
    search = (
        "items = 1 << 18\nwhile items:\n    try:\n        wide(torch.randn(items, 1024).cuda()).relu().sum().backward()\n"
        "        break\n    except torch.OutOfMemoryError:\n        items //= 4"
    )
    with notebook("T4") as book:
        book.cell("wide = nn.Sequential(nn.Linear(1024, 8192), nn.ReLU(), nn.Linear(8192, 1024)).cuda()")
        report = book.measured(search)
        assert of_the_batch(report) is None
        assert report.answer.startswith("Memory ran out ")
        book.cell("wide.zero_grad()")
        report = book.measured("wide(torch.randn(65536, 1024).cuda()).relu().sum().backward()")
        assert of_the_batch(report) is not None


STEPS_FIRST = """
layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 4, 1024{where}), 2).cuda()
tokens = torch.randint(0, 5000, {shape}).cuda()
embed, head = nn.Embedding(5000, 256).cuda(), nn.Linear(256, 500).cuda()
"""


@pytest.mark.parametrize(("where", "shape"), [("", (35, 400)), (", batch_first=True", (400, 35))])
def test_sequences_are_counted_where_their_layers_have_them(where: str, shape: tuple[int, int]) -> None:
    with notebook() as book:
        book.cell(STEPS_FIRST.format(where=where, shape=shape))
        report = book.measured("head(layers(embed(tokens))).square().mean().backward()")
    cause = next(one for one in report.causes if one.name == "whole_batch")
    assert cause.text.startswith("The batch of 400 items takes ")
