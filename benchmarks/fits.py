"""The largest value that fits, by few trials, against running them all: 40 programs on three cards, and six tables of two names.

    python benchmarks/fits.py [--only NAME,NAME] [--devices T4,V100-16GB,A100-40GB] [--again | --anew] [--results PATH]

Each program is a cell with a name `n`, a table's with `m` besides (each of its rows is compared). The truth is the largest value
up to 40 that passes as a plain program to its end, without a recording, on an empty card, also where smaller ones fail: all above
it are run. Every pair is written down as soon as it is known (`fits.json`) and not run again: `--again` searches again and keeps
the truths, `--anew` keeps nothing. Exit status 1 where an answer is above the truth, more than 5 % below it, took more than eight
trials, or fewer than 95 % are exact.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fit_programs import programs, tables
from IPython.core.interactiveshell import InteractiveShell

from gpumem_magic.recording.cell import prepare
from gpumem_magic.session import device as choosing
from gpumem_magic.trials.process import in_a_fork
from gpumem_magic.trials.programs import CellProgram
from gpumem_magic.trials.search import MOST_TRIALS
from gpumem_magic.trials.values import Varied
from gpumem_magic.trials.what_fits import largest

VALUES = range(1, 41)


def truth(cell: str, device: str) -> int:
    """The largest value with which the cell, a plain program, runs to its end on an empty card; 0 for none."""

    def run() -> int:
        choosing.choose(device)
        # What is there already is no garbage, and need not be looked through after each value.
        gc.freeze()
        for value in reversed(VALUES):
            names: dict[str, Any] = {"__name__": "__main__"}
            try:
                exec(compile(cell.replace("n = 1\n", f"n = {value}\n", 1), "<program>", "exec"), names)
                return value
            except torch.OutOfMemoryError as error:
                error.__traceback__ = None
            names.clear()
            gc.collect()
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
            if torch.cuda.memory_reserved():
                raise RuntimeError("the card is not empty")
        return 0

    found: int = in_a_fork(run)
    return found


class Known:
    """The pairs that have been compared, in a file with a line for each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        rows = json.loads(path.read_text("utf-8")) if path.exists() else []
        self.rows: dict[tuple[str, str], dict[str, Any]] = {(row["program"], row["device"]): row for row in rows}

    def row(self, name: str, device: str) -> dict[str, Any] | None:
        return self.rows.get((name, device))

    def add(self, row: dict[str, Any]) -> None:
        self.rows[row["program"], row["device"]] = row
        lines = ",\n".join(json.dumps(each) for _, each in sorted(self.rows.items()))
        self._path.write_text(f"[\n{lines}\n]\n", "utf-8")


@dataclass(frozen=True)
class Compared:
    """A program that is compared. rows: the values of `m`, where it makes a table."""

    name: str
    cell: str
    rows: Sequence[int] = ()

    @property
    def names(self) -> list[str]:
        """Of what is compared: the table's rows, or the one program."""
        return [f"{self.name} m={row}" for row in self.rows] or [self.name]

    def plain(self, name: str) -> str:
        """The cell of one of these."""
        return self.cell.replace("m = 1\n", f"m = {name.rpartition('=')[2]}\n", 1) if self.rows else self.cell


def compared(shell: InteractiveShell, one: Compared, device: str, true: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """true: what is known, by name."""
    names = [Varied("n", VALUES), *([Varied("m", one.rows, listed=True)] if one.rows else [])]
    begun = time.perf_counter()
    fits = largest(CellProgram(shell, prepare(shell, one.cell)), names, [device], subject="cell")
    seconds = round((time.perf_counter() - begun) / len(fits.cases), 1)
    for name, case in zip(one.names, fits.cases, strict=True):
        known = true[name] if name in true else truth(one.plain(name), device)
        best = case.found.best
        yield {"program": name, "device": device, "true": known, "found": 0 if best is None else best.values["n"],
               "trials": len(case.found.tried), "proven": case.found.is_proven, "seconds": seconds}  # fmt: skip


def judged(row: dict[str, Any]) -> str:
    """What is wrong with an answer, "" for nothing."""
    true, found = row["true"], row["found"]
    if found > true or found < 0.95 * true or row["trials"] > MOST_TRIALS:
        return f"{row['program']} on {row['device']}: {found}, in truth {true}, in {row['trials']} trials"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", help="programs' names, or parts of them")
    parser.add_argument("--devices", default="T4,V100-16GB,A100-40GB")
    parser.add_argument("--again", action="store_true", help="search again, with the truths that are known")
    parser.add_argument("--anew", action="store_true", help="search and compare again")
    parser.add_argument("--results", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    shell = InteractiveShell.instance()
    known = Known(options.results)
    everything = [Compared(*one) for one in (*programs(), *tables())]
    chosen = [
        one for one in everything if options.only is None or any(part in one.name for part in options.only.split(","))
    ]
    for one in chosen:
        for device in options.devices.split(","):
            true = {} if options.anew else {name: row["true"] for name in one.names if (row := known.row(name, device))}
            if options.again or len(true) < len(one.names):
                for row in compared(shell, one, device, true):
                    known.add(row)
                    mark = "" if row["found"] == row["true"] else "  <- not exact"
                    print(f"{row['program']:22} {device:12} {row['found']:3} of {row['true']:3}  {row['trials']} trials  "
                          f"{row['seconds']:5.1f} s{mark}", flush=True)  # fmt: skip
    rows = list(known.rows.values())
    exact = sum(row["true"] == row["found"] for row in rows)
    above = sum(row["found"] > row["true"] for row in rows)
    trials = [row["trials"] for row in rows]
    print(f"{exact} of {len(rows)} exact, {above} above the truth; "
          f"{sum(trials) / len(trials):.1f} trials on average, {max(trials)} at most")  # fmt: skip
    wrong = [words for row in rows if (words := judged(row))]
    print("\n".join(wrong))
    return int(bool(wrong) or exact < 0.95 * len(rows))


if __name__ == "__main__":
    sys.exit(main())
