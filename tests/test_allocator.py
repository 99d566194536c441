"""The emulated allocator: the rules one by one."""

from __future__ import annotations

from collections import deque

import pytest
from allocator_programs import shape, start_run

from gpumem_magic.allocator.caching import CachingAllocator
from gpumem_magic.allocator.failure import DeviceOutOfMemory
from gpumem_magic.allocator.memory import DeviceMemory
from gpumem_magic.snapshot.model import Frame, Segment, Snapshot, TraceEvent
from gpumem_magic.snapshot.plain import snapshot_from_data, snapshot_to_data
from gpumem_magic.snapshot.rules import AllocatorSettings
from gpumem_magic.units import GIB, MIB


def make(total: int = GIB, **options: object) -> CachingAllocator:
    return CachingAllocator(0, DeviceMemory(total), AllocatorSettings(**options))  # type: ignore[arg-type]


def layout(allocator: CachingAllocator) -> list[list[tuple[int, str]]]:
    """Each segment's blocks as (size, first letter of the state)."""
    return [[(block.size, block.state[0]) for block in segment.blocks] for segment in allocator.segments()]


# Placement, by hand.


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (512, [[(512, "a"), (2 * MIB - 512, "i")]]),
        (MIB, [[(MIB, "a"), (MIB, "i")]]),
        (MIB + 1, [[(MIB + 512, "a"), (19 * MIB - 512, "i")]]),
        (10 * MIB - 1, [[(10 * MIB, "a")]]),  # rounds up to 10 MiB, which gets its own segment
        (10 * MIB - 512, [[(10 * MIB - 512, "a"), (10 * MIB + 512, "i")]]),
        (10 * MIB, [[(10 * MIB, "a")]]),
        (11 * MIB, [[(12 * MIB, "a")]]),  # exactly 1 MiB over is not split off
        (11 * MIB - 512, [[(11 * MIB - 512, "a"), (MIB + 512, "i")]]),
    ],
)
def test_first_request(size: int, expected: list[list[tuple[int, str]]]) -> None:
    allocator = make()
    allocator.malloc(size)
    assert layout(allocator) == expected


def test_a_leftover_that_is_not_split_off_counts_as_allocated() -> None:
    allocator = make()
    allocator.malloc(11 * MIB)
    assert allocator.allocated == 12 * MIB
    assert allocator.requested == 11 * MIB
    assert allocator.memory_stats()["inactive_split.all.current"] == 0


def test_a_request_of_nothing() -> None:
    run = start_run()
    assert run.allocator.malloc(0) == 0
    run.allocator.free(0)
    run.allocator.record_stream(0, 7)
    assert run.events == []
    assert run.allocator.segments() == ()


def test_best_fit_takes_the_smallest_and_of_those_the_lowest() -> None:
    allocator = make()
    first, keep_1, second, keep_2, third, _ = [
        allocator.malloc(size) for size in (4 * MIB, MIB + 512, 3 * MIB, MIB + 512, 3 * MIB, MIB + 512)
    ]
    for address in (first, second, third):
        allocator.free(address)
    assert allocator.malloc(3 * MIB) == min(second, third)
    assert allocator.malloc(3 * MIB) == max(second, third)
    assert allocator.malloc(3 * MIB - 512) == first
    assert keep_1 < keep_2


def test_streams_do_not_share_cached_blocks() -> None:
    allocator = make()
    address = allocator.malloc(5 * MIB, stream=0)
    allocator.free(address)
    other = allocator.malloc(5 * MIB, stream=7)
    assert other != address
    assert {segment.stream for segment in allocator.segments()} == {0, 7}
    assert allocator.malloc(5 * MIB, stream=0) == address


def test_neighbours_merge_both_ways() -> None:
    allocator = make()
    addresses = [allocator.malloc(4 * MIB) for _ in range(5)]
    for index in (1, 3, 2):
        allocator.free(addresses[index])
    assert layout(allocator) == [[(4 * MIB, "a"), (12 * MIB, "i"), (4 * MIB, "a")]]
    allocator.free(addresses[0])
    allocator.free(addresses[4])
    assert layout(allocator) == [[(20 * MIB, "i")]]
    assert allocator.reserved == 20 * MIB  # a whole free segment stays cached


def _block_size(allocator: CachingAllocator, address: int) -> int:
    blocks = (block for segment in allocator.segments() for block in segment.blocks)
    return next(block.size for block in blocks if block.address == address)


