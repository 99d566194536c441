"""Public programs on the virtual GPU, beside the recordings that their authors made of them on real ones.

    python benchmarks/recordings --repositories DIR [--only TEXT ...] [--details N] [--update] [--keep FOLDER]

DIR holds the programs' repositories as git keeps them (``DIR/owner+name/repo``, ``DIR/owner/name`` or ``DIR/owner/name.git``).
Each program is laid out in a scratch folder and run unmodified, and the two recordings are compared allocation by allocation. A
program that needs a package which is not installed is left out, and the package is named. ``--update`` puts what was found into
``compared.csv`` and, of snapshots without a history, ``states.csv``, which the documentation shows.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

import own
import states
import traces

from gpumem_magic.commands.diff_events import recorded, words
from gpumem_magic.snapshot.pairing import Pairing, Recorded, pair

HERE = Path(__file__).resolve().parent
RECORDINGS = HERE.parents[2] / "shared" / "data" / "snapshots"
COMPARED, STATES = HERE / "compared.csv", HERE / "states.csv"
TEXT = (".py", ".ipynb", ".toml", ".json", ".yaml", ".yml", ".txt", ".cfg")


@dataclass(frozen=True)
class Result:
    """A case's outcome: both recordings, their pairing, and the seconds that the program took."""

    case: Mapping[str, Any]
    real: Recorded
    virtual: Recorded
    pairing: Pairing
    seconds: float


@dataclass(frozen=True)
class StateResult:
    """The outcome of a case whose snapshot has no history: what was allocated when it was made."""

    case: Mapping[str, Any]
    real: states.State
    virtual: states.State
    seconds: float


class Skip(Exception):
    """A case cannot be run here. The text says why."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/recordings", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--repositories", metavar="DIR", type=Path, required=True, help="the programs' git repositories"
    )
    parser.add_argument("--recordings", metavar="DIR", type=Path, default=RECORDINGS, help="the real recordings")
    parser.add_argument("--only", metavar="TEXT", nargs="+", help="cases with a TEXT in recording or repository")
    parser.add_argument("--details", metavar="N", type=int, default=6, help="kinds of difference that are listed")
    parser.add_argument("--update", action="store_true", help="put the rows into the tables beside this file")
    parser.add_argument("--keep", metavar="FOLDER", type=Path, help="also keep the virtual recordings in FOLDER")
    options = parser.parse_args()
    cases = tomllib.loads((HERE / "cases.toml").read_text(encoding="utf-8"))["case"]
    results: list[Result | StateResult] = []
    programs = [{**case, **other} for case in cases for other in ({}, *case.get("likewise", ()))]
    for program in programs:
        of_one_run = [{**program, **other} for other in ({}, *program.get("also", ()))]
        wanted = [case for case in of_one_run if is_wanted(case, options.only)]
        for case, result in run(wanted, options.repositories, options.recordings, options.keep):
            if isinstance(result, Skip):
                print(f"\n{case['recording']}: left out: {result}", flush=True)
                continue
            results.append(result)
            print(f"\n{case['recording']}  ({case['repository']}, {case['device']}; {result.seconds:.0f} s)")
            compiler = case.get("compiler")
            if compiler and not version("torch").startswith(f"{compiler}."):
                print(
                    f"Compiled by PyTorch {version('torch')}; the recording's program by {compiler}, which may fuse otherwise."
                )
            print("\n".join(told(result, options.details)), flush=True)
            if options.update:
                place = STATES if isinstance(result, StateResult) else COMPARED
                own.kept_rows.update(place, [row_of(result)], ("program",))
    return 0 if results else 1


def told(result: Result | StateResult, details: int) -> Iterator[str]:
    if isinstance(result, StateResult):
        return states.words(result.real, result.virtual, details)
    return words(result.real, result.virtual, result.pairing, details)


def is_wanted(case: Mapping[str, Any], texts: Sequence[str] | None) -> bool:
    return texts is None or any(text in f"{case['recording']} {case['repository']}" for text in texts)


def run(
    cases: Sequence[Mapping[str, Any]], repositories: Path, recordings: Path, keep: Path | None = None
) -> Iterator[tuple[Mapping[str, Any], Result | StateResult | Skip]]:
    """Runs the program of these cases once, and compares each with the snapshot that is its own."""
    with tempfile.TemporaryDirectory() as scratch:
        try:
            written, seconds = snapshots(cases, repositories, Path(scratch)) if cases else ([], 0.0)
        except Skip as why:
            yield from ((case, why) for case in cases)
            return
        for case in cases:
            try:
                mine = written[case.get("dump", len(written)) - 1]
                if keep is not None:
                    keep.mkdir(parents=True, exist_ok=True)
                    shutil.copy(mine, keep / case["recording"].removesuffix(".gz"))
                file = recording_of(case, repositories, recordings, Path(scratch))
                if case.get("state"):
                    yield case, StateResult(case, states.state(file), states.state(mine, case.get("gpu")), seconds)
                    continue
                virtual = recorded(str(mine), case.get("gpu"))
                if case.get("trace"):
                    real, addressed = traces.read(file)
                    virtual = traces.in_blocks(virtual, addressed)
                else:
                    real = recorded(str(file), case.get("gpu"))
                yield case, Result(case, real, virtual, pair(real, virtual), seconds)
            except Skip as why:
                yield case, why


def snapshots(cases: Sequence[Mapping[str, Any]], repositories: Path, scratch: Path) -> tuple[list[Path], float]:
    """The snapshots that the cases' program writes on the virtual GPU, in their order, and the seconds that it took."""
    case = cases[0]
    folder = scratch / "program"
    lay_out(repository(repositories, case["repository"]), case["commit"], folder)
    # A repository may have a folder that is called like a package: an empty `path` keeps its root off the import path.
    path = [str(folder / one) for one in (".", *case.get("path", ())) if case.get("path") != []]
    for number, other in enumerate(case.get("beside", ())):
        place = scratch / f"beside{number}"
        lay_out(repository(repositories, other["repository"]), other["commit"], place)
        path.append(str(place / other["path"]))
    for before, after in case.get("change", ()):
        script = folder / case["script"]
        text = script.read_text(encoding="utf-8")
        if before not in text:
            raise Skip(f"{case['script']} has no line to change that reads: {before.strip()}")
        script.write_text(text.replace(before, after), encoding="utf-8")
    for name in case.get("folders", ()):
        (folder / name).mkdir(parents=True, exist_ok=True)
    kept = scratch / "kept"
    kept.mkdir()
    last = max((one["dump"] for one in cases), default=None) if all("dump" in one for one in cases) else None
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, HERE / "program.py", json.dumps({**case, "path": path, "dump": last}), kept],
        cwd=folder,
        env={**os.environ, **case.get("environment", {})},
        capture_output=True,
        text=True,
        check=False,
    )
    written = sorted(kept.iterdir())
    if done.returncode or len(written) < (last or 1):
        why = (done.stderr.strip().splitlines() or ["it wrote no snapshot"])[-1]
        if done.returncode < 0:  # Its last line is a warning then, and says nothing of the end.
            why = f"it was ended by signal {-done.returncode}; a 9 often means that the host has no memory left"
        raise Skip(f"the program failed: {why}")
    return written, time.perf_counter() - began


