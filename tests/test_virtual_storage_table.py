"""Which storages live in the device's memory, and when their memory is given back."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch

from gpumem_magic.virtual.engine.storage import StorageTable


class Weakly:
    """As `StorageWeakRef`: it knows whether C++ lets go of the storage."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.cdata = storage._cdata
        self.gone = False

    def expired(self) -> bool:
        return self.gone


def test_memory_of_a_storage_whose_python_object_outlives_it_is_given_back_once() -> None:
    freed: list[int] = []
    table = StorageTable(lambda device, nbytes: nbytes, lambda device, address: freed.append(address))
    kept, other, stranger = (torch.empty(size).untyped_storage() for size in (4, 8, 16))
    table.adopt(kept, 0)
    table.adopt(other, 0)
    reference = Weakly(kept)
    table.held_weakly(reference)
    table.held_weakly(Weakly(stranger))
    table.drain()
    assert freed == []
    reference.gone = True
    table.drain()
    assert freed == [16]
    assert len(table) == 1
    # The end of the Python object comes later, and frees nothing more.
    del kept
    table.drain()
    assert freed == [16]
    del other
    table.drain()
    assert freed == [16, 32]


@pytest.mark.parametrize("place", range(12))
def test_who_asks_in_the_midst_of_a_drain_does_not_take_what_it_was_about_to_free(place: int) -> None:
    """A signal's handler and a `__del__` run between any two lines, and figures begin with a drain."""
    freed: list[int] = []
    table = StorageTable(lambda device, nbytes: nbytes, lambda device, address: freed.append(address))
    storages = [torch.empty(size).untyped_storage() for size in (4, 8, 16)]
    for storage in storages:
        table.adopt(storage, 0)
    del storage
    storages.clear()
    places = iter(range(100))

    def at_a_line(frame: FrameType, event: str, argument: object) -> Any:
        if next(places) == place:
            table.drain()
        return at_a_line

    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: at_a_line if frame.f_code.co_name == "drain" else None)
    try:
        table.drain()
    finally:
        sys.settrace(before)
    assert next(places) > place
    assert sorted(freed) == [16, 32, 64]
    assert len(table) == 0


def test_what_ended_is_not_freed_in_the_midst_of_an_allocation() -> None:
    """The allocator has chosen a block and not taken it yet: a block that came back then would move it."""
    freed: list[int] = []

    def malloc(device: int, nbytes: int) -> int:
        table.drain()
        assert freed == []
        return nbytes

    table = StorageTable(malloc, lambda device, address: freed.append(address))
    first, second = (torch.empty(size).untyped_storage() for size in (4, 8))
    table.adopt(first, 0)
    del first
    table.adopt(second, 0)
    table.drain()
    assert freed == [16]
