"""The memory of one emulated device, as the driver hands it out: how much is free, and at which addresses."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Protocol

from gpumem_magic.units import MIB

# Where CUDA's allocations usually lie, so that addresses look like a GPU's.
BASE_ADDRESS = 0x7F0000000000
ALIGNMENT = 2 * MIB
# What the driver asks the system for at once.
CHUNK = 32 * MIB


class Addresses(Protocol):
    """Which addresses the driver gives out."""

    def take(self, size: int) -> int:
        """An address with `size` free bytes behind it."""

    def claim(self, address: int, size: int) -> None:
        """Marks a range as taken that something else chose."""

    def give_back(self, address: int) -> None:
        """The range that starts at `address` is free again. Raises KeyError where nothing was taken there."""


class FirstFitAddresses:
    """The lowest 2 MiB-aligned address with room from a base up, freed ranges included: close to what cudaMalloc does where its
    addresses are 0x3... to 0xc..."""

    def __init__(self, base: int = BASE_ADDRESS) -> None:
        self._base = base
        self._starts: list[int] = []
        self._ends: dict[int, int] = {}
        # No gap lies below this address, so that a search need not start from the base each time.
        self._no_gap_below = base

    def take(self, size: int) -> int:
        """An address with `size` free bytes behind it."""
        span = -(-size // ALIGNMENT) * ALIGNMENT
        address = self._no_gap_below
        first_gap: int | None = None
        for start in self._starts[bisect_left(self._starts, address) :]:
            if start - address >= span:
                break
            if first_gap is None and start > address:
                first_gap = address
            address = max(address, self._ends[start])
        self.claim(address, size)
        self._no_gap_below = address + span if first_gap is None else first_gap
        return address

    def claim(self, address: int, size: int) -> None:
        """Marks a range as taken that something else chose."""
        end = -(-(address + size) // ALIGNMENT) * ALIGNMENT
        insort(self._starts, address)
        self._ends[address] = end
        if address <= self._no_gap_below < end:
            self._no_gap_below = end

    def give_back(self, address: int) -> None:
        """The range that starts at `address` is free again. Raises KeyError where nothing was taken there."""
        del self._ends[address]
        del self._starts[bisect_left(self._starts, address)]
        self._no_gap_below = min(self._no_gap_below, max(address, self._base))


class ChunkedAddresses:
    """As the driver has it where addresses are 0x7...: chunks from the top down, each filled from its start up.

    A request takes the lowest place with room for it in the chunks that are there. Otherwise a chunk is made for it, as large as
    it is in steps of 32 MiB, at the highest free place below the top. A chunk goes when all of it is free. So it is in recordings
    of A100s, H100s and RTX cards with PyTorch 2.1 to 2.11; and nine published figures of a V100 come out so, not upwards.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        # From the lowest up: chunks, what is taken, and what is free within chunks, each by its start, with its end.
        self._chunks: list[tuple[int, int]] = []
        self._taken: dict[int, int] = {}
        self._room: list[tuple[int, int]] = []

    def take(self, size: int) -> int:
        """An address with `size` free bytes behind it."""
        span = _whole(size, ALIGNMENT)
        for start, end in self._room:
            if end - start >= span:
                break
        else:
            start, end = self._new_chunk(_whole(size, CHUNK))
        self._room.remove((start, end))
        self._taken[start] = start + span
        if start + span < end:
            insort(self._room, (start + span, end))
        return start

    def _new_chunk(self, length: int) -> tuple[int, int]:
        end = self._top
        for start, above in reversed(self._chunks):
            if end - above >= length:
                break
            end = start
        chunk = (end - length, end)
        insort(self._chunks, chunk)
        insort(self._room, chunk)
        return chunk

    def claim(self, address: int, size: int) -> None:
        """Marks a range as taken that something else chose, with nothing else in its chunk."""
        end = _whole(address + size, ALIGNMENT)
        self._taken[address] = end
        insort(self._chunks, (address, end))

    def give_back(self, address: int) -> None:
        """The range that starts at `address` is free again. Raises KeyError where nothing was taken there."""
        start, end = address, self._taken.pop(address)
        index = bisect_left(self._room, (start, end))
        chunk = self._chunks[bisect_left(self._chunks, (start + 1,)) - 1]
        if index < len(self._room) and self._room[index][0] == end < chunk[1]:
            end = self._room.pop(index)[1]
        if index and self._room[index - 1][1] == start > chunk[0]:
            start = self._room.pop(index - 1)[0]
        if (start, end) == chunk:
            self._chunks.remove(chunk)
        else:
            insort(self._room, (start, end))


def _whole(size: int, step: int) -> int:
    return -(-size // step) * step


class DeviceMemory:
    """One device's memory, in bytes.

    total: what cudaMemGetInfo reports. outside: what is in use beside the allocator (this process's CUDA context, other
    processes); may be changed at any time. reserved: what `allocate` and `map` have handed out. address_space: how many
    addresses an expandable segment reserves: more than the device has memory, so that one is enough.
    """

    def __init__(self, total: int, outside: int = 0, addresses: Addresses | None = None) -> None:
        self.total = total
        self.outside = outside
        self.reserved = 0
        self.addresses: Addresses = FirstFitAddresses() if addresses is None else addresses
        self.address_space = total + total // 8

    @property
    def free(self) -> int:
        return max(0, self.total - self.outside - self.reserved)

    def allocate(self, size: int) -> int | None:
        """The address of `size` new bytes, or None where they are not free, as when cudaMalloc fails."""
        if size > self.free:
            return None
        self.reserved += size
        return self.addresses.take(size)

    def adopt(self, address: int, size: int) -> None:
        """Counts `size` bytes at `address` as handed out, whether they are free or not (a state from elsewhere)."""
        self.addresses.claim(address, size)
        self.reserved += size

    def release(self, address: int, size: int) -> None:
        """Takes back what `allocate` handed out. Raises KeyError for an address that it did not."""
        self.addresses.give_back(address)
        self.reserved -= size

    def reserve(self, size: int) -> int:
        """The address of `size` bytes of address space without memory behind them."""
        return self.addresses.take(size)

    def give_up(self, address: int) -> None:
        """Takes back address space that has no memory behind it any more. Raises KeyError for what is not reserved."""
        self.addresses.give_back(address)

    def claim(self, address: int, size: int) -> None:
        """Reserves the given address space (a state from elsewhere)."""
        self.addresses.claim(address, size)

    def map(self, address: int, size: int) -> bool:
        """Puts `size` bytes of memory behind reserved addresses; False, and nothing happens, where they are not free."""
        if size > self.free:
            return False
        self.reserved += size
        return True

    def unmap(self, size: int) -> None:
        """Takes back memory that `map` handed out."""
        self.reserved -= size
