"""PyTorch's cache of pinned host memory, as counted by `torch.cuda.host_memory_stats`.

A block has a power of two bytes, belongs to one tensor at a time, and is kept for the next one of its size until the cache is
emptied (`CachingHostAllocatorImpl` in ``ATen/core/CachingHostAllocator.h``; 2.13's names and counts). The memory itself is plain
memory of the host here, so that the driver's calls take no time. What PyTorch pins for itself, such as the place of a number
that is read, is not counted.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from dataclasses import asdict, fields
from typing import Any

from gpumem_magic.allocator.statistics import Gauge

_METRICS = tuple(metric.name for metric in fields(Gauge))


class HostBlocks:
    """The cache. Sizes are in bytes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._allocations, self._allocated_bytes = Gauge(), Gauge()
        self._active: defaultdict[int, Gauge] = defaultdict(Gauge)
        """How many blocks of each size are in use."""
        self._cached: Counter[int] = Counter()
        self._given_back: deque[int] = deque()

    def take(self, nbytes: int) -> int:
        """Takes a block for so many bytes, and returns its size: 0 where there is nothing to take."""
        if not nbytes:
            return 0
        size = 1 << (nbytes - 1).bit_length()
        with self._lock:
            self._settle()
            if self._cached[size]:
                self._cached[size] -= 1
            else:
                self._allocations.increase(1)
                self._allocated_bytes.increase(size)
            self._active[size].increase(1)
        return size

    def give_back(self, size: int) -> None:
        """May come at any moment, in the middle of the other methods too: what is collected is given back."""
        self._given_back.append(size)

    def empty_cache(self) -> None:
        with self._lock:
            self._settle()
            for size, count in self._cached.items():
                self._allocations.decrease(count)
                self._allocated_bytes.decrease(count * size)
            self._cached.clear()

    def statistics(self) -> dict[str, Any]:
        """As `torch.cuda.host_memory_stats_as_nested_dict` has them; a peak is the sum of each size's peaks, as there."""
        with self._lock:
            self._settle()
            created, freed = self._allocations.allocated, self._allocations.freed
            return {
                "num_host_alloc": created,
                "num_host_free": freed,
                "allocations": asdict(self._allocations),
                "allocated_bytes": asdict(self._allocated_bytes),
                "active_requests": {
                    name: sum(getattr(stat, name) for stat in self._active.values()) for name in _METRICS
                },
                "active_bytes": {
                    name: sum(size * getattr(stat, name) for size, stat in self._active.items()) for name in _METRICS
                },
                "host_alloc_time": _no_time(created),
                "host_free_time": _no_time(freed),
            }

    def reset_peak(self) -> None:
        for stat in self._stats():
            stat.peak = stat.current

    def reset_accumulated(self) -> None:
        for stat in self._stats():
            stat.allocated = stat.freed = 0

    def _stats(self) -> list[Gauge]:
        with self._lock:
            self._settle()
            return [self._allocations, self._allocated_bytes, *self._active.values()]

    def _settle(self) -> None:
        while self._given_back:
            size = self._given_back.popleft()
            self._active[size].decrease(1)
            self._cached[size] += 1


def _no_time(count: int) -> dict[str, int]:
    """Of so many calls of the driver, in microseconds."""
    return {"total": 0, "max": 0, "min": 0, "count": count, "avg": 0}
