"""Where a block is larger than what was asked for, everybody who counts blocks says so."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from causes_cells import Notebook, notebook

MIB = 1 << 20
# The allocator gives a tensor of 21.5 MiB the free block of 22 MiB that it finds.
FREE_BLOCK = "{0} = torch.empty(22 * 2**20, dtype=torch.uint8, device='cuda'); del {0}\n"
ODD = "torch.zeros(int(21.5 * 2**20) // 4, device='cuda', requires_grad=True)\n"


@pytest.fixture
def book() -> Iterator[Notebook]:
    with notebook("T4") as found:
        yield found


def test_who_says_how_much_is_rounding(book: Notebook) -> None:
    book.cell(FREE_BLOCK.format("gone") + f"odd = {ODD}")
    assert "as deleting frees them: 512.0 KiB is rounding." in book.cell("%gpumem_who")
    said = book.cell("%gpumem_who odd")
    assert "odd keeps 22.0 MiB in 1 allocation, 512.0 KiB of it rounding.\n`del odd` frees 22.0 MiB." in said
    before = torch.cuda.memory_allocated()
    book.cell("del odd")
    assert before - torch.cuda.memory_allocated() == 22 * MIB


def test_without_rounding_nothing_is_said(book: Notebook) -> None:
    book.cell("even = mib(22)")
    assert "rounding" not in book.cell("%gpumem_who")


def test_free_says_that_no_tensor_was_freed(book: Notebook) -> None:
    book.cell("even = mib(22); other = mib(30); del other")
    assert book.cell("%gpumem_free --dry-run cache").startswith(
        "Cache: no tensor would be freed, and 30.0 MiB would be returned"
    )
    assert book.cell("%gpumem_free cache").startswith(
        "Cache: no tensor was freed, and 30.0 MiB was returned to the device."
    )


def test_a_cause_and_the_table_are_reconciled(book: Notebook) -> None:
    loop = "kept = []\nfor i in range(5):\n    "
    grows = f"{FREE_BLOCK.format('gone').strip()}\n    w = {ODD}    kept.append((w * w).sum())"
    report = book.measured(loop + grows)
    rounding = report.peak.categories["rounding"] or 0
    assert rounding > 2 * MIB
    said = " ".join(str(report).split())
    assert f"The difference is rounding, {rounding / MIB:.1f} MiB at the peak." in said
    # It is the difference between the cause's figure and the table's.
    cause = next(one for one in report.causes if "`kept`" in one.text)
    told = float(re.findall(r"([\d.]+) MiB", cause.text)[0])
    kept = sum(one.bytes for one in report.tensors() if one.kept_by.startswith("graph of kept"))
    assert 0 < told - kept / MIB <= rounding / MIB
    book.cell("del kept, w; torch.cuda.empty_cache()")
    plain = book.measured(
        "rest = []\nfor i in range(5):\n    v = mib(22).requires_grad_()\n    rest.append((v * v).sum())"
    )
    assert plain.causes
    assert "The difference is rounding" not in " ".join(str(plain).split())
