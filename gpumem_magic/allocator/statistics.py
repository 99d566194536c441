"""The counters behind `torch.cuda.memory_stats`: for each family and pool its current value, peak and running totals."""

from __future__ import annotations

from gpumem_magic.snapshot.model import LARGE_POOL, SMALL_POOL

FAMILIES = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)


class Gauge:
    """A value that goes up and down, its peak, and all that was ever added (allocated) and taken away (freed)."""

    __slots__ = ("allocated", "current", "freed", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def increase(self, amount: int) -> None:
        self.current = current = self.current + amount
        if current > self.peak:
            self.peak = current
        self.allocated += amount

    def decrease(self, amount: int) -> None:
        self.current -= amount
        self.freed += amount

    def shift(self, amount: int) -> None:
        """A net change of either sign, counted once; 0 is no change."""
        if amount > 0:
            self.increase(amount)
        else:
            self.decrease(-amount)


class PoolGauges:
    """The gauges of one pool, or of all pools together. One method for each moment at which they move."""

    __slots__ = FAMILIES

    allocation: Gauge
    segment: Gauge
    active: Gauge
    inactive_split: Gauge
    allocated_bytes: Gauge
    reserved_bytes: Gauge
    active_bytes: Gauge
    inactive_split_bytes: Gauge
    requested_bytes: Gauge

    def __init__(self) -> None:
        for family in FAMILIES:
            setattr(self, family, Gauge())

    def gauges(self) -> list[tuple[str, Gauge]]:
        return [(family, getattr(self, family)) for family in FAMILIES]

    def took_block(self, size: int, requested: int) -> None:
        self.allocation.increase(1)
        self.allocated_bytes.increase(size)
        self.active.increase(1)
        self.active_bytes.increase(size)
        self.requested_bytes.increase(requested)

    def free_requested(self, size: int) -> None:
        self.allocation.decrease(1)
        self.allocated_bytes.decrease(size)

    def free_completed(self, size: int, requested: int, splits: int, split_bytes: int) -> None:
        """`splits` and `split_bytes`: the net change of unused pieces of split segments, after merging."""
        if splits:
            self.inactive_split.shift(splits)
        if split_bytes:
            self.inactive_split_bytes.shift(split_bytes)
        self.active.decrease(1)
        self.active_bytes.decrease(size)
        self.requested_bytes.decrease(requested)

    def opened_segment(self, size: int) -> None:
        self.segment.increase(1)
        self.reserved_bytes.increase(size)

    def closed_segment(self, size: int) -> None:
        self.segment.decrease(1)
        self.reserved_bytes.decrease(size)


class Statistics:
    """All counters of one device's allocator."""

    def __init__(self) -> None:
        self.all = PoolGauges()
        self.small = PoolGauges()
        self.large = PoolGauges()
        self.oversize_allocations = Gauge()
        self.oversize_segments = Gauge()
        self.num_alloc_retries = 0
        self.num_ooms = 0
        self.num_sync_all_streams = 0
        self.num_device_alloc = 0
        self.num_device_free = 0

    def of_pool(self, name: str) -> PoolGauges:
        return {SMALL_POOL: self.small, LARGE_POOL: self.large}[name]

    def _gauges(self) -> list[tuple[str, Gauge]]:
        found = [
            (f"{family}.{pool}", gauge)
            for pool, gauges in (("all", self.all), ("large_pool", self.large), ("small_pool", self.small))
            for family, gauge in gauges.gauges()
        ]
        return [
            *found,
            ("oversize_allocations", self.oversize_allocations),
            ("oversize_segments", self.oversize_segments),
        ]

    def reset_peaks(self) -> None:
        for _, gauge in self._gauges():
            gauge.peak = gauge.current

    def reset_accumulated(self) -> None:
        """Zeroes the running totals, and the counts of events that PyTorch resets with them."""
        for _, gauge in self._gauges():
            gauge.allocated = gauge.freed = 0
        self.num_alloc_retries = 0
        self.num_ooms = 0
        self.num_sync_all_streams = 0
        self.num_device_alloc = 0
        self.num_device_free = 0

    def flat(self, max_split_size: int) -> dict[str, int]:
        """The dictionary of `torch.cuda.memory_stats`, sorted by key; an unlimited split size is -1 there."""
        figures = {
            f"{name}.{metric}": getattr(gauge, metric)
            for name, gauge in self._gauges()
            for metric in ("current", "peak", "allocated", "freed")
        }
        figures.update(
            num_alloc_retries=self.num_alloc_retries,
            num_ooms=self.num_ooms,
            num_sync_all_streams=self.num_sync_all_streams,
            num_device_alloc=self.num_device_alloc,
            num_device_free=self.num_device_free,
            # Counts what throw_on_cudamalloc_oom refused; that option is not emulated, so nothing ever is.
            num_oom_rejections=0,
            max_split_size=max_split_size,
        )
        return dict(sorted(figures.items()))