def test_wrong_addresses_are_refused() -> None:
    allocator = make()
    address = allocator.malloc(100)
    with pytest.raises(ValueError, match="no allocated block"):
        allocator.free(address + 512)
    with pytest.raises(ValueError, match="no allocated block"):
        allocator.record_stream(address + 512, 7)
    with pytest.raises(ValueError, match="cannot allocate -1 bytes"):
        allocator.malloc(-1)
    assert _block_size(allocator, address) == 512
    allocator.free(address)
    with pytest.raises(ValueError, match="no allocated block"):
        allocator.free(address)


# Options.


def test_blocks_above_the_split_limit_are_for_requests_above_it() -> None:
    allocator = make(max_split_size=20 * MIB)
    big = allocator.malloc(40 * MIB)
    allocator.free(big)
    assert allocator.malloc(12 * MIB) != big
    # Not cut, and given away only with less than max_non_split_rounding to spare.
    assert allocator.malloc(20 * MIB) != big
    assert allocator.malloc(20 * MIB + 512) == big
    assert _block_size(allocator, big) == 40 * MIB
    assert allocator.memory_stats()["oversize_allocations.current"] == 2
    assert allocator.memory_stats()["max_split_size"] == 20 * MIB


def test_with_a_split_limit_oversize_blocks_are_given_back_one_by_one() -> None:
    run = start_run(100 * MIB, AllocatorSettings(max_split_size=20 * MIB))
    allocator = run.allocator
    for address in [allocator.malloc(size) for size in (24 * MIB, 28 * MIB, 40 * MIB)]:
        allocator.free(address)
    del run.events[:]
    # None of them alone is big enough, so the largest goes, then the next, until they are.
    allocator.malloc(60 * MIB)
    assert [(event.action, event.size) for event in run.events] == [
        ("segment_free", 40 * MIB),
        ("segment_free", 28 * MIB),
        ("segment_alloc", 60 * MIB),
        ("alloc", 60 * MIB),
    ]
    assert allocator.num_alloc_retries == 0
    assert allocator.reserved == 84 * MIB


def test_a_memory_fraction_limits_what_is_reserved() -> None:
    allocator = make(100 * MIB)
    allocator.set_memory_fraction(0.5)
    assert allocator.limit == 50 * MIB
    allocator.malloc(50 * MIB)
    with pytest.raises(DeviceOutOfMemory) as caught:
        allocator.malloc(512)
    assert caught.value.limit == 50 * MIB
    assert caught.value.free == 50 * MIB
    allocator.set_memory_fraction(1.0)
    assert allocator.limit is None
    allocator.malloc(512)
    with pytest.raises(ValueError, match="between 0 and 1"):
        allocator.set_memory_fraction(1.5)


def test_garbage_collection_gives_back_what_is_old() -> None:
    run = start_run(1000 * MIB, AllocatorSettings(garbage_collection_threshold=0.6), fraction=0.1)
    allocator = run.allocator
    old, recent, _ = allocator.malloc(30 * MIB), allocator.malloc(32 * MIB), allocator.malloc(4 * MIB)
    allocator.free(old)
    for _ in range(5):
        allocator.free(allocator.malloc(4 * MIB))
    allocator.free(recent)
    # 82 MiB are reserved, above 0.6 of the limit of 100 MiB: a new segment lets go of what lay longest, and only of that.
    allocator.malloc(34 * MIB)
    released = [event.address for event in run.events if event.action == "segment_free"]
    assert released == [old]
    assert allocator.num_alloc_retries == 0
    # Now 86 MiB are, and the recent one is the only whole segment that is left.
    allocator.free(allocator.malloc(33 * MIB))
    released = [event.address for event in run.events if event.action == "segment_free"]
    assert released == [old, recent]


def test_garbage_collection_needs_a_limit() -> None:
    run = start_run(100 * MIB, AllocatorSettings(garbage_collection_threshold=0.1))
    run.allocator.free(run.allocator.malloc(30 * MIB))
    run.allocator.malloc(40 * MIB)
    assert not any(event.action == "segment_free" for event in run.events)