def recording_of(case: Mapping[str, Any], repositories: Path, recordings: Path, scratch: Path) -> Path:
    """The real recording: from the folder of recordings, or out of its repository."""
    path = recordings / case["recording"]
    if "file" in case:
        place = f"{case.get('recorded_at', case['commit'])}:{case['file']}"
        found = subprocess.run(
            ["git", "-C", str(repository(repositories, case["repository"])), "show", place],
            capture_output=True,
            check=False,
        )
        if found.returncode:
            raise Skip(f"{case['repository']} has no {place} here")
        content, path = found.stdout, scratch / "real"
        path.write_bytes(content)
    elif not path.exists():
        raise Skip(f"the recording is not in {recordings}")
    else:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
    if hashlib.sha256(content).hexdigest() != case["sha256"]:
        raise Skip("the recording is another one: its checksum differs")
    return path


def repository(folder: Path, name: str) -> Path:
    owner, _, project = name.partition("/")
    for place in (folder / f"{owner}+{project}" / "repo", folder / owner / project, folder / owner / f"{project}.git"):
        if place.exists():
            return place
    raise Skip(f"{name} is not in {folder}")


def lay_out(source: Path, commit: str, target: Path) -> None:
    """Writes a commit's sources. Large files may be missing from a copy, and are not needed."""
    git = ["git", "-C", str(source)]
    listed = subprocess.run([*git, "ls-tree", "-r", "-z", commit], capture_output=True, check=False)
    if listed.returncode:
        raise Skip(f"{source} has no commit {commit}")
    entries = [entry.decode().split("\t") for entry in listed.stdout.split(b"\0") if entry]
    wanted = [(about.split()[2], name) for about, name in entries if name.endswith(TEXT)]
    asked = "".join(f"{blob}\n" for blob, _ in wanted).encode()
    answer = BytesIO(
        subprocess.run([*git, "cat-file", "--batch"], input=asked, capture_output=True, check=False).stdout
    )
    for _, name in wanted:
        about = answer.readline().split()
        if len(about) == 3:  # Otherwise it says that the file is missing.
            place = target / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(answer.read(int(about[2])))
            answer.readline()


def name_of(case: Mapping[str, Any]) -> str:
    return str(case["recording"]).removesuffix(".gz").removesuffix(".pickle")


def row_of(result: Result | StateResult) -> dict[str, str]:
    """A row of `COMPARED`, or of `STATES`, as the documentation shows it."""
    case = result.case
    card = (
        case["device"]
        .replace(",torch=", ", ")
        .partition(",total=")[0]
        .partition(",context=")[0]
        .partition(",addresses=")[0]
    )
    named = {"program": f"{case['repository'].partition('/')[0]}: {name_of(case)}", "card, PyTorch": card}
    return {**named, **_figures(result), "day": date.today().isoformat()}


def _figures(result: Result | StateResult) -> dict[str, str]:
    if isinstance(result, Result):
        return own.figures(result.real, result.virtual, result.pairing, has_segments=not result.case.get("trace"))
    real, virtual = result.real, result.virtual
    return {
        "blocks in use": f"{real.sizes.total():,}",
        "matched": f"{100 * states.matched(real, virtual):.2f} %",
        "requested": f"{100 * (virtual.requested / real.requested - 1):+.3f} %",
        "reserved": f"{100 * (virtual.reserved / real.reserved - 1):+.3f} %",
        "segments alike": f"{100 * states.alike(real, virtual):.1f} %",
    }


if __name__ == "__main__":
    sys.exit(main())
