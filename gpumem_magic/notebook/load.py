"""``%gpumem_load``: a snapshot file as a report, with its timeline below."""

# IPython's errors carry no types.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

if TYPE_CHECKING:
    from gpumem_magic.user_report import Report

_ENDINGS = (".pickle", ".pkl", ".gz", ".html", ".json")


def load(shell: Any, options: argparse.Namespace) -> None:
    """Reads the files and shows them. Raises UsageError, in one line."""
    from IPython.display import display

    from gpumem_magic.files.loaded import position_of, report_of, views_of
    from gpumem_magic.recording.quiet import no_automatic_collection
    from gpumem_magic.snapshot.files import read
    from gpumem_magic.snapshot.whole_file import check_target
    from gpumem_magic.timeline_page.view import timeline_of_reports
    from gpumem_magic.user_report import Report

    try:
        check_target("--html", options.html, options.files)
        with no_automatic_collection():
            loaded = [read(os.path.expanduser(name)) for name in options.files]
            files = [views_of(one, options.device) for one in loaded]
            found = [
                report_of(one, options.device, options.at, views) for one, views in zip(loaded, files, strict=True)
            ]
            reports = [Report.of(one) for one in found]
            timeline = timeline_of_reports(found, position_of(files[0][0], options.at))
            if options.html is not None:
                timeline.save(options.html)
    except (OSError, ValueError) as error:
        raise UsageError(" ".join(str(error).split())) from None
    if options.output is not None:
        shell.user_ns[options.output] = _bound(reports)
    if options.quiet:
        return
    for number, (name, report) in enumerate(zip(options.files, reports, strict=True)):
        bound = options.output and (options.output if len(reports) == 1 else f"{options.output}[{number}]")
        display(report.view(None, bound or f"gpumem_magic.load({name!r})"))
    if not options.no_timeline:
        display(timeline)


def files_here(symbol: str) -> list[str]:
    """The folders and files that a path may become which may hold a snapshot."""
    folder, _, _ = symbol.rpartition("/")
    try:
        found = sorted(os.scandir(os.path.expanduser(folder) or "."), key=lambda one: one.name)
    except OSError:
        return []
    prefix = f"{folder}/" if folder else ""
    folders = [f"{prefix}{one.name}/" for one in found if one.is_dir() and not one.name.startswith(".")]
    return [*folders, *(f"{prefix}{one.name}" for one in found if one.is_file() and one.name.endswith(_ENDINGS))]


def _bound(reports: Sequence[Report]) -> Any:
    """One file's report itself; several files' as a list, in the order of the line."""
    return reports[0] if len(reports) == 1 else list(reports)
