"""The command ``gpumem``: a module of `gpumem_magic.commands` for each of its words."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from gpumem_magic import __version__
from gpumem_magic.commands import calibrate, devices, diff, replay, run, show


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; `argv` without the program's name, by default the process's. Returns the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    # What follows the first "--" is the script's, whatever it looks like.
    split = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(
        prog="gpumem", description="Shows where PyTorch GPU memory goes, with or without a GPU."
    )
    parser.add_argument("--version", action="version", version=f"gpumem {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for one in (run, show, diff, replay, calibrate, devices):
        one.add_parser(commands)
    options = parser.parse_args(given[:split])
    options.arguments = given[split + 1 :]
    if options.command != "run" and given[split:]:
        parser.error(f"{options.command} takes no arguments after --")
    status: int = options.run(options)
    return status


if __name__ == "__main__":
    sys.exit(main())
