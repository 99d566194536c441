"""``gpumem fit SCRIPT --vary ARGUMENT=VALUES``: the largest argument with which a script fits.

The answer goes to standard output; what the script prints in its trials goes nowhere.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gpumem_magic.commands.common import FAILED, guarded, program_of
from gpumem_magic.snapshot.whole_file import check_target
from gpumem_magic.views.progress_line import ProgressLine


@guarded
def run(options: argparse.Namespace) -> int:
    """Prints the answer. Exit status: 0, or 1 where nothing fits."""
    from gpumem_magic.trials import cards
    from gpumem_magic.trials.programs import ScriptProgram
    from gpumem_magic.trials.values import varied
    from gpumem_magic.trials.what_fits import largest

    check_target("--png", options.png, ())
    path, spec = program_of(options)
    names = [varied(text) for text in options.vary]
    devices = None if options.on is None else cards.names_of(options.on)
    line = ProgressLine()
    try:
        found = largest(ScriptProgram(path, options.arguments, spec), names, devices, subject="script", say=line)
    finally:
        line.end()
    print(found)
    if options.png is not None:
        found.plot().savefig(Path(options.png), dpi=160)
    return FAILED if any(case.found.best is None for case in found.cases) else 0
