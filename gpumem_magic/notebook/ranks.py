"""``%%gpumem --ranks N``: the cell as ranks of a program of N processes. Nothing of it runs in the notebook's own process."""

# IPython's errors carry no types.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import argparse
from typing import Any

from IPython.core.error import UsageError

from gpumem_magic.devices.base import DeviceError
from gpumem_magic.notebook.giving import give_report
from gpumem_magic.notebook.stopping import stopped_in_a_line
from gpumem_magic.recording.cell import PreparedCell
from gpumem_magic.session.recording import remember

# What is about the cell's run in the notebook itself.
_NOT_WITH = ("fit", "on", "into", "budget", "max_delta")


def ranks(shell: Any, cell: PreparedCell, options: argparse.Namespace) -> None:
    """Shows the one report, and binds it where ``-o`` says so. Raises UsageError, in one line."""
    from gpumem_magic.trials.cell_ranks import CellFlags, report_of_ranks

    for name in _NOT_WITH:
        if getattr(options, name):
            raise UsageError(f"%%gpumem: --ranks and --{name.replace('_', '-')} do not go together")
    if _has_a_group():
        raise UsageError(
            "%%gpumem --ranks: this notebook's process has a process group already, which no rank can share. Call "
            "`torch.distributed.destroy_process_group()` in a cell before, and `init_process_group` inside this one"
        )
    how = CellFlags(not options.no_lines, options.max_iterations, options.until_repeat)
    try:
        with stopped_in_a_line("ranks"):
            report, printed = report_of_ranks(shell, cell, options.ranks, options.as_ranks, options.device, how)
    except (DeviceError, ValueError) as error:
        raise UsageError(f"%%gpumem --ranks: {error}") from None
    remember(report)
    if printed:
        print(printed, end="")
    give_report(shell, report, options)


def _has_a_group() -> bool:
    from torch import distributed

    return distributed.is_available() and distributed.is_initialized()
