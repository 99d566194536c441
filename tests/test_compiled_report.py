"""What a report says of compiled code: its phases, where graphs break, and what was compiled again."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import gpumem_magic
from gpumem_magic.report.schema import report_from_dict
from gpumem_magic.virtual import gpu

MIB = 1 << 20


@pytest.fixture(scope="module")
def report() -> Iterator[Any]:
    with warnings.catch_warnings():
        # PyTorch's own advice about TF32.
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
        gpu.turn_on("A100-40GB")
        said = []

        @torch.compile
        def loss(x: torch.Tensor) -> torch.Tensor:
            y = x.sin().exp()
            said.append(torch._dynamo.graph_break())
            return y.cos().tanh().sum()

        @torch.compile
        def in_a_loop(x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = x.sin()
                said.append(x.mean().item())
            return x

        again = torch.compile(torch.nn.Linear(64, 32).cuda())
        x = torch.rand(MIB, device="cuda", requires_grad=True)
        with gpumem_magic.measure() as measured:
            loss(x).backward()
            in_a_loop(x)
            for rows in (16, 32):
                again(torch.rand(rows, 64, device="cuda"))
        yield measured.report
    gpu.turn_off()


def test_breaks_are_said_with_their_lines_and_reasons(report: Any) -> None:
    (note,) = (one for one in report.notes if "graphs break" in one)
    assert "`said.append(torch._dynamo.graph_break())`" in note
    assert "test_compiled_report.py:" in note
    assert "Call to `torch._dynamo.graph_break()`" in note
    assert "graphs break" in str(report)


def test_what_was_not_compiled_is_said_with_the_line_and_the_reason(report: Any) -> None:
    (note,) = (one for one in report.notes if "could not compile" in one)
    assert "`said.append(x.mean().item())`" in note
    assert "test_compiled_report.py:" in note
    assert "Tensor.item()" in note or "loop" in note


def test_what_was_compiled_again_is_said_with_the_reason(report: Any) -> None:
    (note,) = (one for one in report.notes if "compiled again" in one)
    assert "a module of PyTorch's 1 time" in note
    assert "expected 16, actual 32" in note


def test_the_same_as_plain_data(report: Any) -> None:
    data = json.loads(json.dumps(report.to_dict()))
    (one,) = data["compiled"]["breaks"]
    assert one["count"] == 1
    assert data["compiled"]["graphs"] == 4
    assert data["compiled"]["again"][0]["count"] == data["compiled"]["failed"][0]["count"] == 1
    assert report_from_dict(data).compiled == report.compiled


def test_code_outside_modules_has_phases(report: Any) -> None:
    labels = [part.label for row in report.checkpoints for part in row.parts]
    # Two graphs of the function; the layer's are its forward.
    assert labels == ["compiled code", "compiled code", "backward", "forward", "forward"]


def test_what_compiled_code_keeps_is_its_modules() -> None:
    """As Dynamo noted it."""

    def block() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(512, 512, bias=False), torch.nn.GELU())

    gpu.turn_on("A100-40GB")
    try:
        for _ in ("compiled", "from the compiler's cache"):
            torch._dynamo.reset()
            fast = torch.compile(torch.nn.Sequential(block(), block()).cuda())
            with gpumem_magic.measure() as measured:
                fast(torch.rand(4096, 512, device="cuda")).sum().backward()
            (top,) = (one for one in measured.report.layers().children if one.name != "outside modules")
            assert top.name == "fast"
            assert [[inner.activations for inner in one.children] for one in top.children] == [[8 * MIB] * 2, [8 * MIB]]
    finally:
        gpu.turn_off()
