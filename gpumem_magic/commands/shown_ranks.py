"""The reports of several ranks, shown as one: read from their folder."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpumem_magic.failures import swallowed
from gpumem_magic.files import rank_files
from gpumem_magic.files.rank_files import RankFile
from gpumem_magic.report.side_by_side import together

if TYPE_CHECKING:
    from gpumem_magic.user_report import Report


def report_of(files: Sequence[RankFile], *, virtual: bool = False, taken: Mapping[int, int] | None = None) -> Report:
    """One report of all ranks. Raises ValueError where none of them made one."""
    from gpumem_magic.user_report import Report

    world = max(one.world for one in files)
    return Report.of(together([one.known for one in files], world, virtual=virtual, taken=taken))


def show(folder: Path, target: Path | None, *, virtual: bool = False, taken: Mapping[int, int] | None = None) -> bool:
    """Prints the ranks' one report to standard error, and writes it to `target`. False, with a line that says why, where there
    is nothing to show."""
    from gpumem_magic.views.text import render

    try:
        files = rank_files.read(folder)
        report = report_of(files, virtual=virtual, taken=taken)
        if target is not None:
            report.save(target)
        needs = " with `--json PATH`" if target is None else ""
        sys.stderr.write(f"{render(report, name='gpumem_magic.Report.load(PATH)', needs=needs)}\n")
        sys.stderr.flush()
    except Exception as error:
        print(f"gpumem: the ranks' reports could not be shown ({swallowed(error).splitlines()[0]})", file=sys.stderr)
        return False
    return True
