"""Which storages live in which device's memory: a storage seen for the first time is an allocation, its end is the free.

Views share storages, so they cost nothing, as on a device. A storage ends when garbage collection says so, in any thread and even
inside the allocator; such frees wait in a queue, and are done at the next operation or reading, in the order in which they came.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection
from fractions import Fraction
from typing import Any

from gpumem_magic.virtual.engine.uniform import Uniform

# Above which glibc asks the system for each block (`DEFAULT_MMAP_THRESHOLD_MAX` in malloc.c).
_MAPPED = 32 << 20
# So many blocks wait for the host to compute: the next operator's results take no more.
_WAITING = 4


class _StorageReference(weakref.ref[Any]):
    """A weak reference to a storage which knows the storage's key after its death."""

    __slots__ = ("key",)
    key: int


class Placement:
    """Where a storage's memory is: device index, address, bytes asked for (the storage's size then).

    node: a number for the node of the backward pass that made it; 0 outside of one. twin: the host storage with the same bytes,
    on a device that computes; None before something is read or written. host: a tensor on the twin, which serves again who looks
    at it in the same way. kept: what an operator left for its gradient. sure, supplied: of a twin's values, whether none was
    guessed, and whether one came from the user. module: the `id` of the module whose result it is, where compiled code made it;
    else 0. overwritten: what PyTorch says to who uses it, where a later run of a CUDA graph has taken its memory; else "".
    few: how many elements are not zero, at most, where the values are not known; told: how many there are in views of it;
    filled: the parts that the program assigned to (`filled`), none where these are not known, or all of it, None before;
    and once: along what no index is twice (`few`). among, share: among how many each element was chosen, and which share of the
    elements is not zero; bound: the number nearest to zero that they may be, where that is another (`shares`). rewritten: how
    often the program wrote to it in place, if it was made as a copy; else None.
    """

    __slots__ = (
        "address", "among", "bound", "device", "few", "filled", "host", "kept", "module", "nbytes", "node", "once", "overwritten",
        "rewritten", "share", "supplied", "sure", "told", "twin", "watch",
    )  # fmt: skip

    def __init__(self, device: int, address: int, nbytes: int, watch: _StorageReference, node: int) -> None:
        self.device = device
        self.address = address
        self.nbytes = nbytes
        self.watch = watch
        self.node = node
        self.twin: Any = None
        self.host: Any = None
        self.kept: Any = None
        self.sure = True
        self.supplied = False
        self.module = 0
        self.overwritten = ""
        self.few: int | None = None
        self.told: dict[Any, int] | None = None
        self.once: Any = None
        self.among: int | None = None
        self.share: Fraction | None = None
        self.bound: float | None = None
        self.filled: dict[Any, set[int]] | None = None
        self.rewritten: int | None = None

    def put(self, twin: Any) -> None:
        """From now on that is the twin."""
        self.twin = twin
        self.host = None
        self.few = self.told = None
        self.among = self.share = self.bound = None