def test_a_recorded_stream_defers_the_free() -> None:
    run = start_run(auto_complete=False)
    allocator = run.allocator
    first, second = allocator.malloc(4 * MIB), allocator.malloc(4 * MIB)
    allocator.record_stream(first, 0)  # its own stream: nothing to wait for
    allocator.record_stream(first, 7)
    allocator.record_stream(first, 8)
    allocator.free(first)
    stats = allocator.memory_stats()
    assert (stats["allocation.all.current"], stats["active.all.current"]) == (1, 2)
    assert (allocator.allocated, stats["active_bytes.all.current"], allocator.requested) == (4 * MIB, 8 * MIB, 8 * MIB)
    assert allocator.segments()[0].blocks[0].state == "active_pending_free"
    assert [event.action for event in run.events][-1] == "free_requested"
    assert allocator.malloc(4 * MIB) not in (first, second)
    allocator.free(second)
    assert layout(allocator)[0][:2] == [(4 * MIB, "a"), (4 * MIB, "i")]  # not merged with what waits
    allocator.complete_pending(7)
    assert allocator.segments()[0].blocks[0].state == "active_pending_free"
    allocator.complete_pending(8)
    assert layout(allocator)[0][0] == (8 * MIB, "i")
    assert run.events[-1].action == "free_completed"


def test_finished_work_is_noticed_at_the_next_request() -> None:
    allocator = make()
    address = allocator.malloc(5 * MIB)
    allocator.record_stream(address, 7)
    allocator.free(address)
    assert allocator.segments()[0].blocks[0].state == "active_pending_free"
    assert allocator.malloc(5 * MIB) == address


def test_emptying_the_cache_waits_for_streams() -> None:
    run = start_run(auto_complete=False)
    address = run.allocator.malloc(5 * MIB)
    run.allocator.record_stream(address, 7)
    run.allocator.free(address)
    run.allocator.empty_cache()
    assert run.allocator.segments() == ()
    assert [event.action for event in run.events][-2:] == ["free_completed", "segment_free"]
    assert run.allocator.memory_stats()["num_sync_all_streams"] == 1


# Events, stacks, counters.


def test_events_of_a_life() -> None:
    run = start_run()
    address = run.allocator.malloc(1000, stream=7)
    run.allocator.free(address)
    run.allocator.empty_cache()
    assert [(event.action, event.address, event.size, event.stream) for event in run.events] == [
        ("segment_alloc", address, 2 * MIB, 7),
        ("alloc", address, 1000, 7),
        ("free_requested", address, 1000, 7),
        ("free_completed", address, 1000, 7),
        ("segment_free", address, 2 * MIB, 7),
    ]
    times = [event.time_us for event in run.events]
    assert times == sorted(times)
    assert times[0] > 10**15


def test_every_sink_gets_every_event() -> None:
    run = start_run()
    last: deque[TraceEvent] = deque(maxlen=1)
    run.allocator.sinks.append(last)
    run.allocator.malloc(1000)
    assert list(last) == run.events[-1:]


@pytest.mark.parametrize(
    ("context", "alloc", "free", "block"),
    [("all", 1, 2, 1), ("alloc", 1, 1, 1), ("state", None, None, 1)],
)
def test_stacks_go_where_the_context_says(context: str, alloc: int | None, free: int | None, block: int) -> None:
    run = start_run()
    run.allocator.stack_context = context
    run.allocator.stacks = lambda: (Frame("cell", "<module>", 1),)
    address = run.allocator.malloc(1000)
    run.allocator.stacks = lambda: (Frame("cell", "<module>", 2),)
    segments = run.allocator.segments()
    assert [frame.line for frame in segments[0].blocks[0].frames] == [block]
    assert segments[0].blocks[1].frames == ()
    run.allocator.free(address)
    lines = [event.frames[0].line if event.frames else None for event in run.events]
    assert lines == [alloc, alloc, free, free]


def test_reserved_is_announced() -> None:
    seen: list[int] = []
    allocator = make()
    allocator.on_reserved = seen.append
    allocator.free(allocator.malloc(1000))
    allocator.malloc(12 * MIB)
    allocator.empty_cache()
    assert seen == [2 * MIB, 14 * MIB, 12 * MIB]


def test_peaks_are_reset_to_what_is_current() -> None:
    allocator = make()
    allocator.free(allocator.malloc(30 * MIB))
    allocator.free(allocator.malloc(20 * MIB))
    assert (allocator.peak_allocated, allocator.peak_reserved) == (30 * MIB, 30 * MIB)
    allocator.reset_peak_stats()
    assert (allocator.peak_allocated, allocator.peak_reserved) == (0, 30 * MIB)


