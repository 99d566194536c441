"""What a magic found: bound where ``-o`` says so, and shown unless ``-q`` is among the flags."""

# IPython's display carries no types.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from gpumem_magic.looks.warned import warnings_remembered

if TYPE_CHECKING:
    from gpumem_magic.views.progress_line import ProgressLine


def give(shell: Any, found: object, options: argparse.Namespace, line: ProgressLine | None = None) -> None:
    """line: what was shown meanwhile, in whose place it goes."""
    _give(shell, found, found, options, line)


def give_report(shell: Any, report: Any, options: argparse.Namespace) -> None:
    """A report, as the part of it that ``--plot`` or ``--table`` asks for."""
    kind = "plot" if options.plot else "table" if options.table else None
    _give(shell, report, report.view(kind, options.output or ""), options)


def _give(
    shell: Any, found: object, view: object, options: argparse.Namespace, line: ProgressLine | None = None
) -> None:
    from IPython.display import display

    if options.output is not None:
        shell.user_ns[options.output] = found
    if not options.quiet:
        with warnings_remembered():  # matplotlib changes them
            if line is None or not line.become(view):
                display(view)
