"""``gpumem show FILE...``: the report of a snapshot file, or those of several ranks side by side."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpumem_magic.commands.common import guarded
from gpumem_magic.snapshot.whole_file import check_target, printable
from gpumem_magic.units import human, mib
from gpumem_magic.views.lines import table

if TYPE_CHECKING:
    from gpumem_magic.attribution.view import DeviceView
    from gpumem_magic.snapshot.files import LoadedSnapshot


@guarded
def run(options: argparse.Namespace) -> int:
    """Prints the report. 0; 2 where a file can't be read or the options do not fit."""
    from gpumem_magic.files.loaded import position_of, views_of
    from gpumem_magic.snapshot.files import read

    if len(options.files) > 1 and (options.json or options.redact):
        raise ValueError("--json and --redact are for one file: name only one")
    for option, target in (("--json", options.json), ("--html", options.html), ("--redact", options.redact)):
        check_target(option, target, options.files)
    files = [read(path) for path in options.files]
    views = [views_of(loaded, options.device) for loaded in files]
    print(_side_by_side(options.files, views, options.at) if len(views) > 1 else _text(files[0], views[0], options))
    if options.html:
        from gpumem_magic.timeline_page.view import timeline_of_files

        timeline_of_files(views, position_of(views[0][0], options.at)).save(options.html)
    return 0


def _text(loaded: LoadedSnapshot, views: list[DeviceView], options: argparse.Namespace) -> str:
    """The report of one file; writes what else is asked for of it."""
    from gpumem_magic.files.loaded import position_of, report_of
    from gpumem_magic.files.report_file import save
    from gpumem_magic.snapshot.files import write
    from gpumem_magic.snapshot.redact import redacted
    from gpumem_magic.views.segments import fragmentation
    from gpumem_magic.views.text import render

    report = report_of(loaded, options.device, options.at, views)
    view = next((one for one in views if one.device == report.device.index), views[0])
    position = position_of(view, options.at)
    lines = [f"{printable(loaded.path)}: {loaded.form}, written by torch {printable(loaded.torch)}", "", render(report)]
    largest = view.largest(position, max(options.top, 0))
    if largest:
        lines += ["", f"The largest allocations ({_moment(options.at)}):"]
    for one in largest:
        why = f"; it {one.why}" if one.why else ""
        name = f" {printable(one.name)}" if one.name else ""
        lines.append(f"  {human(one.requested):>10}  {one.category.replace('_', ' ')}{name} ({one.evidence}{why})")
        lines += [f"              {printable(line)}" for line in one.stack]
    lines += ["", f"Segments ({_moment(options.at)}; # in use, : partly, . free):"]
    lines += [f"  {line}" for line in fragmentation(view.timeline.segments_at(position))]
    if options.json:
        save(report, options.json)
    if options.redact:
        write(redacted(loaded.snapshot), options.redact, {"torch": loaded.torch})
    return "\n".join(lines)


def _side_by_side(paths: Sequence[str], files: list[list[DeviceView]], at: str) -> str:
    """A column for each device of each file: several ranks of one job."""
    from gpumem_magic.files.loaded import position_of

    names: Sequence[str] = [os.path.basename(path) for path in paths]
    if len(set(names)) < len(names):
        names = paths
    heads, columns, highest = [], [], []
    for name, views in zip(names, files, strict=True):
        for view in views:
            heads.append(name if len(views) == 1 else f"{name}:{view.device}")
            columns.append(view.sizes(position_of(view, at)))
            highest.append(view.timeline.peak_reserved(0, view.end)[0])
    rows = [[f"MiB {_moment(at)}", *(printable(head) for head in heads)]]
    rows += [
        [name.replace("_", " "), *(mib(column[name]) for column in columns)]
        for name in columns[0]
        if any(column[name] for column in columns)
    ]
    rows.append(["reserved, highest", *map(mib, highest)])
    return table(rows)


def _moment(at: str) -> str:
    return {"peak": "at the peak", "end": "at the end"}.get(at, f"after event {at}")
