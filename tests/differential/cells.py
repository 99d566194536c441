"""Cells plain and measured, in processes that are alike: whatever the user could see of it must be the same.

    python tests/differential/cells.py [--count 10000] [--seed 1] [--jobs 2]
    python tests/differential/cells.py --count 1 --source generated --seed 17 --show

Compared after every cell: its value, what it showed, its error's traceback to the character, its warnings; and after the last:
the namespace and its order, In, Out and _, modules, signals, trace and profile functions, monitoring tools, threads, the
environment, files, random generators, torch's functions and modes, the device's statistics. It runs on every Python on the PATH
that has torch and IPython (and those of --python), with the newest IPython and the oldest, with a virtual device and without.
Exit status 1 where a difference is left that nothing explains, and that comes again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import sources
import tools
from compare import Difference, differences, explained, smoothed, without_chance
from run import OLDEST, Case, Kind, Zygote
from zygote import is_shifted

WEIGHTS = {"generated": 50, "cpython": 22, "doctests": 12, "ipython": 6, "numpy": 9, "innocent": 1, "tools": 3}
MODES = {"quiet": 62, "counters": 12, "shown": 6, "auto": 20}

# Of a processor. Some cells never end; a plain one that takes longer, or only sleeps, is not compared.
PLAIN_SECONDS = 4

# What is another program where a device is on, as one is in a measured cell. (Compiled code runs eagerly on a virtual one.)
OF_DEVICES = re.compile(r"(?i)cuda|accelerator|distributed|process_group|dynamo|torch\.(compile|export)")


class Comparison:
    """Runs cases plain and measured in processes of one kind, and counts what came of it."""

    def __init__(self, kind: Kind, zygote: Zygote | None = None) -> None:
        self.kind = kind
        self.zygote = zygote or Zygote(kind)
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.found: list[dict[str, Any]] = []
        self.places: Counter[str] = Counter()

    def compare(self, case: Case, mode: str, kernel: bool, deep: bool = True) -> list[Difference] | None:
        """The differences that nothing explains; None where the case cannot be compared: it ends its process, or no plain run
        gets to its first cell."""
        plain = self.zygote.run(case, "plain", kernel=kernel, deep=deep, processor=PLAIN_SECONDS)
        if any(word in plain for word in ("ended", "setup", "harness")):
            return None
        measured = self.zygote.run(case, mode, kernel=kernel, deep=deep)
        found, runs = differences(plain, measured), [plain]
        # What is left after some plain runs may be chance all the same: the order of a set, a second that has passed.
        for shakes in (range(1, 4), range(4, 7)):
            if found:
                runs += [
                    self.zygote.run(case, "plain", kernel=kernel, deep=deep, shake=number, deeper=4 * number)
                    for number in shakes
                ]
                found, lost = without_chance(found, runs)
                self.counts["places that differ by chance"] += lost
                found = self._unexplained(found, case, mode, plain)
        return found

    def _unexplained(self, found: list[Difference], case: Case, mode: str, plain: dict[str, Any]) -> list[Difference]:
        if any(is_shifted(cell, case.interactivity) for cell in case.cells):
            # The plain cell's lines have other numbers.
            found = [one for one in found if unspaced(one.plain) != unspaced(one.measured)]
        left = []
        for one in found:
            reason = explained(one, case.cells, plain, turns_on=self.kind.device is None, pictures=mode == "shown")
            if reason is None:
                left.append(one)
            else:
                self.reasons[reason] += 1
        return left

    def run(self, case: Case, mode: str, kernel: bool) -> None:
        # What lasts long is looked at in some of the cases.
        found = self.compare(case, mode, kernel, deep=(self.counts["cases"] % 5) == 0)
        if found is None:
            self.counts["not comparable"] += 1
            return
        self.counts["cells"] += len(case.cells)
        self.counts["cases"] += 1
        self.counts[case.source.partition(" ")[0].partition(".")[0]] += len(case.cells)
        if found:
            # What measuring does to a cell it does again; what a busy computer does, such as a timer's moment, it does once.
            places = {one.place for one in found}
            again = self.compare(case, mode, kernel)
            comes_again = again is None or bool(places & {one.place for one in again})
            self.counts["with differences" if comes_again else "that differed once"] += 1
            self.places.update(places)
            self.found.append({
                "source": case.source, "kind": str(self.kind), "mode": mode, "kernel": kernel, "cells": case.cells,
                "interactivity": case.interactivity, "differences": [str(one) for one in found], "comes again": comes_again,
            })  # fmt: skip

    def shrunk(self, case: Case, mode: str, kernel: bool) -> Case:
        """The case with as few lines as still show a difference in the same places."""
        goal = {one.place for one in self.compare(case, mode, kernel) or ()}
        if not goal:
            return case
        if len(case.cells) > 1:
            for number in range(len(case.cells)):
                fewer = replace(case, cells=[case.cells[number]])
                if goal & {one.place for one in self.compare(fewer, mode, kernel) or ()}:
                    case = fewer
                    break
        lines = case.cells[-1].split("\n")
        size = max(1, len(lines) // 2)
        while size:
            place = 0
            while place < len(lines):
                fewer = replace(case, cells=[*case.cells[:-1], "\n".join([*lines[:place], *lines[place + size :]])])
                again = (
                    {one.place for one in self.compare(fewer, mode, kernel) or ()} if fewer.cells[-1].strip() else set()
                )
                if goal & again:
                    case, lines = fewer, fewer.cells[-1].split("\n")
                else:
                    place += size
            size //= 2
        return case


def work(options: argparse.Namespace) -> dict[str, Any]:
    """One process's share, on one kind."""
    kind = Kind(sys.executable, options.oldest, None if options.device == "none" else options.device)
    comparison = Comparison(kind)
    source = random.Random(f"{options.seed} {kind}")
    # The tutorials ask whether there is a device: without one they are other programs.
    names = [name for name in options.source or WEIGHTS if kind.device is not None or name != "innocent"]
    streams = {name: sources.of_this(name, random.Random(source.random())) for name in names}
    began = time.monotonic()
    try:
        while streams and comparison.counts["cells"] < options.count and time.monotonic() - began < options.seconds:
            name = source.choices(list(streams), [WEIGHTS[one] for one in streams])[0]
            case = next(streams[name], None)
            if case is None:
                del streams[name]
                continue
            if kind.device is None and any(map(OF_DEVICES.search, case.cells)):
                # Measured, it has a device: another program than without one.
                comparison.counts["not comparable"] += 1
                continue
            mode = source.choices(list(MODES), list(MODES.values()))[0]
            kernel = source.random() < 0.25
            try:
                comparison.run(case, mode, kernel)
            except RuntimeError as error:
                comparison.counts["harness"] += 1
                print(f"{case.source}: {error}", file=sys.stderr)
                comparison.zygote = Zygote(kind)
                continue
            if comparison.found and comparison.found[-1]["source"] == case.source and options.shrink:
                small = comparison.shrunk(case, mode, kernel)
                comparison.found[-1].update(cells=small.cells)
                comparison.found[-1]["differences"] = [
                    str(one) for one in comparison.compare(small, mode, kernel) or ()
                ]
            if options.show and comparison.found:
                print(story(comparison.found.pop()), file=sys.stderr, flush=True)
    finally:
        comparison.zygote.close()
    return {
        "kind": {**comparison.zygote.versions, "device": options.device}, "counts": comparison.counts, "reasons": comparison.reasons,
        "found": comparison.found, "places": comparison.places, "seconds": time.monotonic() - began, "missing": tools.missing() if "tools" in names else [],
    }  # fmt: skip


