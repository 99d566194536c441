"""Files that are replaced as a whole or not at all, and clear words where one can't be written."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO


def printable(path: str | os.PathLike[str]) -> str:
    """A hostile file's strings must not move the cursor, change colours or turn the direction of writing."""
    return "".join(character if character.isprintable() else "?" for character in os.fspath(path))


def writable(path: str | os.PathLike[str]) -> Path:
    """Where a file of this path would lie: `~` and links resolved. Raises OSError, in one line, where none could."""
    # The file behind a link is what gets replaced, and not the link.
    target = Path(os.path.realpath(Path(path).expanduser()))
    if target.is_dir():
        raise IsADirectoryError(f"{printable(path)} is a folder: give the path of a file")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {printable(target.parent)}: make it first, or save elsewhere")
    if not os.access(target.parent, os.W_OK):
        raise PermissionError(f"the folder {printable(target.parent)} can't be written to: save elsewhere")
    return target


def replace_file(path: str | os.PathLike[str], write: Callable[[BinaryIO], object]) -> None:
    """Puts what `write` writes at the path, which then holds all of it, or what it held before.

    Raises OSError, in one line that names the path; what `write` raises otherwise is passed on.
    """
    target = writable(path)
    beside = target.with_name(f".{target.name[:100]}.{uuid.uuid4().hex[:8]}.part")
    try:
        with open(beside, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, target)
    except OSError as error:
        raise type(error)(f"cannot write {printable(path)}: {error.strerror or error}") from None
    finally:
        with suppress(OSError):
            beside.unlink()


def check_target(option: str, path: str | None, files: Sequence[str]) -> None:
    """Refuses, before anything is read, a file that could not be written afterwards, or that would replace one of `files`.

    Raises ValueError in one line. None is fine: nothing is to be written.
    """
    if path is None:
        return
    try:
        target = writable(path)
    except OSError as error:
        raise ValueError(f"{option}: {error}") from None
    for name in files:
        if os.path.realpath(os.path.expanduser(name)) == str(target):
            raise ValueError(f"{option}: {path} is the recording itself: give another path")
