"""What values that nobody knows may have done to a program is said first."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gpumem_magic
from gpumem_magic.commands.words import for_a_script
from gpumem_magic.looks.decisions import ends_a_loop
from gpumem_magic.virtual import gpu


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    yield
    gpu.turn_off()


def unknown(*shape: int) -> torch.Tensor:
    return torch.rand(*(shape or (300, 300)), device="cuda")


def test_an_error_behind_a_stand_in_names_it_and_the_way_out() -> None:
    with pytest.raises(AssertionError), gpumem_magic.measure(device="T4,values=auto") as measured:  # noqa: PT012
        largest = unknown().max().item()
        assert largest > 5
    first = measured.report.answer
    assert first.startswith("This may have failed because of a value that the virtual GPU does not know, read at ")
    assert "`%gpumem_device NAME,values=real` computes values." in first
    assert "`--device NAME,values=real` computes values" in for_a_script(first)


def test_an_error_of_another_kind_is_not_put_down_to_values() -> None:
    with pytest.raises(NameError), gpumem_magic.measure(device="T4,values=auto") as measured:  # noqa: PT012
        unknown().max().item()
        nobody_has_this_name  # type: ignore[name-defined]  # noqa: B018, F821
    assert "does not know" not in measured.report.answer


def test_an_error_without_a_stand_in_is_the_programs_own() -> None:
    with pytest.raises(AssertionError), gpumem_magic.measure(device="T4,values=auto") as measured:
        assert torch.ones(3, device="cuda").sum() > 5
    assert "does not know" not in measured.report.answer


def test_a_loop_that_goes_by_a_stand_in_is_said_first() -> None:
    with gpumem_magic.measure(device="T4,values=auto") as measured:
        for _ in range(9):
            loss = unknown().square().mean()
            if loss.item() < 0.97:
                break
    assert measured.report.answer.startswith("A loop may have ended earlier or later than on a GPU: it goes by a value")


def test_a_number_that_is_only_printed_decides_nothing() -> None:
    with gpumem_magic.measure(device="T4,values=auto") as measured:
        for _ in range(3):
            loss = unknown().square().mean().item()
            if torch.isnan(unknown().sum()):
                break
        print(loss)
    assert len(measured.report.stand_ins) == 2
    assert "A loop" not in measured.report.answer


@pytest.mark.parametrize(
    ("code", "line", "decides"),
    [
        ("while x.item() > 1:\n    step()", 1, True),
        ("while True:\n    y = x.item()\n    z = y * 2\n    if z < 3:\n        break", 2, True),
        ("for _ in range(9):\n    y = x.item()\n    if y < 3:\n        print(y)", 2, False),
        ("for _ in range(9):\n    if x.isnan().any():\n        break", 2, False),
        ("def run():\n    for _ in range(9):\n        if x < 1: return\nwhile y > 1: pass", 3, True),
        ("y = x.item()\ndef run(y):\n    while y: pass", 1, False),
        ("if x.item():\n    y = 1", 1, False),
        ("while (", 1, False),
    ],
)
def test_which_lines_end_a_loop(tmp_path: Path, code: str, line: int, decides: bool) -> None:
    place = tmp_path / "program.py"
    place.write_text(code, "utf-8")
    assert ends_a_loop(str(place), line) is decides


def test_a_wait_that_never_ends_is_said_once(tmp_path: Path) -> None:
    gpu.turn_on("T4,values=auto")
    code = textwrap.dedent("""
        count = 0
        while not done.all():
            count += 1
            if count == 1500:
                break
    """)
    place = tmp_path / "waits.py"
    place.write_text(code, "utf-8")
    names: dict[str, Any] = {"done": unknown() == 3, "__name__": "program"}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        exec(compile(code, str(place), "exec"), names)
    told = [str(one.message) for one in seen if "may never end" in str(one.message)]
    assert len(told) == 1
    assert told[0].startswith("line 3 of waits.py has read values 1,000 times")


@pytest.mark.parametrize("values", ["auto", "real", "stand-in"])
def test_suppressed_boxes_of_torchvision(values: str) -> None:
    if hasattr(torch.ops.torchvision, "nms"):
        pytest.skip("torchvision's own is there")
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.impl("nms", lambda boxes, scores, threshold: scores.argsort(descending=True)[:2], "CPU")
    try:
        gpu.turn_on(f"T4,values={values}")
        boxes, scores = torch.rand(5, 4).to("cuda"), torch.tensor([0.1, 0.5, 0.3, 0.9, 0.2], device="cuda")
        kept = torch.ops.torchvision.nms(boxes, scores, 0.5)
        assert kept.is_cuda
        if values == "stand-in":
            assert kept.shape == (5,)
        else:
            assert kept.tolist() == [3, 1]
        assert torch.ops.torchvision.nms(unknown(70, 4), unknown(70), 0.5).shape == (
            (2,) if values == "real" else (70,)
        )
    finally:
        library._destroy()
