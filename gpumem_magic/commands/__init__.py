"""The terminal's face: the subcommands of ``gpumem``. Each is a module with `run(options)`; ``commands.json`` has the flags."""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Callable
from typing import cast

from gpumem_magic.recording.quiet import no_automatic_collection


def work_of(name: str) -> Callable[[Namespace], int]:
    """What a subcommand does. Its module alone is imported: the others' take half a second, and `gpumem --help` needs none."""
    # What is imported stays: looking for garbage in it only takes time.
    with no_automatic_collection():
        module = importlib.import_module(f"{__name__}.{name}")
    return cast("Callable[[Namespace], int]", module.run)
