"""Made-up programs of requests for the allocator's tests, and what they do to one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import strategies as st

from gpumem_magic.allocator.caching import CachingAllocator
from gpumem_magic.allocator.failure import DeviceOutOfMemory
from gpumem_magic.allocator.memory import DeviceMemory
from gpumem_magic.snapshot.model import Segment, TraceEvent
from gpumem_magic.snapshot.rules import AllocatorSettings
from gpumem_magic.units import MIB

EDGES = [
    *(1, 511, 512, 513, 4096, MIB // 2, MIB - 512, MIB, MIB + 1, MIB + 512, 2 * MIB - 512, 2 * MIB, 5 * MIB, 9 * MIB),
    *(10 * MIB - 512, 10 * MIB - 1, 10 * MIB, 10 * MIB + 1, 18 * MIB, 19 * MIB, 20 * MIB, 21 * MIB, 33 * MIB, 50 * MIB),
]

sizes = st.one_of(st.sampled_from(EDGES), st.integers(1, 3 * MIB), st.integers(1, 30 * MIB))
streams = st.sampled_from([0, 0, 0, 7])

# The number in a free or record is taken modulo the number of live blocks.
step_without_pools = st.one_of(
    st.tuples(st.just("malloc"), sizes, streams),
    st.tuples(st.just("malloc"), sizes, streams),
    st.tuples(st.just("malloc"), sizes, streams),
    st.tuples(st.just("free"), st.integers(0, 99), st.just(0)),
    st.tuples(st.just("free"), st.integers(0, 99), st.just(0)),
    st.tuples(st.just("record"), st.integers(0, 99), streams),
    st.tuples(st.sampled_from(["empty_cache", "complete_pending"]), st.just(0), st.just(0)),
)
_step = st.one_of(
    *[step_without_pools] * 7,
    # Begins filling a private pool, or ends it; gives one up.
    st.tuples(st.sampled_from(["pool", "pool", "release_pool"]), st.integers(1, 2), st.just(0)),
)
# Long ones fill the memory, which short ones hardly ever do.
steps = st.one_of(st.lists(_step, max_size=20), st.lists(_step, min_size=30, max_size=70))

settings_choices = st.sampled_from(
    [
        AllocatorSettings(),
        AllocatorSettings(),
        AllocatorSettings(max_split_size=20 * MIB),
        AllocatorSettings(max_split_size=25 * MIB, max_non_split_rounding=24 * MIB),
        AllocatorSettings(roundup_power2_divisions=(4,) * 16),
        AllocatorSettings(garbage_collection_threshold=0.5),
        AllocatorSettings(large_segment_size=12 * MIB),
        AllocatorSettings(expandable_segments=True),
        AllocatorSettings(expandable_segments=True),
        AllocatorSettings(expandable_segments=True, large_segment_size=10 * MIB),
        AllocatorSettings(expandable_segments=True, max_split_size=20 * MIB, garbage_collection_threshold=0.5),
    ]
)


class PeaksSince:
    """The highest figures of an allocator since the beginning, whoever resets the allocator's own."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self._allocator = allocator
        allocator.sinks.append(self)
        allocator.on_reserved = self._see
        self.begin()

    def begin(self) -> None:
        self.allocated, self.reserved = self._allocator.allocated, self._allocator.reserved

    def append(self, event: TraceEvent) -> None:
        self.allocated = max(self.allocated, self._allocator.allocated)

    def end(self) -> None:
        self._allocator.sinks[:] = [sink for sink in self._allocator.sinks if sink is not self]
        self._allocator.on_reserved = None

    def _see(self, reserved: int) -> None:
        self.reserved = max(self.reserved, reserved)


@dataclass
class Run:
    """An allocator under a program: step by step, with every event and each state after a step."""

    allocator: CachingAllocator
    events: list[TraceEvent] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    requests: dict[int, int] = field(default_factory=dict)
    failures: list[DeviceOutOfMemory] = field(default_factory=list)
    # The private pool that is being filled, and how many users each has.
    pool_id: tuple[int, int] = (0, 0)
    users: Counter[tuple[int, int]] = field(default_factory=Counter)

    def step(self, action: str, number: int, stream: int) -> None:
        if action == "malloc":
            try:
                address = self.allocator.malloc(number, stream)
            except DeviceOutOfMemory as failure:
                self.failures.append(failure)
            else:
                self.live.append(address)
                self.requests[address] = number
        elif action == "free" and self.live:
            self.allocator.free(self.live.pop(number % len(self.live)))
        elif action == "record" and self.live:
            self.allocator.record_stream(self.live[number % len(self.live)], stream)
        elif action == "empty_cache":
            self.allocator.empty_cache()
        elif action == "complete_pending":
            self.allocator.complete_pending()
        elif action == "pool" and self.pool_id == (0, 0):
            self.pool_id = (0, number)
            self.users[self.pool_id] += 1
            self.allocator.begin_pool(self.pool_id)
        elif action == "pool":
            self.allocator.end_pool(self.pool_id)
            self.pool_id = (0, 0)
        elif action == "release_pool" and self.users[0, number] and self.pool_id != (0, number):
            self.users[0, number] -= 1
            self.allocator.release_pool((0, number))

    def leave_pools(self) -> None:
        if self.pool_id != (0, 0):
            self.step("pool", 0, 0)
        for (_, number), count in self.users.items():
            for _ in range(count):
                self.step("release_pool", number, 0)


def start_run(
    total: int = 80 * MIB,
    settings: AllocatorSettings | None = None,
    fraction: float = 1.0,
    auto_complete: bool = True,
    address_space: int | None = None,
) -> Run:
    memory = DeviceMemory(total)
    # By default an expandable segment never uses up its addresses, as on a GPU, whose memory is not cut up as badly as here.
    memory.address_space = address_space or 1 << 40
    allocator = CachingAllocator(0, memory, settings or AllocatorSettings(), auto_complete=auto_complete)
    allocator.set_memory_fraction(fraction)
    run = Run(allocator)
    allocator.sinks.append(run.events)
    return run


def shape(segments: tuple[Segment, ...]) -> list[object]:
    """Segments without what a free block remembers of its last tenant, and without stacks."""
    return [
        (
            segment.address,
            segment.total_size,
            segment.stream,
            segment.segment_type,
            segment.is_expandable,
            segment.segment_pool_id,
            [
                (block.address, block.size, block.state, block.requested_size if block.state != "inactive" else 0)
                for block in segment.blocks
            ],
        )
        for segment in segments
    ]
