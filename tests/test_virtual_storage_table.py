"""Which storages live in the device's memory, and when their memory is given back."""

from __future__ import annotations

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
