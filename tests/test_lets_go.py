"""After a measured cell nothing of the program is kept: what the cell's value or error held goes where a plain cell's goes."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from causes_cells import Notebook, notebook

FAILS = """
def fail(big):
    raise ValueError("boom")
for i in range(3):
    fail(torch.zeros(1 << 20, device="cuda"))
"""


@pytest.fixture(scope="module")
def book() -> Iterator[Notebook]:
    with notebook("T4", setup="import torch") as found:
        yield found


@pytest.mark.parametrize(
    "cell",
    [
        "%%gpumem -q\nfor i in range(2):\n    z = i\ntorch.zeros(1 << 20, device='cuda')",
        "%%gpumem -q\nimport asyncio\nfor i in range(2):\n    await asyncio.sleep(0)\ntorch.zeros(1 << 20, device='cuda')",
        "%%gpumem -q --max-iterations 20\n" + FAILS,
        "%%gpumem -q --until-repeat\n" + FAILS,
    ],
    ids=["value", "awaited", "error", "error until it repeats"],
)
def test_memory_goes_with_the_last_that_holds_it(book: Notebook, cell: str) -> None:
    gc.collect()
    before = torch.cuda.memory_allocated()
    book.shell.run_cell(cell)
    book.shell.run_cell("1 + 1")
    book.shell.run_line_magic("gpumem_free", "out traceback cycles")
    assert torch.cuda.memory_allocated() == before


def test_what_a_constant_holds_goes_with_its_statement(book: Notebook) -> None:
    cell = "import sys\nconstant = (1, 2, 3)\nprint(sys.getrefcount(constant))"
    assert book.cell("%%gpumem -q\n" + cell).splitlines()[0] == book.cell(cell).splitlines()[0]
