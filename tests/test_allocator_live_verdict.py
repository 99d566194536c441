"""A measured program that runs out of memory on a virtual device: its report says what splits the place, and what would help."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from IPython.utils.capture import capture_output
from shell_fakes import clean_shell, show_text_alone

import gpumem_magic
from gpumem_magic.report.failure import failed_request
from gpumem_magic.units import MIB
from gpumem_magic.user_report import Report
from gpumem_magic.views import explain, what_failed

SETUP = """
import torch

def mib(size):
    return torch.empty(size << 18, device="cuda")
"""

# In the second iteration `kept` lies in the piece that `scratch` had in the first.
CELL = """%%gpumem
rows = mib(300)
for step in range(4):
    small = [mib(30 + number) for number in range(8)]
    small = None
    scratch = mib(500)
    scratch = None
    kept = mib(40)
"""


@pytest.fixture
def shell() -> Iterator[Any]:
    with clean_shell() as shell:
        shell.run_line_magic("load_ext", "gpumem_magic")
        show_text_alone(shell)
        shell.run_line_magic("gpumem_device", "virtual:1000MiB,context=0MiB,idle=0MiB")
        yield shell
        shell.user_ns.clear()
        gc.collect()
        shell.run_line_magic("gpumem_device", "off")


def run(shell: Any, cell: str) -> Report:
    with capture_output():
        shell.run_cell(SETUP)
        shell.run_cell(cell)
    report = gpumem_magic.last_report()
    assert report is not None
    return report


def test_a_failed_cell_says_who_splits_the_place(shell: Any) -> None:
    report = run(shell, CELL)
    assert report.error is not None
    found = report.error.verdict
    assert found is not None
    assert (found.cause, found.free, found.cached, found.spare) == ("fragmentation", 200 * MIB, 460 * MIB, 160 * MIB)
    assert (found.place, found.more_pieces) == (500 * MIB, 0)
    (piece,) = found.pieces
    assert piece.bytes == 40 * MIB
    assert piece.what.startswith("`kept`")
    assert piece.what.endswith("`kept = mib(40)` in iteration 1, line 8")
    assert found.left_by.endswith("`scratch = mib(500)` in iteration 1, line 6")
    outcomes = {trial.conf: (trial.passes, trial.rounds) for trial in found.trials}
    assert outcomes["expandable_segments:True"] == (True, found.rounds)
    assert found.rounds > 1
    assert outcomes["garbage_collection_threshold:0.8"] == (False, 0)
    # The eight small ones, the scratch memory, and what is kept.
    assert found.requests == 10
    verdict = what_failed.verdict(report)
    assert verdict is not None
    assert "fragmentation is the cause" in verdict.lower()
    assert "with perfect packing, 160 MiB (16 % of the device) would be left." in verdict
    assert "left are split by `kept`" in verdict
    assert "replayed with expandable_segments:True" in " ".join(explain.remarks(report))
    assert Report.from_dict(report.to_dict()).error == report.error


@pytest.mark.parametrize("cell", [CELL, "%%gpumem\nrows = [mib(300) for _ in range(4)]\n"])
def test_the_figures_alone_show_the_same_cause(shell: Any, cell: str) -> None:
    report = run(shell, cell)
    assert report.error is not None
    found, told = report.error.verdict, failed_request(replace(report, error=replace(report.error, verdict=None)))
    assert found is not None
    assert told is not None
    assert (told.cause, told.free, told.cached, told.spare) == (found.cause, found.free, found.cached, found.spare)


def test_in_truth_the_setting_helps(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shell.run_line_magic("gpumem_device", "off")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    shell.run_line_magic("gpumem_device", "virtual:1000MiB,context=0MiB,idle=0MiB")
    report = run(shell, CELL)
    assert report.error is None
    assert report.peak.peak_reserved <= 1000 * MIB


def test_too_much_is_too_much(shell: Any) -> None:
    report = run(shell, "%%gpumem\nrows = [mib(300) for _ in range(4)]\n")
    assert report.error is not None
    found = report.error.verdict
    assert found is not None
    assert (found.cause, found.spare, found.trials, found.tried) == ("capacity", -200 * MIB, (), True)
    assert "No allocator setting can make up for the missing memory." in explain.remarks(report)


def test_a_limit_that_the_program_set_has_its_figure(shell: Any) -> None:
    """The device has room for it all; half of it is allowed."""
    limited = "torch.cuda.set_per_process_memory_fraction(0.5)"
    report = run(shell, f"%%gpumem\n{limited}\nrows = [mib(200) for _ in range(4)]\n")
    assert report.error is not None
    found = report.error.verdict
    assert found is not None
    assert (found.cause, found.limit, found.free) == ("limit", 500 * MIB, 600 * MIB)
    assert what_failed.verdict(report) is not None
    assert "this process may reserve only 500 MiB" in str(what_failed.verdict(report))


def test_where_the_limit_is_lifted_again_there_is_none(shell: Any) -> None:
    report = run(
        shell,
        "%%gpumem\ntorch.cuda.set_per_process_memory_fraction(0.5)\nrows = [mib(200) for _ in range(2)]\n"
        "torch.cuda.set_per_process_memory_fraction(1.0)\nrows += [mib(200) for _ in range(4)]\n",
    )
    assert report.error is not None
    found = report.error.verdict
    assert found is not None
    assert (found.cause, found.limit) == ("capacity", None)
