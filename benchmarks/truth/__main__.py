"""The virtual GPU against a real one, on twenty programs.

    python benchmarks/truth --device cuda --save DIR     on a computer with a GPU: measures, writes a small file for each program
    python benchmarks/truth --compare DIR                anywhere: the virtual GPU beside what was saved
    python benchmarks/truth --compare DIR --markdown     the same as the table of docs/measured.md

``--device T4`` measures a virtual GPU in place of a real one, for a dry run; such files are marked, and no table calls them
real. ``--only TEXT`` takes the programs with TEXT in their names, ``--as TEXT`` compares with another virtual GPU than the one
that is called like the recorded one.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

if __package__ in (None, ""):
    # Run as a folder: the package is this folder itself. gpumem_magic need not be installed.
    sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

from truth import comparing, measuring, saved, table
from truth.measuring import NotRun


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/truth", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--save", metavar="DIR", type=Path, help="measure, and write DIR/PROGRAM.json")
    what.add_argument("--compare", metavar="DIR", type=Path, help="measure a virtual GPU and compare with DIR")
    what.add_argument("--list", action="store_true", help="name the programs")
    what.add_argument("--one", choices=measuring.names(), help="measure this one here, and print its file")
    parser.add_argument("--device", metavar="NAME", default="cuda", help="cuda, or a virtual GPU (default: cuda)")
    parser.add_argument("--as", dest="virtual", metavar="NAME", help="the virtual GPU that is compared")
    parser.add_argument("--only", metavar="TEXT", default="", help="programs with TEXT in their names")
    parser.add_argument("--markdown", action="store_true", help="print the table of the documentation")
    options = parser.parse_args()
    names = [name for name in measuring.names() if options.only in name]
    if not names:
        parser.error(f"--only: no program has {options.only!r} in its name")
    if options.list:
        print("\n".join(names))
    elif options.one is not None:
        print(json.dumps(measuring.measure(options.one, options.device)))
    elif options.save is not None:
        return _save(parser, names, options.device, options.save)
    else:
        return _compare(parser, names, options.compare, options.virtual, options.markdown)
    return 0


def _save(parser: argparse.ArgumentParser, names: list[str], device: str, folder: Path) -> int:
    import torch

    from gpumem_magic.devices import torch_memory

    if device.startswith("cuda") and not torch_memory.is_present(torch):
        parser.error("there is no GPU here that PyTorch can use; --device T4 measures a virtual one, as a dry run")
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in names:
        try:
            found = measuring.in_new_process(name, device)
        except NotRun as why:
            failed += 1
            print(f"{name}: not measured, {why}", flush=True)
            continue
        size = saved.write(found, folder)
        print(f"{name}: {saved.in_a_line(found)} ({size:,} bytes)", flush=True)
    print(f"{len(names) - failed} of {len(names)} programs in {folder}")
    return 1 if failed else 0


def _compare(
    parser: argparse.ArgumentParser, names: list[str], folder: Path, virtual: str | None, markdown: bool
) -> int:
    try:
        recorded = [found for found in saved.read(folder) if found["workload"] in names]
    except (OSError, ValueError) as error:
        parser.error(f"--compare: {error}")
    if not recorded:
        parser.error(f"--compare: {folder} holds no measured program; --save writes them, on a computer with a GPU")
    compared, skipped = [], []
    for real in recorded:
        device = virtual or saved.virtual_name(real)
        if real["script"] != measuring.digest(real["workload"]):
            skipped.append((real["workload"], "the program is not what it was when it was recorded"))
            continue
        try:
            mine = measuring.in_new_process(real["workload"], device)
        except NotRun as why:
            skipped.append((real["workload"], str(why)))
            continue
        compared.append(comparing.compare(real, mine, device))
        if not markdown:
            print(comparing.in_a_line(compared[-1]), flush=True)
    print(table.markdown(compared, skipped) if markdown else table.text(compared, skipped))
    return 0 if compared else 1


if __name__ == "__main__":
    sys.exit(main())
