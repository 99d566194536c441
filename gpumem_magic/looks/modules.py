"""What was found out of loaded modules, of which there are thousands: remembered as long as they live."""

from __future__ import annotations

import weakref
from types import ModuleType
from typing import Any, Generic, TypeVar

_Found = TypeVar("_Found")


class Remembered(Generic[_Found]):
    """By identity, as a module of the program's own kind may hash and compare as it likes, and without keeping any."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[ModuleType], _Found]] = {}

    def of(self, module: Any) -> _Found | None:
        """What was noted of it; None where nothing was."""
        noted = self._found.get(id(module))
        # Another may have come in the place of one that is gone.
        return noted[1] if noted is not None and noted[0]() is module else None

    def note(self, module: ModuleType, found: _Found) -> None:
        self._found[id(module)] = weakref.ref(module), found
