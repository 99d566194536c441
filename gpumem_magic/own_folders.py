"""Folders for temporary files that go with their process: at its end, or, where it was killed, when the next one makes its own.

A living process holds the lock of a file in its folder. The system takes it back however the process ends.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_YOUNG_SECONDS = 60
_LOCKED = "gpumem-lock"


@contextmanager
def own_folder(prefix: str) -> Iterator[Path]:
    """A folder of the block's own, in the usual place."""
    clear_away(tempfile.gettempdir(), prefix, _LOCKED)
    name = tempfile.mkdtemp(prefix=prefix)
    try:
        file = os.open(os.path.join(name, _LOCKED), os.O_WRONLY | os.O_CREAT)
        try:
            lock(file)
            yield Path(name)
        finally:
            os.close(file)
    finally:
        _remove(name)


def _remove(folder: str) -> None:
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def lock(file: int) -> bool:
    """Takes the lock of an open file. False where another process has it, or there are no such locks."""
    try:
        import fcntl
    except ImportError:
        return False
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def clear_away(place: str, prefix: str, locked: str) -> None:
    """Removes the folders of processes that were killed. One that is just being made is left.

    locked: the file in a folder whose lock a living process holds.
    """
    for found in Path(place).glob(f"{prefix}*"):
        with suppress(OSError):
            if time.time() - found.stat().st_mtime < _YOUNG_SECONDS:
                continue
            file = os.open(found / locked, os.O_RDONLY)
            try:
                is_left = lock(file)
            finally:
                os.close(file)
            if is_left:
                shutil.rmtree(found, ignore_errors=True)
