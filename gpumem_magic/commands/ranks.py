"""``gpumem ranks DIR``: the reports of several ranks from their files, as one."""

from __future__ import annotations

import argparse
from pathlib import Path

from gpumem_magic.commands.common import guarded
from gpumem_magic.commands.written import targets, write
from gpumem_magic.snapshot.whole_file import printable


@guarded
def run(options: argparse.Namespace) -> int:
    """Prints the report. 0; 2 where the folder can't be read or has no ranks."""
    from gpumem_magic.commands.shown_ranks import report_of
    from gpumem_magic.files.rank_files import read, read_snapshots

    written_to = targets(options)
    folder = Path(options.folder)
    if not folder.is_dir():
        raise ValueError(f"{printable(folder)} is not a folder: name the one that the ranks wrote into")
    files = read(folder) or read_snapshots(folder)
    if not files:
        raise ValueError(f"{printable(folder)} has no rank's report (rank-0.json) and no snapshots (*.pickle)")
    report = report_of(files)
    print(report)
    write(report, written_to)
    return 0
