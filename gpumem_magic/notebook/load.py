"""The line of ``%gpumem_load``: a snapshot file as a report, with its timeline beneath."""

# IPython's parser carries no types.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import argparse
import keyword
import os
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic_arguments import MagicArgumentParser

if TYPE_CHECKING:
    from gpumem_magic.user_report import Report

FLAGS = ("--at", "--device", "--html", "--no-timeline", "--output", "--quiet")
_ENDINGS = (".pickle", ".pkl", ".gz", ".html", ".json")


def load_line(shell: Any, line: str) -> None:
    """Reads the files that a line names and shows them. Raises UsageError, in one line."""
    options = _parse(line)
    from IPython.display import display

    from gpumem_magic.files.loaded import position_of, report_of, views_of
    from gpumem_magic.recording.quiet import no_automatic_collection
    from gpumem_magic.snapshot.files import read
    from gpumem_magic.snapshot.whole_file import check_target
    from gpumem_magic.timeline_page.view import timeline_of_files
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
            timeline = timeline_of_files(files, position_of(files[0][0], options.at))
            if options.html is not None:
                timeline.save(options.html)
    except (OSError, ValueError) as error:
        raise UsageError(" ".join(str(error).split())) from None
    if options.output is not None:
        shell.user_ns[options.output] = _bound(reports)
    if options.quiet:
        return
    for report in reports:
        display(report)
    if not options.no_timeline:
        display(timeline)


def complete(event: Any) -> list[str]:
    """The flags, and the files here that may hold a snapshot."""
    symbol = str(event.symbol)
    if symbol.startswith("-"):
        return list(FLAGS)
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


def _parse(line: str) -> argparse.Namespace:
    parser = MagicArgumentParser(prog="%gpumem_load", add_help=False)
    parser.add_argument("files", metavar="FILE", nargs="+")
    parser.add_argument("--device", type=int, metavar="N")
    parser.add_argument("--at", default="peak", metavar="MOMENT")
    parser.add_argument("--html", metavar="PATH")
    parser.add_argument("-o", "--output", metavar="NAME")
    parser.add_argument("-q", "--quiet", action="store_true")
    parser.add_argument("--no-timeline", action="store_true")
    try:
        options: argparse.Namespace = parser.parse_args(shlex.split(line))
    except ValueError as error:  # an open quotation mark
        raise UsageError(f"%gpumem_load: {error}") from None
    except UsageError as error:
        raise UsageError(f"%gpumem_load: {error}") from None
    name = options.output
    if name is not None and (not name.isidentifier() or keyword.iskeyword(name)):
        raise UsageError(f"%gpumem_load: {name!r} is not a name for a variable")
    return options
