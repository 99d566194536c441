"""Running cells in a notebook of its own, for the tests of causes."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from IPython.utils.capture import capture_output
from shell_fakes import clean_shell

import gpumem_magic
from gpumem_magic.causes import program
from gpumem_magic.report.model import Cause
from gpumem_magic.user_report import Report

SETUP = """
import torch
from torch import nn

def mib(n): return torch.empty(n << 18, device="cuda")
def net(width=512, layers=3):
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)]).cuda()
"""


class Notebook:
    """A shell with a virtual device. A cell's report is made by ``%%gpumem``."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell

    def cell(self, code: str) -> str:
        """Runs a cell as it is; what it printed."""
        with capture_output(display=False) as captured:
            self.shell.run_cell(code, store_history=True)
        return captured.stdout + captured.stderr

    def allocated(self) -> int:
        """What the device has allocated now, in bytes."""
        return int(self.shell.user_ns["torch"].cuda.memory_allocated())

    @contextmanager
    def forgetting(self) -> Iterator[Notebook]:
        """Names that cells give inside are gone behind it."""
        before = set(self.shell.user_ns)
        try:
            yield self
        finally:
            for name in set(self.shell.user_ns) - before:
                del self.shell.user_ns[name]

    def measured(self, code: str) -> Report:
        self.cell("%%gpumem -q\n" + code)
        report = gpumem_magic.last_report()
        assert report is not None
        return report


@contextmanager
def notebook(device: str = "A100-40GB", setup: str = SETUP) -> Iterator[Notebook]:
    # What other tests have left imported is no file of this program's.
    files = program._files
    before = set(files({}))
    with pytest.MonkeyPatch.context() as patch, clean_shell() as shell:
        patch.setattr(program, "_files", lambda namespace: (one for one in files(namespace) if one not in before))
        shell.run_line_magic("load_ext", "gpumem_magic")
        book = Notebook(shell)
        try:
            book.cell(f"%gpumem_device {device}")
            book.cell(setup)
            yield book
        finally:
            shell.user_ns.clear()
            for name in ("last_exc", "last_type", "last_value", "last_traceback"):
                vars(sys).pop(name, None)
            gc.collect()
            shell.run_line_magic("gpumem_device", "off")


def names(report: Report) -> list[str]:
    return [cause.name for cause in report.causes]


def named(report: Report, name: str) -> Cause:
    """The one cause of that name."""
    (cause,) = [one for one in report.causes if one.name == name]
    return cause


def measured(before: str, cell: str, device: str = "A100-40GB") -> Report:
    """The report of a cell that ends without an error, behind another one."""
    with notebook(device) as book:
        book.cell(f"import torch.nn.functional as F\n{before}")
        report = book.measured(cell)
        assert report.error is None, report.error
        return report
