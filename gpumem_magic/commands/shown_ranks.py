"""The reports of several ranks, shown as one: read from their folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpumem_magic.commands.written import hand_over, say
from gpumem_magic.failures import swallowed
from gpumem_magic.files import rank_files
from gpumem_magic.files.rank_files import RankFile
from gpumem_magic.report.side_by_side import together

if TYPE_CHECKING:
    from gpumem_magic.user_report import Report


def report_of(
    files: Sequence[RankFile],
    *,
    virtual: bool = False,
    taken: Mapping[int, int] | None = None,
    elsewhere: bool = False,
) -> Report:
    """One report of all ranks. elsewhere: others, if there are any, are on other computers. Raises ValueError where none of them
    made one."""
    from gpumem_magic.user_report import Report

    world = max(one.world for one in files)
    return Report.of(together([one.known for one in files], world, virtual=virtual, taken=taken, elsewhere=elsewhere))


def show(
    folder: Path,
    written_to: Mapping[str, Path],
    *,
    virtual: bool = False,
    taken: Mapping[int, int] | None = None,
    elsewhere: bool = False,
) -> None:
    """Prints the ranks' one report to standard error, and writes it to its files; a line says why there is none."""
    try:
        report = report_of(rank_files.read(folder), virtual=virtual, taken=taken, elsewhere=elsewhere)
    except Exception as error:
        say(f"the ranks' reports could not be shown ({swallowed(error).splitlines()[0]})")
    else:
        hand_over(report, written_to)
