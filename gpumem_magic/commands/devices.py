"""``gpumem devices``: lists the virtual GPUs."""

from __future__ import annotations

import argparse

from gpumem_magic.commands.common import guarded


@guarded
def run(options: argparse.Namespace) -> int:
    """Prints the list. 0."""
    from gpumem_magic.virtual.card.catalog import describe

    print(describe())
    return 0
