"""``gpumem devices``: the virtual GPUs that there are."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Adds the subcommand; its options have the attribute `run`."""
    parser: argparse.ArgumentParser = subparsers.add_parser("devices", help="list the virtual GPUs")
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace) -> int:
    """Prints the list. 0."""
    from gpumem_magic.virtual.card.catalog import describe

    print(describe())
    return 0
