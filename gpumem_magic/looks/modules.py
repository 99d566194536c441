"""What was found out of loaded modules, of which there are thousands: remembered as long as they live."""

from __future__ import annotations

import weakref
from types import ModuleType
from typing import Any, Generic, TypeVar

_Found = TypeVar("_Found")


class Remembered(Generic[_Found]):
    """By identity, as a module of the program's own kind may hash and compare as it likes, and without keeping any."""

    def __init__(self) -> None:
        # With what takes a module's entry out when it goes: another may come in its place.
        self._found: dict[int, tuple[_Found, weakref.ref[ModuleType]]] = {}

    def of(self, module: Any) -> _Found | None:
        """What was noted of it; None where nothing was."""
        noted = self._found.get(id(module))
        return None if noted is None else noted[0]

    def note(self, module: ModuleType, found: _Found) -> None:
        key, forget = id(module), self._found.pop
        self._found[key] = found, weakref.ref(module, lambda _: forget(key, None))
