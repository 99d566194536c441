"""What the reports say about situations from public threads, and how soon.

    python benchmarks/situations                   tries all, and prints what each got
    python benchmarks/situations --only TEXT       those with TEXT in their names; with --show, their reports too
    python benchmarks/situations --sample          the few that every run of the tests tries
    python benchmarks/situations --keep            writes the grades into scores.json, better or worse

The facts are in ``facts.txt`` and ``own.txt``: patterns for the cause, the place, its line in the cell (the magic's own is line
1) and the remedy. "full" has all of them in the first two lines of the report; "partly" has the cause, or the place with the
remedy; "wrong" blames something else; "silent" blames nothing. An innocent twin is "right" or "false". The column "in all" is
the same grade for all sentences of the report.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

if __package__ in (None, ""):
    # Run as a folder: the package is this folder itself. gpumem_magic need not be installed.
    sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

from situations import grading, reading, running

SCORES = reading.HERE / "scores.json"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/situations", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="situations with TEXT in their names")
    parser.add_argument("--sample", action="store_true", help="the few that the tests try")
    parser.add_argument("--show", action="store_true", help="print the reports")
    parser.add_argument("--json", action="store_true", help="print name -> grade, and why it was skipped")
    parser.add_argument("--keep", action="store_true", help="write the grades into scores.json, better or worse")
    options = parser.parse_args()
    chosen = [one for one in reading.situations() if options.only in one.name and (one.sample or not options.sample)]
    kept = json.loads(SCORES.read_text("utf-8"))
    running.warm_up()
    grades: dict[str, str] = {}
    skipped: dict[str, str] = {}
    totals: dict[str, Counter[str]] = {"first two lines": Counter(), "in all": Counter()}
    if not options.json:
        print(f"{'situation':<34}{'two lines':<11}{'in all':<9}{'before':<9}{'seconds':>7}  missing; causes")
    for one in chosen:
        answer = running.run(one)
        if "skipped" in answer:
            skipped[one.name] = answer["skipped"]
            if not options.json:
                print(f"{one.name:<34}skipped: {answer['skipped'].strip().splitlines()[-1][:120]}", flush=True)
            continue
        first = grading.first_lines(answer["text"])
        everything = f"{first}\n{answer['notes']}"
        grades[one.name] = grading.grade(one, first, answer["blamed"])
        in_all = grading.grade(one, everything, answer["blamed"])
        totals["first two lines"][grades[one.name]] += 1
        totals["in all"][in_all] += 1
        if not options.json:
            lacks = ", ".join(grading.missing(one, everything)) or "-"
            print(
                f"{one.name:<34}{grades[one.name]:<11}{in_all:<9}{kept.get(one.name, '-'):<9}{answer['seconds']:>7}  "
                f"{lacks}; {', '.join(answer['causes'])}",
                flush=True,
            )
        if options.show:
            print(answer["text"], "\n", answer["error"], sep="")
    if options.json:
        print(json.dumps({"grades": grades, "skipped": skipped}))
    else:
        for where, counts in totals.items():
            print(f"{where}: " + ", ".join(f"{counts[name]} {name}" for name in reversed(grading.GRADES)))
        print(f"skipped: {len(skipped)}")
    if options.keep:
        SCORES.write_text(json.dumps({**kept, **grades}, indent=0, sort_keys=True) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
