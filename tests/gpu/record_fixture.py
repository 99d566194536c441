"""Turns a run on a GPU into a small fixture, with which the project is tested where there is no GPU:

    python tests/gpu/record_fixture.py linear tests/data/linear-h100.json.gz

``--virtual T4`` records a virtual GPU through the real device's code, on any computer.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import fixtures  # noqa: E402
import measured  # noqa: E402
from programs import PROGRAMS  # noqa: E402


def record(name: str, path: Path, iterations: int) -> None:
    torch.cuda.init()
    torch.cuda.reset_peak_memory_stats()
    run = measured.measure(name, iterations)
    told = [(one.allocated, one.reserved, one.highest) for one in run.told]
    fixtures.save(run.recording, told, path)
    log = run.recording.logs[run.recording.primary]
    print(f"{path}: {len(log.events):,} events, {len(told)} rows, {path.stat().st_size:,} bytes, from {log.facts.name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("path", type=Path, help="where to write (.json.gz)")
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--virtual", metavar="NAME", help="a virtual GPU's name, instead of this computer's GPU")
    options = parser.parse_args()
    if options.virtual is None:
        if not torch.cuda.is_available():
            parser.error("there is no GPU here that PyTorch can use; --virtual NAME records a virtual one")
        record(options.program, options.path, options.iterations)
        return
    from virtual_as_real import real

    with real(options.virtual) as virtual:
        measured.stand_in = virtual
        record(options.program, options.path, options.iterations)


if __name__ == "__main__":
    main()
