"""Our own work must not make Python collect garbage: what a program left on reference cycles is to be seen in its report."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
