"""Advice on small programs, each changed program run as a user would run it: it has to take what was said, byte for byte.

    python benchmarks/advice.py [--in-a-function] [--only NAME,NAME] [--json PATH]

The programs are those of `benchmarks/fits.py` (no tables) with a value that does not fit on a T4, or barely does. Of each
change that was run to its end, the changed cell is measured by itself below the magic, with the settings of the allocator that it
names: on the card where it fits, else on one with enough memory. Its peak of allocated memory has to be the one that was said.
With --in-a-function each program is the body of a function that an earlier cell defines, and the cell calls it: the changes are
made in the function then, whose changed text is run as a cell. Exit status 1 where one is not.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
import time
from pathlib import Path

from fit_programs import programs
from IPython.core.interactiveshell import InteractiveShell

from gpumem_magic.advice.advise import Advised, CellFails, ChangeOutcome, advised
from gpumem_magic.advice.trial import CellTrials, widened
from gpumem_magic.session import device as choosing
from gpumem_magic.session import recording
from gpumem_magic.trials.process import in_a_fork
from gpumem_magic.trials.tried import ERROR

DEVICE = "T4"
# Of the name that the programs vary.
VALUE = 12


def as_a_user(shell: InteractiveShell, one: ChangeOutcome) -> int:
    """The peak of the changed cell, below the magic, in a process of its own."""

    def run() -> int:
        if one.conf:
            os.environ["PYTORCH_CUDA_ALLOC_CONF"] = one.conf
        choosing.choose(DEVICE if one.run.fits else widened(DEVICE))
        shell.run_line_magic("load_ext", "gpumem_magic")
        for text in one.program.changed.values():
            shell.run_cell(text)
        shell.run_cell_magic("gpumem", "-q", one.program.cell)
        report = recording.last_report()
        assert report is not None
        return report.peak.allocated

    found: int = in_a_fork(run)
    return found


def checked(shell: InteractiveShell, found: Advised) -> tuple[int, list[str]]:
    """How many cells were run, the one as it is among them, and what differs."""
    all_of_them = [found.base, *found.outcomes, *([found.best] if found.best is not None else [])]
    runs = [one for one in all_of_them if one.need.ending != ERROR]
    wrong = []
    for one in runs:
        peak = as_a_user(shell, one)
        if peak != one.need.allocated:
            wrong.append(f"{one.name or 'as it is'}: {one.need.allocated:,} was said, {peak:,} is taken")
    return len(runs), wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", help="programs' names, or parts of them")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--in-a-function", action="store_true")
    options = parser.parse_args()
    shell = InteractiveShell.instance()
    rows, failed = [], 0
    for name, cell in programs():
        if options.only is not None and not any(part in name for part in options.only.split(",")):
            continue
        begun = time.perf_counter()
        code = cell.replace("n = 1\n", f"n = {VALUE}\n", 1)
        if options.in_a_function:
            shell.run_cell("def program():\n" + textwrap.indent(code, "    "))
            code = "program()"
        try:
            found = advised(CellTrials(shell, DEVICE, 0), code, lambda words: None, minutes=60)
        except CellFails as error:
            print(f"{name:20} {error}", flush=True)
            continue
        count, wrong = checked(shell, found)
        best = "nothing helps" if found.best is None else found.best.name
        rows.append({"program": name, "fits": found.base.run.fits, "advised": best, "runs": count, "wrong": wrong})
        failed += len(wrong)
        print(
            f"{name:20} {count:2} runs, {len(wrong)} differ  {time.perf_counter() - begun:5.1f} s  {best}", flush=True
        )
        for line in wrong:
            print(f"    {line}", flush=True)
    total = sum(int(str(row["runs"])) for row in rows)
    print(
        f"{len(rows)} programs, {total} cells run as they are and changed: {failed} take something else than was said"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1), "utf-8")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
