"""A recorded program under other settings: the outcome of the same requests and frees in the same order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from gpumem_magic.allocator.caching import CachingAllocator
from gpumem_magic.allocator.failure import DeviceOutOfMemory
from gpumem_magic.allocator.memory import DeviceMemory
from gpumem_magic.allocator.program import ALLOC, FLUSH, FREE, Program, RepeatedPart, ReplayStep
from gpumem_magic.snapshot.rules import AllocatorSettings

_NO_LIMIT = 1 << 50


@dataclass(frozen=True)
class Failed:
    """A request that was not served: the index of its event, in which round (0: as recorded), and its size in bytes."""

    event: int
    round: int
    size: int


@dataclass(frozen=True)
class Outcome:
    """Sizes are bytes. cached: reserved but not allocated when reserved was highest first. retries: how often all that was cached
    was given back to ask the driver again; given_back: for how many requests something was given back. rounds: how many
    repetitions went through, of those asked.
    recorded_failures: requests that failed in the recording; passed: those of them that would not have failed, and passed_last:
    whether the last is one. failed: requests that would have failed, of those that the recording served and of the repetitions'.
    """

    peak_allocated: int
    peak_reserved: int
    cached: int
    retries: int
    rounds: int
    recorded_failures: int
    passed: int
    failed: tuple[Failed, ...]
    passed_last: bool
    given_back: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Numbers, for JSON."""
        return {**vars(self), "failed": [vars(one) for one in self.failed], "fragmentation": self.fragmentation}

    @property
    def fragmentation(self) -> float:
        """The share of the highest reserved that was cached and free then; 0 where nothing was reserved."""
        return self.cached / self.peak_reserved if self.peak_reserved else 0.0


@dataclass(frozen=True)
class Capacity:
    """What the allocator can have, in bytes. available: what it had and the driver had free, together; None is not known, and
    then nothing is limited. total: the device's, of which a memory fraction is a share; None is not known, and then settings
    with a fraction are taken without it.
    """

    available: int | None = None
    total: int | None = None


ANY_AMOUNT = Capacity()


def what_if(
    program: Program,
    settings: AllocatorSettings,
    capacity: Capacity = ANY_AMOUNT,
    *,
    repetition: RepeatedPart | None = None,
    rounds: int = 0,
    until_failure: bool = False,
    device: int = 0,
) -> Outcome:
    """Runs a program with `settings`, from the segments at its start (which keep the form that they were recorded with).

    rounds: how often the repetition is run behind it. until_failure: ends at the first request that the recording served and
    these settings do not. The cache is emptied where the recorded program did. Raises ValueError for segments that overlap or
    are not tiled by their blocks.
    """
    player = _Player(program, settings, capacity, device)
    player.play(program.run(repetition, rounds), until_failure)
    return player.outcome(rounds)


class _Player:
    def __init__(self, program: Program, settings: AllocatorSettings, capacity: Capacity, device: int) -> None:
        available = _NO_LIMIT if capacity.available is None else capacity.available
        total = max(available, capacity.total or 0)
        if capacity.total is None:
            settings = replace(settings, memory_fraction=1.0)
        self._allocator = CachingAllocator(device, DeviceMemory(total, total - available), settings)
        self._allocator.adopt(program.start)
        self._places = {number: address for address, number in program.before.items()}
        self._peak_reserved = self._cached = self._given_back = 0
        self._look()
        self._recorded_failures = 0
        self._passed = 0
        self._passed_last = False
        self._failed: list[Failed] = []

    def play(self, steps: Iterable[ReplayStep], until_failure: bool) -> None:
        allocator, places = self._allocator, self._places
        malloc, reserved_bytes = allocator.malloc, allocator.statistics.all.reserved_bytes
        for action, event, block, round_number, size, stream, pool_id in steps:
            if action == ALLOC:
                before, released = allocator.reserved, reserved_bytes.freed
                try:
                    places[block] = malloc(size, stream, pool_id)
                except DeviceOutOfMemory:
                    self._failed.append(Failed(event, round_number, size))
                    if until_failure:
                        return
                if allocator.reserved != before:
                    self._look()
                self._given_back += reserved_bytes.freed != released
            elif action == FREE:
                place = places.pop(block, None)
                if place is not None:
                    allocator.free(place)
            elif action == FLUSH:
                allocator.empty_cache()
            else:
                self._recorded_failures += 1
                released = reserved_bytes.freed
                self._passed_last = self._would_pass(size, stream, pool_id)
                self._passed += self._passed_last
                self._given_back += reserved_bytes.freed != released

    def outcome(self, rounds: int) -> Outcome:
        failed = self._failed
        done = min((failure.round - 1 for failure in failed), default=rounds)
        return Outcome(
            self._allocator.statistics.all.allocated_bytes.peak,
            self._peak_reserved,
            self._cached,
            self._allocator.num_alloc_retries,
            max(done, 0),
            self._recorded_failures,
            self._passed,
            tuple(failed),
            self._passed_last,
            self._given_back,
        )

    def _would_pass(self, size: int, stream: int, pool_id: tuple[int, int] | None) -> bool:
        try:
            place = self._allocator.malloc(size, stream, pool_id)
        except DeviceOutOfMemory:
            return False
        self._look()
        self._allocator.free(place)
        return True

    def _look(self) -> None:
        """Notes what is cached where more is reserved than ever before."""
        allocator = self._allocator
        if allocator.reserved > self._peak_reserved:
            self._peak_reserved = allocator.reserved
            self._cached = allocator.reserved - allocator.allocated
