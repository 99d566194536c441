"""Objects that ranks send each other, or tell everybody, while each runs alone: files in a folder of their own. A rank that is
asked for one starts.

What a letter holds, the program's own processes wrote a moment ago; the folder is nobody else's.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import time
from collections import Counter
from pathlib import Path
from typing import Any

# How long ranks wait for letters of each other, in seconds. For one that works a rank waits.
PATIENCE = 300.0
_STEP = 0.02


class Letters:
    """One rank's letters, to and from others. folder: None where nobody would bring them. patience: how long to wait, in seconds;
    0 where the others run before or after, and not beside this one."""

    def __init__(self, rank: int, folder: Path | None, patience: float = PATIENCE) -> None:
        self._rank = rank
        self._folder = folder
        self._patience = patience
        self._sent: Counter[tuple[int, str]] = Counter()
        self._received: Counter[tuple[int, str]] = Counter()

    def send(self, source: int, to: str, what: Any) -> None:
        """to: whom, as both sides name it."""
        if self._folder is None:
            return
        number = self._sent[source, to]
        self._sent[source, to] += 1
        _write(self._folder / f"letter-{source}-{to}-{number}", pickle.dumps(what))

    def receive(self, source: int, to: str) -> Any:
        """The next one. Raises LookupError where none comes."""
        if self._folder is None:
            raise LookupError
        number = self._received[source, to]
        self._received[source, to] += 1
        path = self._folder / f"letter-{source}-{to}-{number}"
        self._wait_for(path, source)
        return pickle.loads(path.read_bytes())

    def tell(self, name: str, what: bytes) -> None:
        """Everybody, also those that come later. Told again, it is what was told last."""
        if self._folder is not None:
            _write(self._folder / f"told-{hashlib.sha256(name.encode()).hexdigest()}", what)

    def told(self, name: str, source: int | None = None) -> bytes:
        """What somebody told everybody; source: who is waited for. Raises LookupError where nobody did."""
        if self._folder is None:
            raise LookupError
        path = self._folder / f"told-{hashlib.sha256(name.encode()).hexdigest()}"
        if source is not None:
            self._wait_for(path, source)
        elif not path.exists():
            raise LookupError
        return path.read_bytes()

    def _wait_for(self, path: Path, source: int) -> None:
        assert self._folder is not None
        if path.exists():
            return
        (self._folder / f"wanted-{source}").touch()
        if not self._patience:
            raise LookupError
        mine = self._folder / f"waits-{self._rank}"
        mine.write_text(str(source))
        limit = time.monotonic() + self._patience
        try:
            while not path.exists():
                if (self._folder / f"ended-{source}").exists() and not path.exists():
                    raise LookupError
                now = time.monotonic()
                if self._works(source):
                    limit = now + self._patience
                elif now > limit:
                    raise LookupError
                time.sleep(_STEP)
        finally:
            mine.unlink()

    def _works(self, rank: int) -> bool:
        """Whether this rank does, or the one that it waits for, and so on."""
        assert self._folder is not None
        asked: set[int] = set()
        while rank not in asked:
            asked.add(rank)
            try:
                rank = int((self._folder / f"waits-{rank}").read_text())
            except (OSError, ValueError):
                return True
        return False


def _write(whole: Path, content: bytes) -> None:
    beside = whole.with_suffix(f".{os.getpid()}.part")
    beside.write_bytes(content)
    beside.replace(whole)


def wanted(folder: Path) -> list[int]:
    """The ranks that somebody waits for."""
    return sorted(int(path.name.partition("-")[2]) for path in folder.glob("wanted-*"))


def ended(folder: Path, rank: int) -> None:
    """Tells those who wait for a rank's letters that no more will come."""
    (folder / f"ended-{rank}").touch()
