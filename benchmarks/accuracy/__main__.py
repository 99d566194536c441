"""The virtual GPU against published measurements.

    python benchmarks/accuracy [--only TEXT] [--json PATH] [--table PATH]

Every row of the table that plain torch or transformers can build is built and run on the virtual GPU; printed are the prediction,
the published figure and the error, then for each kind of metric the median of every source, the median of these, the worst,
and how often a run that is given only the predicted memory would run out. Rows that are skipped say why. Convolutions have a
table of their own, with and without the estimate of cuDNN's scratch memory. The last lines list what was chosen
while looking at published figures, and what was assumed where a source does not say.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import asdict
from pathlib import Path

if __package__ in (None, ""):
    # Run as a folder: the package is this folder itself.
    sys.path.insert(0, str(Path(__file__).parents[1]))

from accuracy import convolutions, sources, table
from accuracy.fitted import ASSUMED, FITTED, NOT_KNOWN
from accuracy.plans import Skip, carry_out
from accuracy.scores import MARGIN, Result, Summary, summarise


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/accuracy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="rows with TEXT in source, model, metric or GPU")
    parser.add_argument("--json", metavar="PATH", type=Path, help="also write every figure to PATH")
    parser.add_argument("--table", metavar="PATH", type=Path, default=table.DEFAULT, help="the published table")
    options = parser.parse_args()
    try:
        rows = table.select(table.read(options.table), options.only)
    except (OSError, ValueError) as error:
        parser.error(f"the table of published runs can't be read: {error}")
    warnings.simplefilter("ignore")
    results: list[Result] = []
    skipped: list[tuple[table.Row, str]] = []
    done: dict[Hashable, Mapping[str, int]] = {}
    source = ""
    for row in rows:
        plan = sources.plan(row)
        if isinstance(plan, Skip):
            skipped.append((row, plan.why))
            continue
        if row.source != source:
            source = row.source
            print(f"\n{source}\n{'row':>5} {'predicted':>12} {'published':>12} {'error':>9}   MiB", flush=True)
        result = Result(row, carry_out(plan, done))
        results.append(result)
        print(_line(result), flush=True)
    for why, count in Counter(why for _, why in skipped).items():
        numbers = [str(row.number) for row, reason in skipped if reason == why]
        print(f"\nskipped {count}: {why} (rows {', '.join(numbers)})")
    summaries = summarise(results)
    for summary in summaries:
        _print(summary)
    if not options.only:
        convolutions.show()
    print("\nChosen while looking at published figures:")
    for choice in FITTED:
        print(f"  {choice.what}\n    in {choice.where}, on {choice.chosen_on}. To judge it: {choice.judge_by}.")
    print("\nAssumed where a source does not say:")
    for origin, assumption in ASSUMED.items():
        print(f"  {origin}: {assumption}.")
    print("\nWhat is not known:")
    for gap in NOT_KNOWN:
        print(f"  {gap}")
    if options.json is not None:
        _write(options.json, results, skipped, summaries)
    return 0


def _line(result: Result) -> str:
    row = result.row
    mark = "=" if result.to_the_digit else " "
    words = " ".join(word for word in (row.dtype, f"b{row.batch}" if row.batch else "", row.seq_or_image) if word)
    return (
        f"{row.number:>5} {result.predicted_mib:>12,.2f} {row.value_mib:>12,.2f} {result.error:>+8.2%} {mark} "
        f"{row.metric}; {row.model[:36]}; {words}; {row.extras[:40]}"
    )


def _print(summary: Summary) -> None:
    print(
        f"\n{summary.group}: {summary.rows} rows, median of sources {summary.median_of_medians:.2%}, worst {summary.worst:+.2%} "
        f"(row {summary.worst_row}); to the printed digit {summary.to_the_digit}; "
        f"as a cap {summary.running_out} of {summary.rows} would run out ({summary.running_out / summary.rows:.0%}), "
        f"with {MARGIN:.0%} added {summary.running_out_with_margin} ({summary.running_out_with_margin / summary.rows:.0%})"
    )
    for source, error in summary.by_source.items():
        print(f"    {error:>7.2%}  {source}")


def _write(path: Path, results: list[Result], skipped: list[tuple[table.Row, str]], summaries: list[Summary]) -> None:
    content = {
        "results": [
            {"row": r.row.number, "source": r.row.source, "metric": r.row.metric, "predicted_bytes": r.predicted_bytes,
             "published_mib": r.row.value_mib, "error": r.error, "to_the_digit": r.to_the_digit} for r in results
        ],
        "skipped": [{"row": row.number, "source": row.source, "why": why} for row, why in skipped],
        "summaries": [asdict(summary) for summary in summaries],
        "fitted": [asdict(choice) for choice in FITTED], "assumed": ASSUMED,
    }  # fmt: skip
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
