"""Copies on the host of values that nobody knows, which come back to the device."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import gpumem_magic
from gpumem_magic.recording.model import StandIn
from gpumem_magic.session.measure import Measurement
from gpumem_magic.views import explain
from gpumem_magic.virtual import gpu


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    yield
    gpu.turn_off()


def unknown(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, device="cuda")


def read_of(measured: Measurement) -> list[tuple[int, int]]:
    """Of each line that read: how often, and how often that came back."""
    return [(one.count, one.returned) for one in measured.report.stand_ins]


def test_what_goes_to_the_host_and_back_is_not_said_to_be_read() -> None:
    with gpumem_magic.measure(device="T4") as measured:
        for _ in range(3):
            away = unknown(40, 50).cpu()
            again = away[:20].cuda()
        del away, again
    assert read_of(measured) == [(3, 3)]
    said = next(one for one in explain.remarks(measured.report) if "stand-ins" in one)
    assert said.startswith("Values on this device are stand-ins; they went to the host and back at ")
    assert said.endswith(" (3 times).")


def test_activations_that_are_saved_on_the_host_come_back() -> None:
    with gpumem_magic.measure(device="T4") as measured:
        weight = torch.nn.Linear(50, 50, device="cuda")
        with torch.autograd.graph.save_on_cpu():
            loss = weight(unknown(40, 50)).relu().square().sum()
        loss.backward()
    ((count, returned),) = read_of(measured)
    assert count == returned > 1


def test_a_buffer_of_the_host_is_filled_in_parts_that_come_back() -> None:
    with gpumem_magic.measure(device="T4") as measured:
        kept, weight = torch.empty(4, 40, 50), unknown(40, 50)
        for part in kept:
            part.copy_(weight)
        for part in kept:
            weight.copy_(part)
    assert read_of(measured) == [(4, 4)]


def test_what_came_back_has_no_values_either() -> None:
    with gpumem_magic.measure(device="T4") as measured:
        again = unknown(4, 5).cpu().cuda()
        large = unknown(400, 500).cpu().cuda()
        into = torch.zeros(4, 5, device="cuda")
        into.copy_(unknown(4, 5).cpu())
        assert [one.sum().item() for one in (again, large, into)] == [0, 0, 0]
    assert [count for count, returned in read_of(measured) if not returned] == [3]


def test_what_is_changed_printed_or_decides_on_the_host_was_read(capsys: pytest.CaptureFixture[str]) -> None:
    with gpumem_magic.measure(device="T4") as measured:
        changed = unknown(40, 50).cpu()
        changed += 1
        changed.cuda()
        shown = unknown(40, 50).cpu()
        print(shown.mean())
        shown.cuda()
        asked = unknown(40, 50).cpu()
        if asked.mean() > 3:
            unknown(30)
        asked.cuda()
        gone = unknown(40, 50).cpu()
        del gone
        torch.rand(40, 50).cuda()
    assert read_of(measured) == [(1, 0)] * 4
    assert "tensor(0.)" in capsys.readouterr().out


def test_with_real_values_nothing_is_a_stand_in() -> None:
    with gpumem_magic.measure(device="T4,values=real") as measured:
        again = torch.ones(4, 5, device="cuda").cpu().cuda()
        assert again.sum().item() == 20
    assert read_of(measured) == []


def test_lines_that_read_are_told_before_those_that_sent() -> None:
    with gpumem_magic.measure(device="T4") as measured:
        pass
    told = replace(measured.report, stand_ins=(StandIn("4", 2, returned=2), StandIn("9", 3, returned=1)))
    assert "; they were read at line 9 (3 times), and went to the host and back at line 4 (2 times)." in " ".join(
        explain.remarks(told)
    )


@pytest.mark.parametrize("where", ["a file", "memory"])
def test_what_was_saved_of_what_nobody_knows_is_not_known_when_it_is_loaded(tmp_path: Path, where: str) -> None:
    file = io.BytesIO() if where == "memory" else tmp_path / "saved.pt"
    with gpumem_magic.measure(device="T4") as measured, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        drawn = torch.rand(300, 300, device="cuda")
        torch.save({"loss": drawn.sum(), "step": torch.tensor(7, device="cuda")}, file)
        if isinstance(file, io.BytesIO):
            file.seek(0)
        loaded = torch.load(file)
        assert loaded["step"].item() == 7
        if loaded["loss"].item() > 1:
            torch.relu(drawn)
    assert "an `if` may go the other way" in measured.report.answer
