"""``gpumem show FILE...``: the report of a snapshot file, or those of several ranks side by side."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpumem_magic.commands.common import UNREADABLE, guarded
from gpumem_magic.commands.side_by_side import print_refused, print_side_by_side, readable_files
from gpumem_magic.commands.written import write_picture
from gpumem_magic.snapshot.whole_file import check_target, printable

if TYPE_CHECKING:
    from gpumem_magic.attribution.view import DeviceView
    from gpumem_magic.report.model import ReportData
    from gpumem_magic.snapshot.files import LoadedSnapshot


@guarded
def run(options: argparse.Namespace) -> int:
    """Prints the report. 0; 2 where a file can't be read or the options do not fit: of several, the others are shown."""
    from gpumem_magic.files.loaded import moment_of, position_of, report_of, views_of
    from gpumem_magic.files.report_file import save_all
    from gpumem_magic.snapshot.files import read

    if len(options.files) > 1 and (options.search or options.between or options.category or options.events):
        raise ValueError("--search, --between, --category and --events are for one file: name only one")
    for flag, given in (("--redact", options.redact), ("--png", options.png)):
        if len(options.files) > 1 and given:
            raise ValueError(f"{flag} is for one file: name only one")
    if len(options.files) > 1 and options.json == "-":
        raise ValueError("--json -: standard output is for one file's report: name only one, or give a path")
    for option, target in (
        ("--json", None if options.json == "-" else options.json),
        ("--html", options.html),
        ("--png", options.png),
        ("--redact", options.redact),
    ):
        check_target(option, target, options.files)
    refused: dict[str, str] = {}
    report = None
    if len(options.files) > 1:
        files, refused = readable_files(options.files, options.device, options.at or "peak")
        views = [views for _, views in files.values()]
        if files:
            at = options.at or "peak"
            print_side_by_side(files, at, moment_of(views[0][0], at))
        if options.json:
            reports = {
                path: report_of(loaded, options.device, options.at, views) for path, (loaded, views) in files.items()
            }
            save_all(options.files, reports, refused, options.json)
    else:
        loaded = read(options.files[0])
        views = [views_of(loaded, options.device)]
        text, report = _report(loaded, views[0], options)
        print(text)
    if options.png and report is not None:
        write_picture(report, options.png)
    if options.html and views:
        from gpumem_magic.timeline_page.view import timeline_of_files, timeline_of_reports

        opens_at = position_of(views[0][0], options.at)
        timeline = timeline_of_reports([report], opens_at) if report else timeline_of_files(views, opens_at)
        timeline.save(options.html)
    if report is not None and not (options.json or options.events or options.search or options.category):
        print(
            f"\n{f'The timeline: {options.html}' if options.html else '`--html PATH` writes an interactive timeline.'}"
        )
    print_refused(refused.values())
    return UNREADABLE if refused else 0


def _report(loaded: LoadedSnapshot, views: list[DeviceView], options: argparse.Namespace) -> tuple[str, ReportData]:
    """The report of one file, in words and itself; writes what else is asked for of it."""
    from gpumem_magic.commands import show_events, show_parts
    from gpumem_magic.files.loaded import moment_of, position_of, report_of
    from gpumem_magic.files.report_file import save, to_json
    from gpumem_magic.report.script_words import told_in_python
    from gpumem_magic.snapshot.files import write
    from gpumem_magic.snapshot.redact import redacted
    from gpumem_magic.views.text import render

    moment = ""
    if options.between:
        options.at, moment = _highest_between(views[0], options.between)
    report = told_in_python(report_of(loaded, options.device, options.at, views))
    view = next((one for one in views if one.device == report.device.index), views[0])
    moment = moment or moment_of(view, options.at)
    position = position_of(view, options.at)
    lines = [
        f"{printable(loaded.path)}: {loaded.form}, written by torch {printable(loaded.torch)}",
        "",
    ]
    if options.at not in (None, "peak"):
        lines += [show_parts.asked_for(view, position, moment), ""]
    lines.append(render(report, folds=False))
    lines += show_parts.by_own_categories(view, position, moment, show_parts.own_categories(options.category or ()))
    lines += show_parts.largest(view, position, moment, options.top, options.search)
    lines += show_parts.ranges(loaded, view)
    lines += show_parts.segments(view, position, moment, options.top)
    if options.events:
        lines += show_events.events(view, position, options.between)
    said = show_parts.settings(loaded)
    if said:
        lines.append(said)
    if options.json and options.json != "-":
        save(report, options.json)
    if options.redact:
        write(redacted(loaded.snapshot), options.redact, {"torch": loaded.torch})
    return to_json(report) if options.json == "-" else "\n".join(lines), report


def _highest_between(view: DeviceView, events: Sequence[int]) -> tuple[str, str]:
    """The event within two, both included, after which most was allocated; and that moment in words. Raises ValueError."""
    begin, end = events
    if not view.end:
        raise ValueError(f"--between {begin} {end}: the file has no events, only a state")
    if not 0 <= begin <= end < view.end:
        raise ValueError(f"--between {begin} {end}: give two events from 0 to {view.end - 1}, the earlier first")
    position = view.timeline.peak(begin + 1, end + 1)[1]
    return str(position - 1), f"at the highest after one of the events {begin:,} to {end:,}"
