"""What the bytes of snapshot files mean: categories at the peak of every device, and how much of it stays unknown.

    python benchmarks/meaning.py FILE_OR_FOLDER...

One line for each device of each file that has stacks: the peak, the share that is unknown, the share that is inferred, and the
largest categories. `saved` is memory that a backward let go of (the free's own stack says so) and that is no activation, no
copy that autocast made, nor what the program itself put in: it has to be 0.
"""

from __future__ import annotations

import argparse
import gzip
import os
from collections import Counter
from pathlib import Path

from gpumem_magic.attribution.sites import folded
from gpumem_magic.attribution.view import DeviceView
from gpumem_magic.files.loaded import views_of
from gpumem_magic.snapshot.files import SnapshotFileError, read
from gpumem_magic.units import MIB

_LET_GO = ("SavedVariable::reset_data", "release_variables")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", type=Path, nargs="+")
    parser.add_argument(
        "--why", action="store_true", help="also the reasons of what is unknown, and its largest stacks"
    )
    options = parser.parse_args()
    total = unknown = 0
    print(f"{'MiB':>8} {'unknown':>8} {'inferred':>8} {'saved':>8}  categories at the peak")
    for path in sorted(found for given in options.paths for found in _files(given)):
        try:
            views = views_of(read(path))
        except (SnapshotFileError, OSError, gzip.BadGzipFile) as error:
            print(f"{'':36}{error}")
            continue
        for view in views:
            if not _has_stacks(view):
                print(f"{view.peak[0] / MIB:8,.0f} {'':26}  no stacks: {path.name}:{view.device}")
                continue
            requested, lost = _line(view, f"{path.name}:{view.device}")
            total, unknown = total + requested, unknown + lost
            if options.why:
                _why(view)
    print(f"{total / MIB:8,.0f} {unknown / max(total, 1):8.1%}  of all")


def _has_stacks(view: DeviceView) -> bool:
    file = view.recording.file
    return file is not None and any(one.has_frames for one in file.devices if one.device == view.device)


def _files(given: Path) -> list[Path]:
    return [one for one in given.iterdir() if ".pickle" in one.name] if given.is_dir() else [given]


def _line(view: DeviceView, name: str) -> tuple[int, int]:
    allocated, position = view.peak
    balance = view.ledger.at([position])[position]
    requested = max(sum(balance.requested.values()), 1)
    let_go = sum(
        one.requested
        for one in view.timeline.live_at(position)
        if one.freed is not None
        and any(word in frame.name for frame in view.log.events[one.freed].frames for word in _LET_GO)
        and view.labels[one.index].category not in ("activations", "autocast_copies", "inputs", "parameters", "buffers")
    )
    shares = Counter(balance.requested).most_common()
    words = ", ".join(
        f"{what.replace('_', ' ')} {size / requested:.0%}" for what, size in shares if size * 200 > requested
    )
    print(
        f"{allocated / MIB:8,.0f} {balance.requested['unknown'] / requested:8.1%} "
        f"{balance.evidence['inferred'] / requested:8.1%} {let_go / requested:8.1%}  {words}  {name}"
    )
    return requested, balance.requested["unknown"]


def _why(view: DeviceView) -> None:
    sizes: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for one in view.timeline.live_at(view.peak[1]):
        if view.labels[one.index].category == "unknown":
            sizes[view.why(one), tuple(folded(view.frames_of(one)))] += one.requested
    for (why, stack), size in sizes.most_common(6):
        print(f"{size / MIB:12,.1f} MiB {why}")
        for line in stack:
            print(f"{'':20}{line}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
