"""Of which of the program's lines the buffers of compiled code are."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from causes_cells import Notebook, notebook
from torch._dynamo.utils import counters

from gpumem_magic.user_report import Report

MIB = 1 << 20
WAVES = """
def waves(x):
    y = x @ x
    y = y.sin()
    return (y @ x).cos()
"""


@pytest.fixture
def book(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Notebook]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with notebook("A100-40GB") as found:
        found.cell("x = torch.rand(1024, 1024, device='cuda', requires_grad=True)")
        yield found


def lines(report: Report, at: Any = "peak") -> dict[int, float]:
    """By the line, what compiled code has made, in MiB."""
    found: Counter[int] = Counter()
    for one in report.tensors(at):
        if one.operator == "torch.compile" and one.bytes >= MIB:
            found[one.line] += one.bytes
    return {line: size / MIB for line, size in found.items()}


def test_each_tensor_is_of_the_line_whose_result_it_is(book: Notebook) -> None:
    report = book.measured(WAVES + "y = torch.compile(waves)(x)")
    (row,) = (row for row in report.checkpoints if "waves)(x)" in row.label)
    # The two products and what the first one's sine is are kept for backward, beside the result.
    assert lines(report, row) == {4: 4, 5: 4, 6: 8}
    assert "of the compiled `return (y @ x).cos()` (line 6)" in report.answer


def test_a_gradient_is_of_its_forwards_line(book: Notebook) -> None:
    book.cell(WAVES + "fast = torch.compile(waves)")
    report = book.measured("loss = fast(x).sum()\nloss.backward()")
    backward = [one for one in report.tensors() if one.operator == "torch.compile" and one.backward]
    assert {one.category for one in backward} == {"activation_gradients", "gradients"}
    # The function is another cell's.
    assert {one.inner for one in backward} <= {f"In [4]:{line} waves" for line in (3, 4, 5)}


def test_functions_that_share_their_generated_code_keep_their_lines(book: Notebook) -> None:
    twice = WAVES + WAVES.replace("waves", "others")
    report = book.measured(twice + "a = torch.compile(waves)(x)\nb = torch.compile(others)(x)")
    first, second = (
        next(row for row in report.checkpoints if f"{name})(x)" in row.label) for name in ("waves", "others")
    )
    assert lines(report, first) == {4: 4, 5: 4, 6: 8}
    assert lines(report, second) == {4: 4, 5: 4, 6: 8, 9: 4, 10: 4, 11: 8}


def test_lines_that_moved_are_told_where_they_are_now(book: Notebook) -> None:
    """The graph is taken from the compiler's cache, which is not told of it."""
    book.measured(WAVES + "y = torch.compile(waves)(x)")
    torch._dynamo.reset()
    hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    report = book.measured("\n\n# (Some words.)" + WAVES + "y = torch.compile(waves)(x)")
    assert counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"] > hits
    row = report.checkpoints[-1]
    assert lines(report, row) == {6: 4, 7: 4, 8: 8}


def test_another_order_of_the_same_operators_is_not_taken_for_it(book: Notebook) -> None:
    """The graph is the same, and its nodes are of other lines."""
    book.measured(WAVES + "y = torch.compile(waves)(x)")
    torch._dynamo.reset()
    report = book.measured(
        "def waves(x):\n    y = (x @ x).sin()\n    y = y @ x\n    return y.cos()\ny = torch.compile(waves)(x)"
    )
    assert lines(report, report.checkpoints[-1]) == {3: 8, 4: 4, 5: 4}


def test_a_librarys_line_is_told_with_the_programs_own(book: Notebook) -> None:
    pytest.importorskip("transformers")
    report = book.measured(
        "from transformers.activations import NewGELUActivation\nact = NewGELUActivation()\n"
        "def waves(x):\n    y = x @ x\n    return act(y) @ y\ny = torch.compile(waves)(x)"
    )
    made = {
        (one.line, one.inner.partition(":")[0]) for one in report.tensors(report.checkpoints[-1]) if one.bytes >= MIB
    }
    assert (6, "activations.py") in {(line, Path(inner).name) for line, inner in made}
    assert (5, "") in made


def test_a_request_that_fails_in_compiled_code_is_told_with_its_line_and_the_models_name(book: Notebook) -> None:
    report = book.measured(
        "class Waves(nn.Module):\n    def forward(self, x):\n        y = x.sin()\n        return y.repeat(1 << 15, 1).cos() @ x\n"
        "out = torch.compile(Waves())(x)"
    )
    assert re.search(
        r"Wanted [\d,]+ MiB for a \([\d, ]+\) float32 tensor of the compiled `return y.repeat", report.answer
    )
    assert "(line 5);" in report.answer
    assert "It failed in the forward of `Waves`" in str(report.show("all"))


def test_what_compiled_code_holds_where_memory_runs_out_goes_by_no_name_of_the_compilers(book: Notebook) -> None:
    book.cell(WAVES.replace("(y @ x)", "(y.exp() @ x).repeat(12_000, 1)"))
    report = book.measured("out = torch.compile(waves)(x)")
    held = [one for one in report.error.tensors if one.operator == "torch.compile"]
    assert {one.kept_by for one in held} == {"compiled code, in this error's traceback"}
    assert "the call under way" in str(report.show("all"))
