"""Several snapshot files, one for each rank of a job say: a column for each device, and what failed below."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from gpumem_magic.report.model import LABELS
from gpumem_magic.snapshot.whole_file import printable
from gpumem_magic.units import mib
from gpumem_magic.views.lines import table

if TYPE_CHECKING:
    from gpumem_magic.attribution.view import DeviceView
    from gpumem_magic.snapshot.files import LoadedSnapshot

# Names are shortened where that saves so many letters.
_WORTH_FOLDING = 8

ReadFile = tuple["LoadedSnapshot", list["DeviceView"]]


def readable_files(paths: Sequence[str], device: int | None, at: str) -> tuple[dict[str, ReadFile], dict[str, str]]:
    """What could be read of the files, by path, and a line for each of the others."""
    from gpumem_magic.files.loaded import position_of, views_of
    from gpumem_magic.snapshot.files import read

    found: dict[str, ReadFile] = {}
    refused = {}
    for path in paths:
        try:
            loaded = read(path)
            views = views_of(loaded, device)
            for view in views:
                position_of(view, at)
            found[path] = loaded, views
        except (OSError, ValueError) as error:
            refused[path] = " ".join(str(error).split())
    return found, refused


def print_side_by_side(files: dict[str, ReadFile], at: str, moment: str) -> None:
    """The table, then each device whose recording has a failed request, with what it says of it."""
    from gpumem_magic.files.loaded import position_of, report_of
    from gpumem_magic.views.what_failed import verdict

    columns: list[tuple[str, dict[str, int], str]] = []
    failures = []
    for name, (loaded, views) in zip(short_names(list(files)), files.values(), strict=True):
        for view in views:
            head = printable(name if len(views) == 1 else f"{name}:{view.device}")
            sizes = view.sizes(position_of(view, at))
            sizes["reserved, highest"] = view.timeline.peak_reserved(0, view.end)[0]
            failed = view.recording.error is not None
            columns.append((head, sizes, "out of memory" if failed else "-"))
            if failed:
                failures.append(f"{head}: {verdict(report_of(loaded, view.device, views=[view]))}")
    rows = [[f"MiB {moment}", *(head for head, _, _ in columns)]]
    rows += [
        [LABELS.get(name, name), *(mib(sizes[name]) for _, sizes, _ in columns)]
        for name in columns[0][1]
        if any(sizes[name] for _, sizes, _ in columns)
    ]
    if failures:
        rows.append(["failed", *(failed for _, _, failed in columns)])
    print(table(rows))
    for line in failures:
        print(f"\n{printable(line)}")


def print_refused(lines: Iterable[str]) -> None:
    """On standard error, behind what was printed."""
    sys.stdout.flush()
    for line in lines:
        print(f"gpumem: {line}", file=sys.stderr)


def short_names(paths: Sequence[str]) -> list[str]:
    """The files' names, without what all of them begin with; with as much of their folders as tells them apart."""
    names = [os.path.basename(path) for path in paths]
    if len(set(names)) < len(names):
        folders = [os.path.dirname(os.path.abspath(path)) for path in paths]
        try:
            above = os.path.commonpath(folders)
        except ValueError:  # on different drives
            return list(paths)
        names = [os.path.relpath(os.path.abspath(path), above) for path in paths]
    pairs = zip(min(names), max(names), strict=False)
    shared = "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    shared = shared[: max(shared.rfind(mark) for mark in "_-.") + 1]
    if len(names) > 1 and len(shared) >= _WORTH_FOLDING and all(len(name) > len(shared) for name in names):
        return [f"…{name[len(shared) :]}" for name in names]
    return names
