"""A report on standard error, and the files that a command also writes it to, as its flags name them: ``--json``, ``--html``,
``--png``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gpumem_magic.failures import swallowed
from gpumem_magic.snapshot.whole_file import check_target, replace_file

if TYPE_CHECKING:
    from gpumem_magic.report.model import ReportData
    from gpumem_magic.user_report import Report


def write_page(report: Report, path: str | os.PathLike[str]) -> None:
    """The report as one page, which needs nothing else. It opens row by row, without a picture and without a script."""
    from gpumem_magic.views.html import card, page

    content = page(card(report, None)).encode()
    replace_file(path, lambda file: file.write(content))


def write_picture(report: ReportData, path: str | os.PathLike[str]) -> None:
    from gpumem_magic.views.figure import png

    content = png(report)[0]
    replace_file(path, lambda file: file.write(content))


def _write_json(report: Report, path: str | os.PathLike[str]) -> None:
    report.save(path)


_WRITERS: Mapping[str, Callable[[Report, str | os.PathLike[str]], None]] = {
    "json": _write_json,
    "html": write_page,
    "png": write_picture,
}


def targets(options: argparse.Namespace) -> dict[str, Path]:
    """The files that were asked for, by their flags, wherever the program goes. Raises ValueError where one can't be written."""
    asked = {name: getattr(options, name, None) for name in _WRITERS}
    for name, path in asked.items():
        check_target(f"--{name}", path, ())
    return {name: Path(path).expanduser().absolute() for name, path in asked.items() if path is not None}


def write(report: Report, written_to: Mapping[str, Path]) -> None:
    """Writes the report to its `targets`. Raises OSError, in one line."""
    for flag, path in written_to.items():
        _WRITERS[flag](report, path)


def say(text: str) -> None:
    print(f"gpumem: {text}", file=sys.stderr)


def hand_over(report: Report, written_to: Mapping[str, Path], *, line: str | None = None) -> None:
    """Prints the report to standard error, or only `line`, and writes it to its `targets`. What fails is a line there."""
    from gpumem_magic.views.text import render

    try:
        if line is None:
            # The script's Python ends with it: the rest is in a page.
            page = f"{written_to['html']} has" if "html" in written_to else "`--html PATH` writes a page with"
            line = render(report, page=page) + "\n"
        if line:
            # In one piece, among those of other processes.
            sys.stderr.write(line)
            sys.stderr.flush()
    except Exception as error:
        say(f"the report could not be shown ({swallowed(error).splitlines()[0]})")
    for flag, path in written_to.items():
        try:
            write(report, {flag: path})
        except Exception as error:
            say(f"the report could not be written to {str(path)!r} ({swallowed(error).splitlines()[0]})")
