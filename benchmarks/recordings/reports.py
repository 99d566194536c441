"""The reports of our own programs: made where there is a GPU, and beside those of a virtual one anywhere.

    python benchmarks/recordings/reports.py record FILE [--only TEXT ...]
    python benchmarks/recordings/reports.py compare FILE [--device H100,torch=2.11] [--only TEXT ...] [--show]

Each program of `own.txt` and each of `benchmarks/truth` runs under ``gpumem run`` in a process of its own. FILE keeps what its
report says: the highest moment and the end by category, how much is unknown, the causes and the first lines. `compare`
runs those that are in FILE on a virtual GPU. A program that fails on one side only is told; one that needs a package which is
not installed fails on that side.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import own

from gpumem_magic.report.model import ALLOCATED_CATEGORIES

ROOT = own.HERE.parents[1]
WORKLOADS = own.HERE.parent / "truth" / "workloads"
SOME = 0.005
"""A difference of a category that is told, as a part of the highest allocated memory."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/recordings/reports.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("file", metavar="FILE", type=Path, help="the reports of the real GPU")
    parser.add_argument("--device", default="H100,torch=2.11", help="the virtual one (default: %(default)s)")
    parser.add_argument("--only", metavar="TEXT", nargs="+", help="programs with a TEXT in their name")
    parser.add_argument("--show", action="store_true", help="what differs, in words")
    options = parser.parse_args()
    wanted = own.chosen(programs(), options.only)
    return record(wanted, options.file) if options.what == "record" else compare(wanted, options)


def programs() -> dict[str, str]:
    return own.programs() | {f"truth_{path.stem}": path.read_text("utf-8") for path in sorted(WORKLOADS.glob("*.py"))}


def record(wanted: Mapping[str, str], file: Path) -> int:
    kept = read(file) if file.exists() else {}
    for name, text in wanted.items():
        kept[name] = said(name, text, None)
        file.write_bytes(gzip.compress(json.dumps(kept, sort_keys=True).encode(), 9, mtime=0))
        print(f"{name}: {kept[name].get('answer') or kept[name]['failed']}", flush=True)
    return 0


def compare(wanted: Mapping[str, str], options: argparse.Namespace) -> int:
    kept = read(options.file)
    alike, counted = 0, 0
    for name, text in wanted.items():
        if name in kept:
            words = differences(kept[name], said(name, text, options.device))
            counted += 1
            alike += not words
            print(
                f"{name}: {'alike' if not words else '; '.join(words if options.show else names_of(words))}", flush=True
            )
    print(f"{alike} of {counted} alike")
    return 0 if counted else 1


def read(file: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(gzip.decompress(file.read_bytes()))
    return found


def said(name: str, text: str, device: str | None) -> dict[str, Any]:
    """What the program's report says, on the GPU (None) or a virtual one; ``failed``, why there is none."""
    with tempfile.TemporaryDirectory() as scratch:
        script, report = Path(scratch, f"{name}.py"), Path(scratch, "report.json")
        script.write_text(text, encoding="utf-8")
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "gpu"), *filter(None, [os.environ.get("PYTHONPATH")])])
        settings = dict(line[5:].split("=", 1) for line in own.of_environment(text))
        command = [sys.executable, "-m", "gpumem_magic.cli", "run", "--json", str(report)]
        try:
            done = subprocess.run(
                [*command, *(["--device", device] if device else []), str(script)],
                env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path, **settings},
                cwd=scratch,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                timeout=own.LONGEST,
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"it ran for more than {own.LONGEST} seconds"}
        if not report.exists():
            return {"failed": (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]}
        return {"status": done.returncode, **essence(json.loads(report.read_text("utf-8")))}


def essence(report: Mapping[str, Any]) -> dict[str, Any]:
    """What is compared of a report. Bytes."""
    peak, end = report["peak"], report["checkpoints"][-1]
    return {
        "where": peak["where"],
        "allocated": peak["allocated"],
        "peak": of_allocated(peak["categories"]),
        "end": of_allocated(end["categories"]),
        "unknown": report["evidence"]["unknown"],
        "causes": [cause["name"] for cause in report["causes"]],
        "answer": report["answer"],
    }


def of_allocated(categories: Mapping[str, int | None]) -> dict[str, int]:
    return {name: size for name in ALLOCATED_CATEGORIES if (size := categories.get(name))}


def differences(real: Mapping[str, Any], virtual: Mapping[str, Any]) -> list[str]:
    """In words that begin with what differs; none where both say the same."""
    if "failed" in real or "failed" in virtual:
        return (
            []
            if "failed" in real and "failed" in virtual
            else [f"failed: {real.get('failed') or virtual.get('failed')}"]
        )
    whole = max(1, real["allocated"])
    words = []
    if abs(virtual["allocated"] - real["allocated"]) > 0.001 * whole:
        words.append(f"highest {real['allocated']:,} B, virtual {virtual['allocated']:,} B")
    for moment in ("peak", "end"):
        for name in sorted({*real[moment], *virtual[moment]}):
            one, other = real[moment].get(name, 0), virtual[moment].get(name, 0)
            if abs(one - other) > SOME * whole:
                words.append(f"{moment}, {name}: {one:,} B, virtual {other:,} B")
    words += [
        f"{what}: {real[what]}; virtual: {virtual[what]}"
        for what in ("status", "where", "causes", "answer")
        if without_numbers(real[what]) != without_numbers(virtual[what])
    ]
    return words


def without_numbers(said: Any) -> str:
    """Figures differ by a little where memory does, and units with them. (Code had no backticks in the first recordings.)"""
    return re.sub(r"\d[\d,.]*(?: (?:[KMG]i)?B\b)?", "#", str(said).replace("`", ""))


def names_of(words: list[str]) -> list[str]:
    return list(dict.fromkeys(re.split(r"[,: ]", one)[0] for one in words))


if __name__ == "__main__":
    sys.exit(main())