class StorageTable:
    """The placements of all live device storages, by the storage's own identity (`_cdata`).

    malloc(device, nbytes) -> address and free(device, address) are the devices' allocators. Not safe for threads by itself: the
    virtual machine's lock is held around every call, except that storages may end at any time.
    """

    def __init__(self, malloc: Callable[[int, int], int], free: Callable[[int, int], None]) -> None:
        self._malloc = malloc
        self._free = free
        self._placements: dict[int, Placement] = {}
        self._ended: deque[_StorageReference] = deque()
        # What was on the host of some that have ended, until the host next computes: its allocator gives the newest free block to
        # the first who asks, and small objects that come between would break it up.
        self.gone: list[Placement] = []
        self._note_end: Callable[[_StorageReference], object] = self._ended.append
        self._told_of_ends: tuple[Callable[[int, int], object], ...] = ()
        self._weakly: dict[int, Any] = {}
        # Whether the allocator is in the midst of something: a signal's handler or a `__del__` may ask for figures there.
        self._at_work = False
        self.holds_overwritten = False
        self.holds_copies = False

    def __len__(self) -> int:
        return len(self._placements)

    def by_module(self) -> dict[tuple[int, int], int]:
        """By device and address, what compiled code made for which module (see `Placement`)."""
        return {(one.device, one.address): one.module for one in self._placements.values() if one.module}

    def filled(self) -> dict[tuple[int, int], dict[Any, set[int]]]:
        """By device and address, what the program assigned to parts of (see `Placement`)."""
        return {(one.device, one.address): one.filled for one in self._placements.values() if one.filled}

    def is_copy(self, placement: Placement) -> None:
        """It was made as a copy: from now on the writes to it are counted."""
        placement.rewritten = 0
        self.holds_copies = True

    def rewritten(self) -> dict[tuple[int, int], int]:
        """By device and address, how often what was made as a copy was written to (see `Placement`)."""
        return {(one.device, one.address): one.rewritten for one in self._placements.values() if one.rewritten}

    def drain(self) -> None:
        """Frees what ended since the last time; in the midst of another call that waits for the next."""
        ended, placements = self._ended, self._placements
        if self._at_work or not (ended or self._weakly):
            return
        self._at_work = True
        self.gone.clear()
        try:
            while ended:
                watch = ended.popleft()
                placement = placements.get(watch.key)
                if placement is not None and placement.watch is watch:
                    del placements[watch.key]
                    if placement.host is not None and placement.nbytes <= _MAPPED and len(self.gone) < _WAITING:
                        placement.kept = None
                        self.gone.append(placement)
                    if placement.nbytes:
                        self._free(placement.device, placement.address)
            if self._weakly:
                for key in [key for key, reference in self._weakly.items() if reference.expired()]:
                    self._expired(key)
        finally:
            self._at_work = False

    @property
    def is_at_work(self) -> bool:
        """Whether what it asks of the allocator is for storages, those that have ended among them."""
        return self._at_work

    def tell_of_ends(self, told: Callable[[int, int], object]) -> Callable[[], None]:
        """Has storages that are placed until the answer is called tell of their end when it comes, before their free:
        ``told(device, address)``."""
        self._told_of_ends = (*self._told_of_ends, told)
        self._note_end = self._tell

        def end() -> None:
            self._told_of_ends = tuple(other for other in self._told_of_ends if other is not told)
            if not self._told_of_ends:
                self._note_end = self._ended.append

        return end

    def _tell(self, watch: _StorageReference) -> None:
        self._ended.append(watch)
        placement = self._placements.get(watch.key)
        if placement is not None and placement.watch is watch and placement.nbytes:
            for told in self._told_of_ends:
                told(placement.device, placement.address)

    def waiting(self) -> dict[int, int]:
        """By the `id` of their references, the places in the queue of storages that have ended and are not freed yet."""
        return {id(reference): number for number, reference in enumerate(self._ended)}

    def take(self, device: int, nbytes: int) -> int:
        """Memory for no storage, which its owner frees."""
        self._at_work = True
        try:
            return self._malloc(device, nbytes)
        finally:
            self._at_work = False

    def free(self, device: int, address: int) -> None:
        self._free(device, address)

    def held_weakly(self, reference: Any) -> None:
        """From now on asks C++'s own weak reference whether the storage lives: where PyTorch keeps a storage's Python object
        until the last of those is gone, its memory is given back before. reference: `StorageWeakRef`."""
        if reference.cdata in self._placements:
            self._weakly.setdefault(reference.cdata, reference)

    def _expired(self, key: int) -> None:
        # (Nothing else lies there while the reference is held.)
        placement = self._placements.pop(key, None)
        if placement is not None and placement.nbytes:
            self._free(placement.device, placement.address)
        del self._weakly[key]

    def adopt(self, storage: Any, device: int, node: int = 0) -> bool:
        """Gives the storage memory on the device, unless it has some. True if it is new. node: see `Placement`.

        Raises what malloc raises, and then nothing has changed.
        """
        key = storage._cdata
        known = self._placements.get(key)
        if known is not None and known.watch() is not None:
            return False
        self.place(storage, device, node)
        return True

    def place(self, storage: Any, device: int, node: int) -> Placement:
        """The same of a storage that is new for sure."""
        key = storage._cdata
        if key in self._placements:
            # One that has ended lay there, and its free waits.
            self.drain()
        nbytes = storage.nbytes()
        # (`take` written out: each new tensor passes here.)
        self._at_work = True
        try:
            address = self._malloc(device, nbytes) if nbytes else 0
        finally:
            self._at_work = False
        watch = _StorageReference(storage, self._note_end)
        watch.key = key
        found = self._placements[key] = Placement(device, address, nbytes, watch, node)
        return found

    def borrow(self, storage: Any, device: int, twin: Any, address: int = 0) -> None:
        """The storage's memory on the device is another's (a process's, or a replayed graph's): none is taken or given back."""
        self.drain()
        watch = _StorageReference(storage, self._note_end)
        watch.key = storage._cdata
        placement = self._placements[watch.key] = Placement(device, address, 0, watch, 0)
        placement.put(twin)

    def give_back(self, key: int) -> None:
        """Frees the memory of a storage that lives on without it."""
        placement = self._placements[key]
        if placement.nbytes:
            self._free(placement.device, placement.address)
            placement.nbytes = 0

    def overwrite(self, storage: Any, said: str) -> None:
        """From now on the storage's memory is a later run's (see `Placement`). storage: it, or its key."""
        placement = self._placements.get(storage) if isinstance(storage, int) else self.find(storage)
        if placement is not None:
            placement.overwritten = said
            self.holds_overwritten = True

    def owns(self, key: int) -> bool:
        """Whether the storage's end will free its memory."""
        return key in self._placements and self._placements[key].nbytes > 0

    def restored(self, owners: Collection[int], live: Collection[int], gone: Collection[int]) -> None:
        """After blocks were put back as they were: these storages own theirs, where it lives, and what is gone has no owner."""
        for key, placement in self._placements.items():
            if placement.address in gone:
                placement.nbytes = 0
            elif key in owners and placement.address in live and (storage := placement.watch()) is not None:
                placement.nbytes = storage.nbytes()

    def resized(self, storage: Any) -> bool:
        """After the storage's size changed: new memory, then the old is given back, as the device does it. Whether it grew."""
        placement = self._placements.get(storage._cdata)
        if placement is None:
            return False
        nbytes = storage.nbytes()
        if nbytes == placement.nbytes:
            return False
        grew: bool = nbytes > placement.nbytes
        address = self.take(placement.device, nbytes) if nbytes else 0
        if placement.nbytes:
            self._free(placement.device, placement.address)
        placement.address = address
        placement.nbytes = nbytes
        if isinstance(placement.twin, Uniform):
            placement.put(None)
        return grew

    def find(self, storage: Any) -> Placement | None:
        return self._placements.get(storage._cdata)