def test_statistics_have_all_keys() -> None:
    stats = make().memory_stats()
    families = [
        *("allocation", "segment", "active", "inactive_split"),
        *("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes", "requested_bytes"),
    ]
    expected = {
        f"{family}.{pool}.{metric}"
        for family in families
        for pool in ("all", "small_pool", "large_pool")
        for metric in ("current", "peak", "allocated", "freed")
    }
    for family in ("oversize_allocations", "oversize_segments"):
        expected |= {f"{family}.{metric}" for metric in ("current", "peak", "allocated", "freed")}
    expected |= {
        *("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free"),
        *("num_oom_rejections", "max_split_size"),
    }
    assert set(stats) == expected
    assert list(stats) == sorted(stats)
    assert stats.pop("max_split_size") == -1
    assert set(stats.values()) == {0}


def test_resetting_what_accumulates() -> None:
    allocator = make()
    address = allocator.malloc(1000)
    allocator.free(allocator.malloc(5 * MIB))
    allocator.empty_cache()
    allocator.reset_accumulated_stats()
    stats = allocator.memory_stats()
    assert stats["allocated_bytes.all.allocated"] == stats["allocated_bytes.all.freed"] == 0
    assert stats["num_device_alloc"] == stats["num_device_free"] == stats["num_sync_all_streams"] == 0
    assert stats["allocated_bytes.all.current"] == 1024
    allocator.free(address)
    assert allocator.memory_stats()["allocated_bytes.all.freed"] == 1024


def test_inactive_split_follows_the_free_pieces() -> None:
    allocator = make()
    addresses = [allocator.malloc(4 * MIB) for _ in range(3)]

    def figures() -> tuple[int, int]:
        stats = allocator.memory_stats()
        return stats["inactive_split.all.current"], stats["inactive_split_bytes.large_pool.current"]

    assert figures() == (1, 8 * MIB)
    allocator.free(addresses[0])
    assert figures() == (2, 12 * MIB)
    allocator.malloc(4 * MIB)  # takes the piece at the start whole
    assert figures() == (1, 8 * MIB)
    allocator.free(addresses[2])
    assert figures() == (1, 12 * MIB)
    allocator.free(addresses[1])
    assert figures() == (1, 16 * MIB)


# States from elsewhere.


def test_a_snapshot_can_be_adopted() -> None:
    run = start_run(auto_complete=False)
    kept = [run.allocator.malloc(size) for size in (1000, 4 * MIB, 5 * MIB, 3 * MIB, 30 * MIB)]
    run.allocator.free(kept[1])
    run.allocator.record_stream(kept[3], 7)
    run.allocator.free(kept[3])
    data = snapshot_to_data(Snapshot(run.allocator.segments(), ()))
    copy = make()
    copy.auto_complete = False
    copy.adopt(snapshot_from_data(data).segments)
    assert shape(copy.segments()) == shape(run.allocator.segments())
    old, new = run.allocator.memory_stats(), copy.memory_stats()
    assert {key: new[key] for key in new if key.endswith("current")} == {
        key: old[key] for key in old if key.endswith("current")
    }
    for allocator in (run.allocator, copy):
        allocator.complete_pending()
    assert shape(copy.segments()) == shape(run.allocator.segments())
    assert copy.malloc(9 * MIB) == run.allocator.malloc(9 * MIB)
    assert copy.peak_allocated >= copy.allocated


def test_nonsense_is_not_adopted() -> None:
    source = make()
    source.malloc(1000)
    (segment,) = source.segments()
    allocator = make()
    allocator.adopt([segment])
    with pytest.raises(ValueError, match="overlap"):
        allocator.adopt([segment])
    elsewhere = Segment(0, 0, 2 * MIB, 0, "small", segment.blocks, is_expandable=True)
    with pytest.raises(ValueError, match="no block"):
        make().adopt([elsewhere])
    with pytest.raises(ValueError, match="add up"):
        make().adopt([Segment(0, segment.address, 4 * MIB, 0, "small", segment.blocks)])
    with pytest.raises(ValueError, match="no block"):
        make().adopt([Segment(0, segment.address, 2 * MIB, 0, "small", segment.blocks[1:])])


def test_releasing_one_segment() -> None:
    allocator = make()
    address = allocator.malloc(12 * MIB)
    with pytest.raises(ValueError, match="no unused segment"):
        allocator.release_segment(address)
    allocator.free(address)
    allocator.release_segment(address)
    assert allocator.reserved == 0
    with pytest.raises(ValueError, match="no unused segment"):
        allocator.release_segment(address)