def unspaced(value: Any) -> str:
    """Numbers of lines stand in columns as wide as the longest, with an arrow beside them. Which lines a traceback shows around
    that one depends on the number, too."""
    text = re.sub(r"-+> ", "> ", re.sub(r" +", " ", smoothed(value)))
    return re.sub(r"(?<=\\n) 0\b.*?\\+n", "", text)


def story(one: dict[str, Any]) -> str:
    words = [
        f"--- {one['source']}, {one['kind']}, {one['mode']}{' in a kernel' * one['kernel']}, {one['interactivity']}"
        f"{', not when run again' * (not one['comes again'])}"
    ]
    for cell in one["cells"]:
        words += [*(f"  | {line}" for line in cell.split("\n")), "  |"]
    return "\n".join([*words, *(f"  {line}" for line in one["differences"])])


def pythons(more: list[str]) -> list[str]:
    """The Pythons that have torch and IPython: this one, those given, and those of the PATH."""
    names = [sys.executable, *more]
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        if os.path.isdir(folder):
            names += [
                os.path.join(folder, name) for name in sorted(os.listdir(folder)) if re.fullmatch(r"python3\.\d+", name)
            ]
    found: dict[str, str] = {}
    for name in names:
        asked = (
            "import sys, importlib.util as u\n"
            "if sys.version_info >= (3, 10) and all(u.find_spec(n) for n in ('torch', 'IPython', 'numpy', 'matplotlib')): print(sys.prefix)"
        )
        try:
            done = subprocess.run([name, "-c", asked], capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.stdout.strip():
            found.setdefault(done.stdout.strip(), name)
    return list(found.values())


def shares(options: argparse.Namespace) -> list[list[str]]:
    """The commands of the processes that share the work. The oldest IPython is this Python's; every kind gets as much."""
    kinds = [
        (python, oldest, device)
        for python in pythons(options.python)
        for oldest in (False, True)
        for device in ("T4", "none")
    ]
    kinds = [one for one in kinds if not one[1] or (OLDEST.is_dir() and one[0] == sys.executable)]
    if options.oldest:
        kinds = [one for one in kinds if one[1]]
    if options.device:
        kinds = [one for one in kinds if one[2] == options.device]
    commands = []
    for number, (python, oldest, device) in enumerate(kinds):
        count = (options.count + number) // len(kinds)
        command = [python, __file__, "--worker", "--count", str(count), "--seed", str(options.seed), "--device", device]
        command += ["--oldest"] * oldest + ["--shrink"] * options.shrink + ["--show"] * options.show
        command += ["--seconds", str(options.seconds), *(["--source", *options.source] if options.source else [])]
        commands.append(command)
    return commands


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, help="cells in all")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--source", nargs="*", choices=list(WEIGHTS), default=[])
    parser.add_argument("--python", nargs="*", default=[], help="further Pythons, with torch and IPython")
    parser.add_argument("--device", help="only with this virtual device, or only with none")
    parser.add_argument("--oldest", action="store_true", help="only with the oldest IPython")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case after so long in a process")
    parser.add_argument("--shrink", action="store_true", help="find the shortest cell that shows each difference")
    parser.add_argument("--show", action="store_true", help="show each difference as it is found")
    parser.add_argument("--keep", type=Path, help="write what was found to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        json.dump(work(options), sys.stdout)
        return 0
    began = time.monotonic()
    waiting = shares(options)
    running: list[subprocess.Popen[str]] = []
    results, failed = [], 0
    while waiting or running:
        while waiting and len(running) < options.jobs:
            running.append(subprocess.Popen(waiting.pop(0), stdout=subprocess.PIPE, text=True))
        first = running.pop(0)
        text, _ = first.communicate()
        if first.returncode:
            failed += 1
            print(f"a process ended with {first.returncode}: its cells are not counted", file=sys.stderr, flush=True)
        else:
            results.append(json.loads(text))
            print(told(results[-1]), file=sys.stderr, flush=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{used.ru_utime + used.ru_stime:,.0f} s of a processor's time")
    return summary(results, options, time.monotonic() - began) or 2 * bool(failed)


def told(one: dict[str, Any]) -> str:
    """A process's share in one line."""
    kind, counts = one["kind"], one["counts"]
    return (
        f"Python {kind['python']}, IPython {kind['IPython']}, torch {kind['torch']}, {kind['device']}: "
        f"{counts.get('cells', 0):,} cells, {counts.get('with differences', 0)} cases differ"
    )


def summary(results: list[dict[str, Any]], options: argparse.Namespace, seconds: float) -> int:
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    places: Counter[str] = Counter()
    found = []
    for one in results:
        counts.update(one["counts"])
        reasons.update(one["reasons"])
        places.update(one["places"])
        found += one["found"]
        print(told(one))
    absent = sorted({name for one in results for name in one["missing"]})
    if absent:
        print(f"  not everywhere there, and so left out there: {', '.join(absent)}")
    if options.keep is not None:
        options.keep.write_text("\n\n".join(map(story, found)) + "\n", encoding="utf-8")
    else:
        for one in found[:40]:
            print(story(one))
    for place, count in places.most_common(20):
        print(f"  differs: {place} ({count})")
    for reason, count in reasons.most_common():
        print(f"  explained: {reason} ({count})")
    made = ", ".join(
        f"{counts[name]:,} {name}"
        for name in counts
        if name not in ("cells", "cases", "with differences", "that differed once", "not comparable")
    )
    print(f"{counts['cases']:,} cases ({made}); {counts['not comparable']:,} more could not be compared")
    print(
        f"{counts['cells']:,} cells plain and measured in {seconds:,.0f} s: {counts['with differences']} unexplained differences"
        f" ({counts['that differed once']} more that did not come again)"
    )
    return int(counts["with differences"] > 0)


if __name__ == "__main__":
    sys.exit(main())
