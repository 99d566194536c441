"""Our own work must not trigger Python's garbage collection: what a program left in reference cycles must show in its report."""

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
