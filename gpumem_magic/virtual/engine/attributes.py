"""What a program sees of an object's own dictionary, in which something lies that is none of its business."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

_NOTHING = object()


class Attributes(dict[str, Any]):
    """The entries of a dictionary without those under some names. What is written to it is written to the dictionary, too."""

    def __init__(self, whole: dict[str, Any], hidden: Collection[str]) -> None:
        super().__init__({name: value for name, value in whole.items() if name not in hidden})
        self._whole = whole

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._whole[name] = value

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self._whole.pop(name, None)

    def update(self, *given: Any, **named: Any) -> None:
        for name, value in dict(*given, **named).items():
            self[name] = value

    def __ior__(self, given: Any) -> Any:  # type: ignore[misc]
        self.update(given)
        return self

    def setdefault(self, name: str, value: Any = None) -> Any:
        if name not in self:
            self[name] = value
        return self[name]

    def pop(self, name: str, default: Any = _NOTHING) -> Any:
        if name not in self and default is not _NOTHING:
            return default
        value = self[name]
        del self[name]
        return value

    def popitem(self) -> tuple[str, Any]:
        if not self:
            return super().popitem()
        name = next(reversed(self))
        return name, self.pop(name)

    def clear(self) -> None:
        for name in list(self):
            del self[name]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy of it, or what is read from a pickle, is of no object."""
        return dict, (dict(self),)
