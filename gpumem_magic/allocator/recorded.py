"""A driver that does what a recording's driver did: where segments lie, and when memory ran out."""

from __future__ import annotations

from collections import deque

from gpumem_magic.allocator.memory import DeviceMemory, FirstFitAddresses
from gpumem_magic.snapshot.model import TraceEvent

# Above any address of a GPU: what the emulator asked for and the recording did not.
UNRECORDED_BASE = 1 << 60
# More than any GPU has, and few enough addresses that they stay below 2^64.
_TOTAL = 1 << 50


class RecordedMemory(DeviceMemory):
    """Memory that never runs out, except where the recording says so.

    opened: a segment that the recording opened for the next request, and that was not asked for yet. mapped: pages that it
    mapped, likewise. exhausted: whether the driver refuses to map more than those. surprises: requests to the driver that
    the recording does not have.
    """

    def __init__(self) -> None:
        super().__init__(_TOTAL, addresses=FirstFitAddresses(UNRECORDED_BASE))
        self.opened: TraceEvent | None = None
        self.mapped: deque[TraceEvent] = deque()
        self.exhausted = False
        self.surprises = 0
        self._unrecorded: set[int] = set()

    @property
    def agrees(self) -> bool:
        """Whether all that the recording asked for was asked for, and nothing else, since this was last looked at."""
        agrees = self.opened is None and not self.mapped and not self.surprises
        self.opened = None
        self.mapped.clear()
        self.surprises = 0
        return agrees

    def allocate(self, size: int) -> int | None:
        if self.opened is not None and self.opened.size == size:
            address = self.opened.address
            self.opened = None
            return address
        return self._take(size)

    def _take(self, size: int) -> int:
        self.surprises += 1
        address = self.addresses.take(size)
        self._unrecorded.add(address)
        return address

    def adopt(self, address: int, size: int) -> None:
        """Nothing: the recording's driver knew which addresses were free."""

    def claim(self, address: int, size: int) -> None:
        """Nothing, likewise."""

    def release(self, address: int, size: int) -> None:
        self.give_up(address)

    def reserve(self, size: int) -> int:
        if self.mapped:
            return self.mapped[0].address
        return self._take(size)

    def give_up(self, address: int) -> None:
        if address in self._unrecorded:
            self._unrecorded.remove(address)
            self.addresses.give_back(address)

    def map(self, address: int, size: int) -> bool:
        if self.mapped and (self.mapped[0].address, self.mapped[0].size) == (address, size):
            self.mapped.popleft()
            return True
        if self.exhausted and not self.mapped:
            return False
        self.surprises += 1
        return True
