"""The counters behind `torch.cuda.memory_stats`: for each family and pool its current value, peak and running totals.

What every request and free moves is written to a journal, five numbers an entry, and counted when somebody asks (or when
the journal is long). That keeps the allocator quick, and no figure depends on when it was asked for.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate, compress

from gpumem_magic.snapshot.model import LARGE_POOL, SMALL_POOL

# An entry: kind, and signed changes of block bytes, requested bytes, unused pieces of split segments, and their bytes.
# The kind is one of the four below, plus 1 for the large pool.
TAKEN = 0
FREED = 2
FREE_REQUESTED = 4
FREE_COMPLETED = 6
ENTRY = 5
# From here on the journal is put aside, in a form that takes 40 bytes an entry; and so many of these are kept before all are
# counted, so that a program's allocator does not grow for ever (42 MB).
LONG = ENTRY << 16
_MOST_FILLED = 16

_IS_LARGE = (0, 1, 0, 1, 0, 1, 0, 1)
_ALLOCATIONS = (1, 1, -1, -1, -1, -1, 0, 0)
_ACTIVE = (1, 1, -1, -1, 0, 0, -1, -1)


@dataclass(slots=True)
class Gauge:
    """A value that goes up and down, its peak, and all that was ever added (allocated) and taken away (freed)."""

    current: int = 0
    peak: int = 0
    allocated: int = 0
    freed: int = 0

    def increase(self, amount: int) -> None:
        self.current = current = self.current + amount
        if current > self.peak:
            self.peak = current
        self.allocated += amount

    def decrease(self, amount: int) -> None:
        self.current -= amount
        self.freed += amount

    def apply(self, changes: Sequence[int]) -> None:
        """Many changes in their order, increases and decreases."""
        highest = self.current + max(accumulate(changes), default=0)
        net = sum(changes)
        added = (sum(map(abs, changes)) + net) // 2
        self.peak = max(self.peak, highest)
        self.current += net
        self.allocated += added
        self.freed += added - net


@dataclass(slots=True)
class PoolGauges:
    """The gauges of one pool, or of all pools together."""

    allocation: Gauge = field(default_factory=Gauge)
    segment: Gauge = field(default_factory=Gauge)
    active: Gauge = field(default_factory=Gauge)
    inactive_split: Gauge = field(default_factory=Gauge)
    allocated_bytes: Gauge = field(default_factory=Gauge)
    reserved_bytes: Gauge = field(default_factory=Gauge)
    active_bytes: Gauge = field(default_factory=Gauge)
    inactive_split_bytes: Gauge = field(default_factory=Gauge)
    requested_bytes: Gauge = field(default_factory=Gauge)

    def count(self, columns: Sequence[Sequence[int]]) -> None:
        """Applies the journal's columns."""
        kinds, sizes, requests, splits, split_bytes = columns
        if not kinds:
            return
        self.inactive_split.apply(splits)
        self.inactive_split_bytes.apply(split_bytes)
        if max(kinds) < FREE_REQUESTED:
            # Every free was at once complete.
            steps = list(map(_ACTIVE.__getitem__, kinds))
            self.allocation.apply(steps)
            self.active.apply(steps)
            self.allocated_bytes.apply(sizes)
            self.active_bytes.apply(sizes)
            self.requested_bytes.apply(requests)
            return
        allocations = [_ALLOCATIONS[kind] for kind in kinds]
        active = [_ACTIVE[kind] for kind in kinds]
        self.allocation.apply(allocations)
        self.active.apply(active)
        self.allocated_bytes.apply(list(compress(sizes, allocations)))
        self.active_bytes.apply(list(compress(sizes, active)))
        self.requested_bytes.apply(list(compress(requests, active)))


_FAMILIES = tuple(family.name for family in fields(PoolGauges))
_METRICS = tuple(metric.name for metric in fields(Gauge))
# Counts that PyTorch resets with the running totals.
_EVENTS = (
    *("num_alloc_retries", "num_ooms", "num_oom_rejections"),
    *("num_sync_all_streams", "num_device_alloc", "num_device_free"),
)


class Statistics:
    """All counters of one device's allocator. Call `count` before reading what the journal moves."""

    def __init__(self) -> None:
        self.all = PoolGauges()
        self.small = PoolGauges()
        self.large = PoolGauges()
        self.oversize_allocations = Gauge()
        self.oversize_segments = Gauge()
        self.events = dict.fromkeys(_EVENTS, 0)
        self.journal: list[int] = []
        self._filled: list[array[int]] = []

    def count(self) -> None:
        """Counts what the journal holds and empties it."""
        for journal in self._filled:
            self._count(journal)
        self._filled.clear()
        if self.journal:
            self._count(self.journal)
            self.journal.clear()

    def put_aside(self) -> None:
        """Keeps a long journal apart, to be counted later."""
        self._filled.append(array("q", self.journal))
        self.journal.clear()
        if len(self._filled) == _MOST_FILLED:
            self.count()

    def _count(self, journal: Sequence[int]) -> None:
        columns = [journal[place::ENTRY] for place in range(ENTRY)]
        large = list(map(_IS_LARGE.__getitem__, columns[0]))
        self.all.count(columns)
        if not any(large):
            self.small.count(columns)
        elif all(large):
            self.large.count(columns)
        else:
            small = [not one for one in large]
            self.small.count([list(compress(column, small)) for column in columns])
            self.large.count([list(compress(column, large)) for column in columns])

    def of_pool(self, name: str) -> PoolGauges:
        return {SMALL_POOL: self.small, LARGE_POOL: self.large}[name]

    def opened_segment(self, pool: str, size: int, *, expandable: bool = False) -> None:
        """New memory from the driver. The pages of an expandable segment are bytes, but no segments."""
        for gauges in (self.all, self.of_pool(pool)):
            gauges.segment.increase(not expandable)
            gauges.reserved_bytes.increase(size)
        self.events["num_device_alloc"] += 1

    def closed_segment(self, pool: str, size: int, *, expandable: bool = False) -> None:
        for gauges in (self.all, self.of_pool(pool)):
            gauges.segment.decrease(not expandable)
            gauges.reserved_bytes.decrease(size)
        self.events["num_device_free"] += 1

    def _gauges(self) -> list[tuple[str, Gauge]]:
        found = [
            (f"{family}.{pool}", getattr(gauges, family))
            for pool, gauges in (("all", self.all), ("large_pool", self.large), ("small_pool", self.small))
            for family in _FAMILIES
        ]
        return [
            *found,
            ("oversize_allocations", self.oversize_allocations),
            ("oversize_segments", self.oversize_segments),
        ]

    def reset_peaks(self) -> None:
        self.count()
        for _, gauge in self._gauges():
            gauge.peak = gauge.current

    def reset_accumulated(self) -> None:
        """Zeroes the running totals, and the counts of events that PyTorch resets with them."""
        self.count()
        for _, gauge in self._gauges():
            gauge.allocated = gauge.freed = 0
        self.events.update(dict.fromkeys(_EVENTS, 0))

    def flat(self, max_split_size: int) -> dict[str, int]:
        """The dictionary of `torch.cuda.memory_stats`, sorted by key; an unlimited split size is -1 there."""
        self.count()
        figures = {f"{name}.{metric}": getattr(gauge, metric) for name, gauge in self._gauges() for metric in _METRICS}
        return dict(sorted({**figures, **self.events, "max_split_size": max_split_size}.items()))
