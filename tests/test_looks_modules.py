"""What is remembered of modules, as long as they live."""

from __future__ import annotations

import gc
import weakref
from types import ModuleType
from typing import Any

from gpumem_magic.looks.modules import Remembered


class Odd(ModuleType):
    """Equal to everything, and not to be hashed."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True


def test_each_module_has_its_own_and_nothing_else_has_any() -> None:
    remembered: Remembered[int] = Remembered()
    one, other = ModuleType("same"), Odd("same")
    remembered.note(one, 0)
    remembered.note(other, 2)
    assert (remembered.of(one), remembered.of(other)) == (0, 2)
    remembered.note(one, 3)
    assert remembered.of(one) == 3
    assert remembered.of(ModuleType("same")) is None
    assert remembered.of(None) is None


def test_no_module_is_kept_and_none_has_what_was_anothers() -> None:
    remembered: Remembered[int] = Remembered()
    gone: list[Any] = [ModuleType(f"gone{number}") for number in range(64)]
    places = {id(one) for one in gone}
    for one in gone:
        remembered.note(one, 1)
    seen = [weakref.ref(one) for one in gone]
    del one, gone
    gc.collect()
    assert not any(look() for look in seen)
    later = [ModuleType(f"later{number}") for number in range(4096)]
    assert places & set(map(id, later))
    assert {remembered.of(one) for one in later} == {None}
