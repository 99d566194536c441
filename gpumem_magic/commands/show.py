"""``gpumem show FILE...``: the report of a snapshot file, or those of several ranks side by side."""

from __future__ import annotations

import argparse
import os
from typing import Any

from gpumem_magic.commands.common import guarded, table
from gpumem_magic.units import human, mib


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Adds the subcommand; its options have the attribute `run`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "show",
        help="report a memory snapshot that PyTorch wrote",
        description="Reports FILE: a pickle of torch.cuda.memory._dump_snapshot, gzipped or not, its page, or JSON. Several "
        "files (one for each rank) are shown side by side.",
    )
    parser.add_argument("files", metavar="FILE", nargs="+")
    parser.add_argument("--device", type=int, metavar="N", help="the GPU; by default the one with the highest peak")
    parser.add_argument("--at", default="peak", metavar="MOMENT", help="peak (the default), end, or an event's number")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="how many allocations to list (default 10)")
    parser.add_argument("--json", metavar="PATH", help="also write the report to PATH, as JSON")
    parser.add_argument("--redact", metavar="PATH", help="write a copy of the snapshot without paths and names to PATH")
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace) -> int:
    """Prints the report. 0; 2 where a file can't be read or the options do not fit."""
    return guarded(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    if len(options.files) > 1:
        if options.json or options.redact:
            raise ValueError("--json and --redact are for one file: name only one")
        print(_side_by_side(options))
        return 0
    from gpumem_magic.report.from_file import FileView, fragmentation, report_of
    from gpumem_magic.snapshot.files import read, write
    from gpumem_magic.snapshot.redact import redacted

    loaded = read(options.files[0])
    report = report_of(loaded, options.device, options.at)
    view = FileView(loaded, report.device.index)
    position = view.position(options.at)
    print(f"{loaded.path}: {loaded.form}, written by torch {loaded.torch}\n")
    print(report)
    largest = view.largest(position, max(options.top, 0))
    if largest:
        print(f"\nThe largest allocations ({_moment(options.at)}):")
    for one in largest:
        why = f"; it {one.why}" if one.why else ""
        print(f"  {human(one.requested):>10}  {one.category.replace('_', ' ')} ({one.evidence}{why})")
        for line in one.stack:
            print(f"              {_printable(line)}")
    print(f"\nSegments ({_moment(options.at)}; # in use, : partly, . free):")
    for line in fragmentation(view.segments(position)):
        print(f"  {line}")
    if options.json:
        report.save(options.json)
    if options.redact:
        write(redacted(loaded.snapshot), options.redact, {"torch": loaded.torch})
    return 0


def _side_by_side(options: argparse.Namespace) -> str:
    from gpumem_magic.report.from_file import report_of
    from gpumem_magic.report.model import CATEGORIES
    from gpumem_magic.snapshot.files import read

    reports = [report_of(read(path), options.device, options.at) for path in options.files]
    names = [os.path.basename(path) for path in options.files]
    if len(set(names)) < len(names):
        names = list(options.files)
    rows = [["MiB at the peak", *names]]
    rows.append(["allocated", *(mib(report.peak.allocated) for report in reports)])
    rows.append(["reserved, highest", *(mib(report.peak.peak_reserved) for report in reports)])
    for category in CATEGORIES:
        sizes = [report.peak.categories.get(category) for report in reports]
        if any(sizes):
            rows.append([category.replace("_", " "), *("-" if size is None else mib(size) for size in sizes)])
    return _printable_lines(table(rows))


def _moment(at: str) -> str:
    return {"peak": "at the peak", "end": "at the end"}.get(at, f"after event {at}")


def _printable(text: str) -> str:
    """A hostile file's strings must not move the cursor or change colours."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _printable_lines(text: str) -> str:
    return "\n".join(_printable(line) for line in text.split("\n"))
