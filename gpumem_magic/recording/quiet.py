"""Our own work is not to be noticed: it triggers no garbage collection, and repeats no warning.

What a program left in reference cycles must show in its report; what Python says of a cell as it compiles it is said once.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gpumem_magic.patching import Patches


@contextmanager
def no_automatic_collection() -> Iterator[None]:
    """Holds back Python's automatic garbage collection for the block; it is as it was afterwards."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def no_warnings_of(*filenames: str) -> Iterator[list[str]]:
    """Holds back the warnings about programs that are compiled under these names, and gives their texts.

    Not `warnings.catch_warnings`: it makes Python forget which warnings of the user's were shown before.
    """
    show = warnings.showwarning

    def show_others(message: Any, category: Any, filename: str, *more: Any, **options: Any) -> None:
        if filename in filenames:
            held.append(str(message))
        else:
            show(message, category, filename, *more, **options)

    held: list[str] = []
    patches = Patches()
    patches.set(warnings, "showwarning", show_others)
    try:
        yield held
    finally:
        patches.undo()
