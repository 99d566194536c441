"""``gpumem fit SCRIPT --vary ARGUMENT=VALUES``: the largest argument with which a script fits.

The answer goes to standard output; what the script prints in its trials goes nowhere.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gpumem_magic.commands.common import FAILED, guarded, program_of
from gpumem_magic.snapshot.whole_file import check_target

if TYPE_CHECKING:
    from gpumem_magic.trials.tried import Tried


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
    found = largest(ScriptProgram(path, options.arguments, spec), names, devices, subject="script", told=_told)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    print(found)
    if options.png is not None:
        found.plot().savefig(Path(options.png), dpi=160)
    return FAILED if any(case.found.best is None for case in found.cases) else 0


def _told(device: str, one: Tried) -> None:
    if sys.stderr.isatty():
        values = " ".join(f"{name}={value}" for name, value in one.values.items())
        word = "fits" if one.fits else "fails"
        print(f"\r\x1b[K{device}: {values} {word}", end="", file=sys.stderr, flush=True)
