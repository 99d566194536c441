"""Replacing attributes of other people's modules for a while, and putting every one of them back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MISSING = object()


class Patches:
    """A stack of replaced attributes. `undo` restores them in reverse order, and may be called twice."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []
        self._more: list[Callable[[], object]] = []

    def set(self, owner: Any, name: str, value: Any) -> Any:
        """Sets ``owner.name = value`` and returns what was there (None where nothing was).

        Only the owner's own dictionary is looked at and restored: an inherited attribute is hidden, and shows again after
        `undo`.
        """
        before = vars(owner).get(name, _MISSING)
        setattr(owner, name, value)
        self._undo.append((owner, name, before))
        return None if before is _MISSING else before

    def also_undo(self, function: Callable[[], object]) -> None:
        """Has `function` called by `undo`, before attributes are restored."""
        self._more.append(function)

    def names(self) -> list[tuple[Any, str]]:
        """The (owner, name) pairs that are replaced now, oldest first."""
        return [(owner, name) for owner, name, _ in self._undo]

    def originals(self) -> list[tuple[Any, str, Any]]:
        """The same with what was there before, where there was something."""
        return [entry for entry in self._undo if entry[2] is not _MISSING]

    def undo(self) -> None:
        while self._more:
            self._more.pop()()
        while self._undo:
            owner, name, before = self._undo.pop()
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
