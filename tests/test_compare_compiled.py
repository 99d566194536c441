"""`%%gpumem --compare compile`: a cell without torch.compile and with it, in processes of their own."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from causes_cells import Notebook, notebook

from gpumem_magic.trials.tried import FITS

# PyTorch's own advice.
pytestmark = pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
MIB = 1 << 20
MADE = """
model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(512), nn.GELU()).cuda()
x = torch.rand(4096, 512, device="cuda")
"""
STEPS = """
for _ in range(3):
    model(x).square().mean().backward()
"""


@pytest.fixture(scope="module")
def book() -> Iterator[Notebook]:
    with notebook("A100-40GB") as found:
        yield found


def test_models_are_compiled_in_one_and_nothing_is_changed_here(book: Notebook) -> None:
    book.shell.user_ns.pop("model", None)
    before = torch.cuda.memory_allocated()
    book.cell("%%gpumem -o both --compare compile\n" + MADE + STEPS)
    both = book.shell.user_ns["both"]
    assert both.eager.ending == both.compiled.ending == FITS, both
    # Of (4096, 512), 8 MiB each: eagerly the product, dropout's result, LayerNorm's and the last GELU's, and a mask of 2 MiB.
    assert 34 * MIB <= both.eager.categories["activations"] < 35 * MIB
    assert both.compiled.categories["activations"] <= both.eager.categories["activations"] - 8 * MIB
    assert f"activations {both.eager.categories['activations'] / MIB:.1f} MiB" in str(both)
    # By module: of dropout only the mask is kept, its result is fused into the LayerNorm.
    assert (both.eager.kept["model.2"], both.compiled.kept["model.2"]) == (10 * MIB, 2 * MIB)
    assert re.search(r"\n +2 +10\.0 MiB +2\.0 MiB +-8\.0 MiB\n", str(both)), both
    assert "model" not in book.shell.user_ns
    assert torch.cuda.memory_allocated() == before


def test_what_a_first_run_tries_is_left_out(book: Notebook) -> None:
    """It would be 40 MiB more, to empty the card's cache with."""
    cell = 'x = torch.rand(2048, 2048, device="cuda")\nfast = torch.compile(lambda value: value.sin() * 2)\nfast(x)\n'
    book.cell("%%gpumem -o both --compare compile\n" + cell)
    both = book.shell.user_ns["both"]
    assert (both.eager.allocated, both.compiled.allocated) == (3 * 16 * MIB, 2 * 16 * MIB)
    assert "What torch.compile tries in a first run is left out here: on a card 1 kernel in several ways" in str(both)


def test_what_the_cell_compiles_runs_eagerly_in_one(book: Notebook) -> None:
    cell = MADE + "fast = torch.compile(lambda value: torch._dynamo.graph_break() or model(value))\n"
    book.cell("%%gpumem -o both --compare compile\n" + cell + STEPS.replace("model(", "fast("))
    both = book.shell.user_ns["both"]
    assert both.compiled.categories["activations"] < both.eager.categories["activations"]
    assert "graphs break at line 5" in str(both)
    assert not [note for note in both.eager.notes if "break" in note]


def test_what_a_checkpoint_runs_once_more_is_the_compiled_model_again(book: Notebook) -> None:
    cell = (
        MADE
        + "from torch.utils.checkpoint import checkpoint\n"
        + STEPS.replace("model(x)", "checkpoint(model, x, use_reentrant=False)")
    )
    book.cell("%%gpumem -o both --compare compile\n" + cell)
    both = book.shell.user_ns["both"]
    assert both.eager.ending == both.compiled.ending == FITS, both


def test_what_jit_traces_stays_as_it_is(book: Notebook) -> None:
    book.cell(
        "%%gpumem -o both --compare compile\n"
        + MADE
        + "fast = torch.jit.trace(model.eval(), x)\nfast(x).sum().backward()"
    )
    both = book.shell.user_ns["both"]
    assert both.eager.ending == both.compiled.ending == FITS, both


@pytest.mark.parametrize("flag", ["--fit n=1..8", "--advise", "--compare compile"])
def test_a_cell_that_awaits_is_refused_in_one_line(book: Notebook, flag: str) -> None:
    said = book.cell(f"%%gpumem {flag}\nimport asyncio\nn = 1\nawait asyncio.sleep(0)\ntorch.ones(n).cuda()")
    assert said.rstrip().endswith(
        "a cell that awaits at its top level cannot be tried: only the notebook's event loop runs it"
    ), said


def test_a_report_of_compiled_code_has_the_eager_run_before_it(book: Notebook) -> None:
    def note(cell: str) -> str:
        book.cell(f"%%gpumem -q -o report\n{cell}")
        return " ".join(one for one in book.shell.user_ns["report"].notes if "eagerly before" in one)

    made = MADE.replace("4096", "rows")
    fast = made + "fast = torch.compile(model)\n" + STEPS.replace("model(", "fast(")
    book.cell("rows = 4096\n")
    assert note(fast) == ""
    assert note(made + STEPS) == ""
    found = note(fast)
    assert "activations 34.0 MiB -> 18.0 MiB at the start of the first backward" in found
    assert "model.2 10.0 MiB -> 2.0 MiB" in found
    # The same text, with another batch.
    book.cell("rows = 2048\n")
    assert note(fast) == ""


def test_an_error_is_said(book: Notebook) -> None:
    book.cell("%%gpumem -o both --compare compile\n" + MADE + "model(x[:, :7])")
    told = str(book.shell.user_ns["both"])
    assert "Eagerly it raises RuntimeError" in told
    assert "at line 5" in told
