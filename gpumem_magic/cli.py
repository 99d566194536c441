"""The command ``gpumem``: ``commands/commands.json`` has its words and their flags, `commands` a module for each word."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from gpumem_magic import __version__
from gpumem_magic.commands import work_of
from gpumem_magic.spelling import meant


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 < number < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0")
    return number


_TYPES = {"int": int, "count": _count, "seconds": _seconds}


class Parser(argparse.ArgumentParser):
    """argparse's, which names the command or flag that a mistyped one is near to. known: these. runs: whether the command runs
    a script, whose own arguments are told apart by ``--``."""

    known: Sequence[str] = ()
    runs = False

    def error(self, message: str) -> NoReturn:
        hint = meant(message, self.known)
        if not hint and self.runs and message.startswith("unrecognized arguments: "):
            hint = f"; what the script is to get goes after --, as in: SCRIPT -- {message.partition(': ')[2]}"
        super().error(f"{message}{hint}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; `argv` without the program's name, by default the process's. Returns the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    # What follows the first "--" is the script's, whatever it looks like.
    split = given.index("--") if "--" in given else len(given)
    parser = Parser(prog="gpumem", description="Shows where PyTorch GPU memory goes, with or without a GPU.")
    parser.add_argument("--version", action="version", version=f"gpumem {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    declared = json.loads((Path(__file__).parent / "commands" / "commands.json").read_text("utf-8"))
    parser.known = [] if given[:1] and given[0] in declared else [*declared]
    for name, words in declared.items():
        arguments = words.pop("arguments")
        command = commands.add_parser(name, **words)
        command.set_defaults(parser=command, main=main)
        for one in arguments:
            # Several in a list exclude each other.
            owner = command.add_mutually_exclusive_group() if isinstance(one, list) else command
            for options in one if isinstance(one, list) else [one]:
                # What a command does not know is refused by the parser above it.
                if given[:1] == [name]:
                    parser.known = [*parser.known, *options["names"]]
                if "type" in options:
                    options["type"] = _TYPES[options["type"]]
                owner.add_argument(*options.pop("names"), **options)
    parser.runs = given[:1] in (["run"], ["fit"])
    chosen = parser.parse_args(given[:split])
    chosen.arguments = given[split + 1 :]
    if not parser.runs and given[split:]:
        parser.error(f"{chosen.command} takes no arguments after --")
    return work_of(chosen.command)(chosen)


if __name__ == "__main__":
    sys.exit(main())
