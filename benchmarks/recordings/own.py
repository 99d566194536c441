"""Programs of our own: recorded where there is a GPU, and predicted anywhere.

    python benchmarks/recordings/own.py record FOLDER [--only TEXT ...]
    python benchmarks/recordings/own.py compare FOLDER [--device H100,torch=2.11] [--only TEXT ...] [--details N] [--update]

`own.txt` has the programs. Each runs in a process of its own, from its first line to its end, with the allocator's history on.
FOLDER gets a small file for each: what the allocator did, without stacks but for the program's own lines. `compare` runs those
that have a file there on a virtual GPU; `--update` puts what it found into `own_on_an_h100.csv`, which the documentation shows. A
program that needs a package which is not installed is left out.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from gpumem_magic.commands.diff_events import recorded, words
from gpumem_magic.snapshot.pairing import Pairing, Recorded, growths, pair

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

import kept_rows  # noqa: E402

RESULTS = HERE / "own_on_an_h100.csv"
RUNNER = HERE.parent / "stand_in_runtime" / "whole.py"
PYTHON = sys.executable
COLUMNS = ("action", "addr", "size", "stream")
FIGURES = ("allocations", "matched", "to the byte", "freed alike", "peak", "end", "reserved", "same place")
# (A program that runs out of memory by itself is recorded as far as that.)
LONGEST = 300


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/recordings/own.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="the recordings")
    parser.add_argument("--device", default="H100,torch=2.11", help="the virtual one (default: %(default)s)")
    parser.add_argument("--only", metavar="TEXT", nargs="+", help="programs with a TEXT in their name")
    parser.add_argument("--details", metavar="N", type=int, default=0, help="kinds of difference that are listed")
    parser.add_argument("--update", action="store_true", help=f"put the rows into {RESULTS.name}")
    options = parser.parse_args()
    wanted = chosen(programs(), options.only)
    return record(wanted, options.folder) if options.what == "record" else compare(wanted, options)


def chosen(every: Mapping[str, str], only: Sequence[str] | None) -> dict[str, str]:
    """The programs that have one of these texts in their names; None: all."""
    return {name: text for name, text in every.items() if only is None or any(part in name for part in only)}


def record(wanted: Mapping[str, str], folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in wanted.items():
        with tempfile.TemporaryDirectory() as scratch:
            found = run(name, text, "-", Path(scratch))
            if isinstance(found, str):
                print(f"{name}: left out: {found}", flush=True)
                continue
            place = folder / f"{name}.json.gz"
            place.write_bytes(gzip.compress(json.dumps(reduced(found.read_bytes(), name)).encode(), 9, mtime=0))
            print(f"{name}: {place.stat().st_size:,} bytes", flush=True)
    return 0


def compare(wanted: Mapping[str, str], options: argparse.Namespace) -> int:
    rows = []
    for name, text in wanted.items():
        place = options.folder / f"{name}.json.gz"
        if not place.exists():
            continue
        found = predicted(name, text, place, options.device)
        if isinstance(found, str):
            print(f"{name}: left out: {found}", flush=True)
            continue
        real, virtual, pairing = found
        rows.append({"program": name, **figures(real, virtual, pairing), "day": date.today().isoformat()})
        print("; ".join(rows[-1].values()), flush=True)
        if options.details:
            print("\n".join(words(real, virtual, pairing, options.details)), flush=True)
    if options.update:
        kept_rows.update(RESULTS, rows, ("program",))
    return 0 if rows else 1


def programs() -> dict[str, str]:
    """By name. A line ``#env NAME=VALUE`` at its beginning is its environment."""
    text = (HERE / "own.txt").read_text(encoding="utf-8")
    return dict(part.split("\n", 1) for part in text.split("#@ ")[1:])  # type: ignore[misc]


def predicted(name: str, text: str, place: Path, device: str) -> tuple[Recorded, Recorded, Pairing] | str:
    """Both recordings and how they pair; or why the program could not be run."""
    with tempfile.TemporaryDirectory() as scratch:
        mine = run(name, text, device, Path(scratch))
        if isinstance(mine, str):
            return mine
        real_file = Path(scratch, "real.pickle")
        real_file.write_bytes(pickle.dumps(whole(json.loads(gzip.decompress(place.read_bytes())))))
        real, virtual = recorded(str(real_file)), recorded(str(mine))
        return real, virtual, pair(real, virtual)


def run(name: str, text: str, spec: str, scratch: Path) -> Path | str:
    """The snapshot of a program's end; or in a line why there is none."""
    script, out = scratch / f"{name}.py", scratch / "out.pickle"
    script.write_text(text, encoding="utf-8")
    environment = {"HF_HUB_OFFLINE": "1", **dict(line[5:].split("=", 1) for line in of_environment(text))}
    command = [PYTHON, RUNNER, out, spec, script]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=LONGEST,
        )
    except subprocess.TimeoutExpired:
        return f"it ran for more than {LONGEST} seconds"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
    return out


def of_environment(text: str) -> Iterator[str]:
    return (line for line in text.splitlines() if line.startswith("#env "))


def reduced(snapshot: bytes, name: str) -> dict[str, Any]:
    """What the device with the most events did: a list for each of `COLUMNS`, and the program's innermost line for each event."""
    found = pickle.loads(snapshot)
    events = max(found["device_traces"], key=len)
    streams: dict[int, int] = {0: 0}
    for event in events:
        event["stream"] = streams.setdefault(event["stream"], len(streams))
    return {
        # (Where memory ran out, the bytes that were free stand in the place of an address.)
        **{column: [event.get(column, event.get("device_free", 0)) for event in events] for column in COLUMNS},
        "line": [line_of(event.get("frames") or (), f"{name}.py") for event in events],
        "settings": found.get("allocator_settings", {}),
    }


def line_of(frames: Sequence[Mapping[str, Any]], script: str) -> int:
    """0 where no frame is the program's."""
    return next((frame["line"] for frame in frames if Path(frame["filename"]).name == script), 0)


def whole(small: Mapping[str, Any]) -> dict[str, Any]:
    """A snapshot as PyTorch writes it, of what `reduced` kept."""
    events = [
        {**dict(zip(COLUMNS, values, strict=True)), "device_free": values[1], "time_us": 0, "frames": framed(line)}
        for *values, line in zip(*(small[column] for column in COLUMNS), small["line"], strict=True)
    ]
    return {"segments": [], "device_traces": [events], "allocator_settings": small["settings"]}


def framed(line: int) -> list[dict[str, Any]]:
    return [{"filename": "program.py", "line": line, "name": "<module>"}] if line else []


def figures(real: Recorded, virtual: Recorded, pairing: Pairing, has_segments: bool = True) -> dict[str, str]:
    """A row's `FIGURES`: allocations; the shares that match, to the byte and freed alike; errors of growth at the peak and at the
    end, and of what is reserved, where there are segments; how many lie at the same place."""
    pairs = max(1, len(pairing.pairs))
    shares = (pairing.matched, pairing.exact / pairs, pairing.freed_alike / pairs)
    sizes = (
        *zip(*growths(real, virtual), strict=True),
        (real.peak_reserved if has_segments else 0, virtual.peak_reserved),
    )
    cells = [
        f"{len(pairing.a):,}",
        *(f"{100 * share:.2f} %" for share in shares),
        *(f"{100 * (other / one - 1):+.3f} %" if one > 0 else "" for one, other in sizes),
        "" if pairing.same_place is None else f"{100 * pairing.same_place / pairs:.1f} %",
    ]
    return dict(zip(FIGURES, cells, strict=True))


if __name__ == "__main__":
    sys.exit(main())
