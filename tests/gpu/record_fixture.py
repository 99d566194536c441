"""Turns a run on a GPU into a small fixture, with which the project is tested where there is no GPU:

    python tests/gpu/record_fixture.py all tests/data
    python tests/gpu/record_fixture.py linear tests/data/linear-h100.json.gz

``all`` takes a folder and records every program in a process of its own; files are called after the program and the GPU.
``--virtual T4`` records a virtual GPU through the real device's code, on any computer.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import fixtures  # noqa: E402
import measured  # noqa: E402
from programs import PROGRAMS  # noqa: E402

from gpumem_magic.devices import torch_memory  # noqa: E402


def record(name: str, path: Path, iterations: int) -> None:
    torch.cuda.init()
    torch.cuda.reset_peak_memory_stats()
    run = measured.measure(name, iterations)
    told = [(one.allocated, one.reserved, one.highest) for one in run.told]
    log = run.recording.logs[run.recording.primary]
    if path.is_dir():
        kind = "virtual-" if measured.stand_in is not None else ""
        path /= f"{name}-{kind}{'-'.join(re.findall('[a-z0-9]+', log.facts.name.lower()))}.json.gz"
    fixtures.save(run.recording, told, path)
    print(f"{path}: {len(log.events):,} events, {len(told)} rows, {path.stat().st_size:,} bytes, from {log.facts.name}")


def record_all(folder: Path, iterations: int, virtual: str | None) -> int:
    """The answer: how many programs could not be recorded; why stands in their processes' own words."""
    folder.mkdir(parents=True, exist_ok=True)
    more = ["--iterations", str(iterations), *(["--virtual", virtual] if virtual else [])]
    # This process leaves the GPU alone: a context of its own would be another process's memory to the others.
    commands = ([sys.executable, __file__, program, str(folder), *more] for program in PROGRAMS)
    return sum(subprocess.run(command, check=False).returncode != 0 for command in commands)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=[*PROGRAMS, "all"])
    parser.add_argument("path", type=Path, help="where to write: a file (.json.gz), or a folder for a name of its own")
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--virtual", metavar="NAME", help="a virtual GPU's name, instead of this computer's GPU")
    options = parser.parse_args()
    if options.virtual is None and not torch_memory.is_present(torch):
        parser.error("there is no GPU here that PyTorch can use; --virtual NAME records a virtual one")
    if options.program == "all":
        sys.exit(record_all(options.path, options.iterations, options.virtual))
    if options.virtual is None:
        record(options.program, options.path, options.iterations)
        return
    from virtual_as_real import real

    with real(options.virtual) as virtual:
        measured.stand_in = virtual
        record(options.program, options.path, options.iterations)


if __name__ == "__main__":
    main()
