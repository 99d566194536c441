"""Who measures without a notebook is offered no magics: in a script of their own, and for a file."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
import torch
from shell_fakes import clean_shell

from gpumem_magic import cli, measure
from gpumem_magic.session import device as devices
from gpumem_magic.user_report import Report

GIB = 1 << 30


def run_out() -> None:
    whole = torch.empty(6 * GIB, dtype=torch.uint8, device="cuda")
    del whole
    pieces = [torch.empty(GIB, dtype=torch.uint8, device="cuda") for _ in range(6)]
    del pieces[1::2]
    torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")


def fragmented() -> Report:
    """Three pieces are free, and one request wants two of them together."""
    with suppress(torch.OutOfMemoryError), measure(device="virtual:8GiB") as measured:
        run_out()
    return measured.report


def test_a_script_and_its_file_are_offered_what_they_can_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        report = fragmented()
        path = str(tmp_path / "run.pickle")
        report.save_snapshot(path)
    finally:
        devices.off()
    said = f"{report}\n{report.explain()}"
    assert "expandable_segments:True" in said
    assert "a setting must be there before CUDA is first used" in " ".join(said.split())
    assert "%gpumem" not in said
    assert cli.main(["show", path]) == 0
    shown = capsys.readouterr().out
    assert "expandable_segments:True" in shown
    assert "%gpumem" not in shown


def test_in_a_notebook_the_line_to_type_is_offered() -> None:
    with clean_shell():
        try:
            assert "`%gpumem_try expandable_segments:True`" in " ".join(str(fragmented()).split())
        finally:
            devices.off()
