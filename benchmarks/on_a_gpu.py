"""Everything that needs a real GPU, in one command: it fills a folder part by part, and makes the page's tables from it.

    python benchmarks/on_a_gpu.py DIR                           on a computer with a GPU: all parts, some 25 minutes
    python benchmarks/on_a_gpu.py DIR --minutes 9               the parts that fit in; called again, those that are missing
    python benchmarks/on_a_gpu.py DIR --only truth,fixtures     these, also where they are there already
    python benchmarks/on_a_gpu.py DIR --page                    anywhere: the tables of docs/measured.md
    python benchmarks/on_a_gpu.py DIR --virtual H100            a dry run, whose figures are not a GPU's

Each part is a command of its own (DIR/PART.txt has what it printed, DIR/parts.json how it ended); one that fails or takes too
long leaves the others alone. What the parts save lies in DIR too: truth/ and fixtures/ are the files that the tests compare
with, calibration.json and overhead.json the figures. Nothing is written outside of DIR.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
DONE, FAILED, TOO_LONG = "done", "failed", "took too long"


@dataclass(frozen=True)
class Part:
    """arguments: Python's. virtual: the option that names a virtual GPU, None where no dry run makes sense. minutes: at most."""

    name: str
    says: str
    arguments: tuple[str, ...]
    virtual: str | None
    minutes: float


def parts_for(folder: Path) -> list[Part]:
    """The parts in the order of what is needed most; paths inside `folder`."""
    return [
        Part(
            "calibrate",
            "gpumem calibrate",
            ("-m", "gpumem_magic.cli", "calibrate", "--json", str(folder / "calibration.json")),
            None,
            6,
        ),
        Part("tests", "python -m pytest tests/gpu -s", ("-m", "pytest", "tests/gpu", "-s", "-q"), "--virtual", 8),
        Part(
            "truth",
            "python benchmarks/truth --device cuda --save DIR",
            ("benchmarks/truth", "--save", str(folder / "truth")),
            "--device",
            9,
        ),
        Part(
            "fixtures",
            "python tests/gpu/record_fixture.py all DIR",
            ("tests/gpu/record_fixture.py", "all", str(folder / "fixtures")),
            "--virtual",
            6,
        ),
        Part(
            "overhead",
            "python benchmarks/overhead.py",
            ("benchmarks/overhead.py", "--minutes", "6", "--json", str(folder / "overhead.json")),
            "--virtual",
            9,
        ),
        Part("long_run", "python benchmarks/long_run.py", ("benchmarks/long_run.py",), "--virtual", 9),
    ]


def carry_out(part: Part, folder: Path, virtual: str | None, seconds: float) -> dict[str, Any]:
    """Runs the part in a process of its own, for `seconds` at most, and says how it ended. What it prints goes to its file."""
    arguments = [
        *part.arguments,
        *([part.virtual, virtual] if virtual is not None and part.virtual is not None else []),
    ]
    # A calibration that is kept on this computer would be another's figures, and ours must not become one behind its back.
    environment = os.environ | {"GPUMEM_CALIBRATION": str(folder / "kept.json"), "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    began = time.monotonic()
    with open(folder / f"{part.name}.txt", "w", encoding="utf-8") as printed:
        running = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = running.wait(seconds)
            ended = DONE if status == 0 else FAILED
        except subprocess.TimeoutExpired:
            status, ended = None, TOO_LONG
        finally:
            _end(running)
    return {"ended": ended, "status": status, "seconds": round(time.monotonic() - began, 1), "virtual": virtual}


def _end(running: subprocess.Popen[bytes]) -> None:
    """Ends the process with those that it began, which would disturb the next part."""
    with suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)
    running.wait()


def read(folder: Path) -> dict[str, Any]:
    """How the parts of `folder` ended; {} where there are none yet. Raises ValueError for a file that is not ours."""
    try:
        found = json.loads((folder / "parts.json").read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{folder / 'parts.json'} can't be read: {error}") from None
    if not isinstance(found, dict) or not all(isinstance(one, dict) and "ended" in one for one in found.values()):
        raise ValueError(f"{folder / 'parts.json'} was not written by this command")
    return found


def measure(folder: Path, chosen: list[str], virtual: str | None, minutes: float, again: bool) -> int:
    """Carries out the parts that are chosen, as far as `minutes` go; those that are done are left out, unless `again`."""
    folder.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + 60 * minutes
    ended = read(folder)
    for part in parts_for(folder):
        if part.name not in chosen or (not again and ended.get(part.name, {}).get("ended") == DONE):
            continue
        if virtual is not None and part.virtual is None:
            print(f"{part.name}: has no dry run", flush=True)
            continue
        left = ends - time.monotonic()
        if left < 60 * min(part.minutes, minutes) * 0.5:
            print(f"{part.name}: not begun, {left / 60:.1f} minutes are left; call this again for it", flush=True)
            continue
        print(f"{part.name}: {part.says}", flush=True)
        ended[part.name] = carry_out(part, folder, virtual, min(left, 60 * part.minutes))
        one = ended[part.name]
        (folder / "parts.json").write_text(json.dumps(ended, indent=1), encoding="utf-8")
        print(f"    {one['ended']} after {one['seconds']:.0f} s: {last_line(folder, part.name)}", flush=True)
    good = all(ended.get(part.name, {}).get("ended") == DONE for part in parts_for(folder) if part.name in chosen)
    return 0 if good else 1


def last_line(folder: Path, name: str) -> str:
    """What a part said last; "" where it said nothing."""
    try:
        lines = (folder / f"{name}.txt").read_text("utf-8", errors="replace").strip().splitlines()
    except FileNotFoundError:
        return ""
    return lines[-1][:200] if lines else ""


def page(folder: Path) -> str:
    """The tables of docs/measured.md from what was measured. Raises ValueError where nothing was."""
    ended = read(folder)
    if not ended:
        raise ValueError(f"{folder} holds nothing that was measured; without --page this command measures")
    blocks = []
    for part in parts_for(folder):
        one = ended.get(part.name)
        if one is None:
            blocks.append(f"`{part.says}`: not run.")
            continue
        dry = f" **A dry run on a virtual {one['virtual']}: not figures of a GPU.**" if one["virtual"] else ""
        blocks.append(f"`{part.says}`: {one['ended']}, {one['seconds']:.0f} s.{dry}")
        if one["ended"] == DONE:
            blocks.append(_figures(part.name, folder, one["virtual"]))
    return "\n\n".join(block for block in blocks if block)


def _figures(name: str, folder: Path, virtual: str | None) -> str:
    if name == "truth":
        compare = ["benchmarks/truth", "--compare", str(folder / "truth"), "--markdown"]
        compare += ["--as", virtual] if virtual else []
        done = subprocess.run(
            [sys.executable, *compare], cwd=ROOT, stdout=subprocess.PIPE, text=True, encoding="utf-8", check=False
        )
        return done.stdout.strip() or "no table: `benchmarks/truth --compare` failed"
    lines = (folder / f"{name}.txt").read_text("utf-8", errors="replace").strip().splitlines()
    if name == "overhead":
        # What torch prints in between belongs to nobody's table.
        return "\n".join([*lines[:1], "", *(line for line in lines if line.startswith("|"))])
    if name in ("tests", "fixtures"):
        return lines[-1] if lines else ""
    return "```text\n" + "\n".join(lines) + "\n```"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="DIR", type=Path, help="where everything is written")
    parser.add_argument("--only", metavar="PARTS", help="these, with commas between them")
    parser.add_argument("--minutes", type=float, default=60.0, help="time for all of it (default: 60)")
    parser.add_argument("--virtual", metavar="NAME", help="a virtual GPU in place of a real one: a dry run")
    parser.add_argument("--page", action="store_true", help="print the tables from what is there; measures nothing")
    options = parser.parse_args()
    folder = options.folder.resolve()
    names = [part.name for part in parts_for(folder)]
    chosen = names if options.only is None else options.only.split(",")
    unknown = [name for name in chosen if name not in names]
    if unknown:
        parser.error(f"--only: there is no part {unknown[0]!r}; the parts are {', '.join(names)}")
    if not options.minutes > 0:
        parser.error("--minutes wants a number above 0")
    try:
        if options.page:
            print(page(folder))
            return 0
        if options.virtual is None:
            import torch

            if not torch.cuda.is_available():
                parser.error("there is no GPU here that PyTorch can use; --virtual H100 makes a dry run")
        return measure(folder, chosen, options.virtual, options.minutes, options.only is not None)
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
