"""The emulated allocator: the rules one by one, and what must hold under any program."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

import pytest
from allocator_programs import settings_choices, shape, sizes, start_run, steps, streams
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumem_magic.allocator.caching import CachingAllocator
from gpumem_magic.allocator.failure import DeviceOutOfMemory, oom_text
from gpumem_magic.allocator.memory import BASE_ADDRESS, DeviceMemory, FirstFitAddresses
from gpumem_magic.allocator.settings import parse, parse_with_notes, settings_from_dict, settings_to_dict
from gpumem_magic.snapshot.model import Frame, Segment, Snapshot, TraceEvent
from gpumem_magic.snapshot.rules import AllocatorSettings, pool_of, round_size, segment_size
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


def test_wrong_addresses_are_refused() -> None:
    allocator = make()
    address = allocator.malloc(100)
    with pytest.raises(ValueError, match="no allocated block"):
        allocator.free(address + 512)
    with pytest.raises(ValueError, match="no allocated block"):
        allocator.record_stream(address + 512, 7)
    with pytest.raises(ValueError, match="cannot allocate -1 bytes"):
        allocator.malloc(-1)
    assert allocator.block_size(address) == 512
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
    assert allocator.block_size(big) == 40 * MIB
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


@pytest.mark.parametrize(
    "text", ["", " ", "backend:native", "expandable_segments:False, pinned_num_register_threads:8"]
)
def test_settings_that_change_nothing(text: str) -> None:
    assert parse_with_notes(text) == (AllocatorSettings(), [])


def test_settings_are_read() -> None:
    text = (
        "max_split_size_mb:128, garbage_collection_threshold:0.8,roundup_power2_divisions:[256:1,512:2,>:8],"
        "max_non_split_rounding_mb:64,large_segment_size_mb:12,expandable_segments:True,per_process_memory_fraction:0.5"
    )
    settings = parse(text)
    assert settings == AllocatorSettings(
        max_split_size=128 * MIB,
        garbage_collection_threshold=0.8,
        roundup_power2_divisions=(*(1,) * 9, 2, *(8,) * 6),
        max_non_split_rounding=64 * MIB,
        large_segment_size=12 * MIB,
        expandable_segments=True,
        memory_fraction=0.5,
    )
    assert settings_from_dict(settings_to_dict(settings, text)) == settings
    assert parse("roundup_power2_divisions:4").roundup_power2_divisions == (4,) * 16


@pytest.mark.parametrize(
    ("text", "word"),
    [("throw_on_cudamalloc_oom:True", "throw_on_cudamalloc_oom"), ("backend:cudaMallocAsync", "cudaMallocAsync")],
)
def test_what_is_not_emulated_is_said(text: str, word: str) -> None:
    settings, notes = parse_with_notes(text + ",max_split_size_mb:64")
    assert settings.max_split_size == 64 * MIB
    assert len(notes) == 1
    assert word in notes[0]
    assert "not emulated" in notes[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_split_size_mb:10", "max_split_size_mb must be at least 20"),
        ("max_split_size_mb:many", "must be a whole number"),
        ("max_split_size_mb", "expected name:value"),
        ("max_split_size_mb:", "expected name:value"),
        ("large_segment_size_mb:2", "at least 10"),
        ("garbage_collection_threshold:1.0", "between 0 and 1"),
        ("garbage_collection_threshold:half", "must be a number"),
        ("roundup_power2_divisions:3", "power of two"),
        ("roundup_power2_divisions:[3:2]", "powers of two"),
        ("roundup_power2_divisions:[4:3]", "0 or a power of two"),
        ("roundup_power2_divisions:[4]", "size:divisions"),
        ("roundup_power2_divisions:[4:2", "closing"),
        ("expandable_segments:yes", "True or False"),
        ("backend:other", "native or cudaMallocAsync"),
        ("per_process_memory_fraction:2", "between 0 and 1"),
        ("max_split:128", "unknown option 'max_split'"),
    ],
)
def test_bad_settings_are_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse(text)


# Out of memory.


def failure_of(limit: int | None = None) -> DeviceOutOfMemory:
    return DeviceOutOfMemory(
        requested=50 * MIB - 100,
        rounded=50 * MIB,
        segment_size=50 * MIB,
        device=0,
        total=15 * GIB + 799 * MIB,
        free=48 * MIB,
        allocated=14 * GIB + 370 * MIB,
        reserved=14 * GIB + 400 * MIB,
        limit=limit,
        largest_free=20 * MIB,
        outside=1372 * MIB,
    )


OLD = (
    "CUDA out of memory. Tried to allocate 50.00 MiB (GPU 0; 15.78 GiB total capacity; 14.36 GiB already allocated; "
    "48.00 MiB free; 14.39 GiB reserved in total by PyTorch)"
)
NEW = (
    "CUDA out of memory. Tried to allocate 50.00 MiB. GPU 0 has a total capacity of 15.78 GiB of which 48.00 MiB is free. "
    "Of the allocated memory 14.36 GiB is allocated by PyTorch, and 30.00 MiB is reserved by PyTorch but unallocated. "
    "If reserved but unallocated memory is large try setting "
)
SPLIT_HINT = (
    "max_split_size_mb to avoid fragmentation.  See documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF"
)
PAGE = "https://pytorch.org/docs/stable/notes/cuda.html#environment-variables"
NEW_PAGE = "https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf"
AVOID = "=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management  "


@pytest.mark.parametrize(
    ("version", "text"),
    [
        ("1.8", OLD),
        ("1.9.1+cu111", OLD),
        ("1.10", f"{OLD} If reserved memory is >> allocated memory try setting {SPLIT_HINT}"),
        ("2.0.1", f"{OLD} If reserved memory is >> allocated memory try setting {SPLIT_HINT}"),
        ("2.1", NEW.replace("capacity", "capacty") + SPLIT_HINT),
        ("2.2", f"{NEW}PYTORCH_CUDA_ALLOC_CONF{AVOID}({PAGE})"),
        ("2.8.0", f"{NEW}PYTORCH_CUDA_ALLOC_CONF{AVOID}({PAGE})"),
        ("2.9", f"{NEW}PYTORCH_ALLOC_CONF{AVOID}({PAGE})"),
        ("2.10.0", f"{NEW}PYTORCH_ALLOC_CONF{AVOID}({PAGE})"),
        ("2.11", f"{NEW}PYTORCH_CUDA_ALLOC_CONF{AVOID}({NEW_PAGE})"),
        ("2.13.0+cpu", f"{NEW}PYTORCH_CUDA_ALLOC_CONF{AVOID}({NEW_PAGE})"),
    ],
)
def test_texts_of_every_era(version: str, text: str) -> None:
    assert failure_of().message(version) == text


def test_the_limit_is_told_by_the_versions_that_tell_it() -> None:
    failure = failure_of(limit=8 * GIB)
    assert "48.00 MiB free; 8.00 GiB allowed; 14.39 GiB reserved in total" in failure.message("1.8")
    assert "allowed" not in failure.message("2.2")
    assert "is free. 8.00 GiB allowed; Of the allocated memory" in failure.message("2.13")


def test_processes_are_told_in_their_order() -> None:
    text = oom_text(failure_of(), "2.13", process_id=500, process_bytes=15 * GIB, others={700: 2 * MIB, 300: 100 * MIB})
    assert (
        "is free. Process 300 has 100.00 MiB memory in use. Including non-PyTorch memory, this process has 15.00 GiB memory "
        "in use. Process 700 has 2.00 MiB memory in use. Of the allocated memory"
    ) in text
    assert oom_text(failure_of(), "1.8", process_id=500, process_bytes=15 * GIB) == OLD


def test_unknown_versions_are_refused() -> None:
    with pytest.raises(ValueError, match="oldest that is known"):
        failure_of().message("1.7")
    with pytest.raises(ValueError, match="not a PyTorch version"):
        failure_of().message("newest")


def test_an_exabyte_is_refused_at_once() -> None:
    run = start_run()
    with pytest.raises(DeviceOutOfMemory) as caught:
        run.allocator.malloc(1 << 60)
    assert caught.value.message("2.13") == "CUDA out of memory. Tried to allocate more than 1EB memory."
    assert run.events == []
    assert run.allocator.num_ooms == 0


def test_out_of_memory_tells_what_was_there() -> None:
    run = start_run(64 * MIB)
    allocator = run.allocator
    allocator.memory.outside = 4 * MIB
    kept = [allocator.malloc(5 * MIB - 100) for _ in range(4)]
    allocator.free(kept.pop(1))
    del run.events[:]
    with pytest.raises(DeviceOutOfMemory) as caught:
        allocator.malloc(60 * MIB - 1)
    failure = caught.value
    assert (failure.requested, failure.rounded, failure.segment_size) == (60 * MIB - 1, 60 * MIB, 60 * MIB)
    assert (failure.total, failure.free, failure.outside) == (64 * MIB, 40 * MIB, 4 * MIB)
    assert (failure.allocated, failure.reserved, failure.limit) == (15 * MIB, 20 * MIB, None)
    assert (failure.device, failure.largest_free) == (0, 5 * MIB)
    assert [(event.action, event.address, event.size) for event in run.events] == [("oom", 40 * MIB, 60 * MIB)]
    assert allocator.num_ooms == allocator.num_alloc_retries == 1
    assert str(failure) == failure.message("2.13")


def test_a_flush_and_retry_is_counted_and_seen() -> None:
    run = start_run(64 * MIB)
    allocator = run.allocator
    small = allocator.malloc(1000)
    cached = allocator.malloc(40 * MIB)
    allocator.free(cached)
    allocator.free(small)
    del run.events[:]
    allocator.malloc(50 * MIB)
    assert [event.action for event in run.events] == ["segment_free", "segment_free", "segment_alloc", "alloc"]
    # The large pool goes first.
    assert [event.size for event in run.events[:2]] == [40 * MIB, 2 * MIB]
    assert allocator.num_alloc_retries == 1
    assert allocator.num_ooms == 0


# Streams.


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


def test_two_pairs_of_peaks() -> None:
    allocator = make()
    allocator.free(allocator.malloc(30 * MIB))
    allocator.start_window()
    assert (allocator.window_peak_allocated, allocator.window_peak_reserved) == (0, 30 * MIB)
    allocator.free(allocator.malloc(20 * MIB))
    assert (allocator.window_peak_allocated, allocator.peak_allocated) == (20 * MIB, 30 * MIB)
    allocator.reset_peak_stats()
    assert (allocator.window_peak_allocated, allocator.peak_allocated) == (20 * MIB, 0)
    assert allocator.peak_reserved == 30 * MIB


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


# Addresses.


def test_addresses_are_first_fit_and_reused() -> None:
    addresses = FirstFitAddresses()
    taken = [addresses.take(size) for size in (2 * MIB, 20 * MIB, 3 * MIB, 2 * MIB)]
    assert taken == [BASE_ADDRESS + offset * MIB for offset in (0, 2, 22, 26)]
    addresses.give_back(taken[1])
    assert addresses.take(22 * MIB) == BASE_ADDRESS + 28 * MIB
    assert addresses.take(18 * MIB) == taken[1]
    assert addresses.take(2 * MIB) == taken[1] + 18 * MIB
    with pytest.raises(KeyError):
        addresses.give_back(12345)


@given(
    st.lists(
        st.one_of(st.integers(1, 9).map(lambda n: ("take", n * MIB)), st.tuples(st.just("give"), st.integers(0, 9)))
    )
)
def test_addresses_never_overlap_and_are_the_lowest(program: list[tuple[str, int]]) -> None:
    addresses = FirstFitAddresses()
    taken: dict[int, int] = {}
    for action, number in program:
        if action == "take":
            span = -(-number // (2 * MIB)) * 2 * MIB
            candidates = sorted([BASE_ADDRESS, *(start + length for start, length in taken.items())])
            lowest = next(
                place
                for place in candidates
                if all(place + span <= start or start + length <= place for start, length in taken.items())
            )
            assert addresses.take(number) == lowest
            taken[lowest] = span
        elif taken:
            address = sorted(taken)[number % len(taken)]
            del taken[address]
            addresses.give_back(address)


def test_memory_outside_counts() -> None:
    memory = DeviceMemory(100 * MIB, outside=30 * MIB)
    assert memory.free == 70 * MIB
    assert memory.allocate(71 * MIB) is None
    address = memory.allocate(70 * MIB)
    assert address is not None
    memory.outside = 40 * MIB
    assert memory.free == 0
    memory.release(address, 70 * MIB)
    assert (memory.free, memory.reserved) == (60 * MIB, 0)


# States from elsewhere.


def test_a_snapshot_can_be_adopted() -> None:
    run = start_run(auto_complete=False)
    kept = [run.allocator.malloc(size) for size in (1000, 4 * MIB, 5 * MIB, 3 * MIB, 30 * MIB)]
    run.allocator.free(kept[1])
    run.allocator.record_stream(kept[3], 7)
    run.allocator.free(kept[3])
    data = Snapshot(run.allocator.segments(), ()).to_dict()
    copy = make()
    copy.auto_complete = False
    copy.adopt(Snapshot.from_dict(data).segments)
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


# Under any program.


def check_invariants(allocator: CachingAllocator) -> None:
    segments = allocator.segments()
    end = 0
    for segment in segments:
        assert segment.address >= end
        assert segment.address % (2 * MIB) == 0
        end = segment.address + segment.total_size
        place = segment.address
        for block in segment.blocks:
            assert block.address == place
            assert block.size > 0
            assert block.size % 512 == 0
            place += block.size
        assert place == end
        states = [block.state for block in segment.blocks]
        assert ("inactive", "inactive") not in pairwise(states)
    assert allocator.memory.reserved == allocator.reserved == sum(segment.total_size for segment in segments)
    stats = allocator.memory_stats()
    for pool in ("all", "small", "large"):
        here = [segment for segment in segments if pool in ("all", segment.segment_type)]
        name = pool if pool == "all" else f"{pool}_pool"
        blocks = [block for segment in here for block in segment.blocks]
        unused_parts = [
            block.size
            for segment in here
            if len(segment.blocks) > 1 and not segment.is_expandable
            for block in segment.blocks
            if block.state[0] == "i"
        ]
        naive = {
            "allocation": sum(block.state == "active_allocated" for block in blocks),
            "allocated_bytes": sum(segment.allocated_size for segment in here),
            "active": sum(block.state != "inactive" for block in blocks),
            "active_bytes": sum(segment.active_size for segment in here),
            "requested_bytes": sum(segment.requested_size for segment in here),
            "segment": sum(not segment.is_expandable for segment in here),
            "reserved_bytes": sum(segment.total_size for segment in here),
            "inactive_split": len(unused_parts),
            "inactive_split_bytes": sum(unused_parts),
        }
        assert {family: stats[f"{family}.{name}.current"] for family in naive} == naive
        for family in naive:
            key = f"{family}.{name}"
            assert stats[f"{key}.allocated"] - stats[f"{key}.freed"] == stats[f"{key}.current"] <= stats[f"{key}.peak"]


def best_fit(allocator: CachingAllocator, size: int, stream: int, pool_id: tuple[int, int]) -> int | None:
    """Where a request must go among the cached blocks, by looking at all of them (without a split limit)."""
    rounded = round_size(size, allocator.settings)
    fitting = [
        (block.size, block.address)
        for segment in allocator.segments()
        if (segment.stream, segment.segment_type, segment.segment_pool_id) == (stream, pool_of(rounded), pool_id)
        for block in segment.blocks
        if block.state == "inactive" and block.size >= rounded
    ]
    return min(fitting)[1] if fitting else None


@settings(deadline=None, max_examples=150)
@given(steps, settings_choices, st.sampled_from([1.0, 1.0, 0.7]), st.booleans())
def test_any_program_keeps_the_books(
    program: list[tuple[str, int, int]], options: AllocatorSettings, fraction: float, auto_complete: bool
) -> None:
    run = start_run(settings=options, fraction=fraction, auto_complete=auto_complete)
    allocator = run.allocator
    peaks = {"allocated_bytes": 0, "reserved_bytes": 0, "active_bytes": 0, "requested_bytes": 0}
    for step in program:
        run.step(*step)
        check_invariants(allocator)
        stats = allocator.memory_stats()
        peaks = {family: max(peak, stats[f"{family}.all.current"]) for family, peak in peaks.items()}
        assert sorted(run.live) == sorted(
            block.address
            for segment in allocator.segments()
            for block in segment.blocks
            if block.state == "active_allocated"
        )
        if allocator.limit is not None:
            # PyTorch holds the segment's size against the limit, also where whole pages are mapped instead.
            page = options.large_segment_size if options.expandable_segments else 0
            assert allocator.reserved <= allocator.limit + page
    stats = allocator.memory_stats()
    assert {family: stats[f"{family}.all.peak"] for family in peaks} == peaks
    assert (allocator.window_peak_allocated, allocator.window_peak_reserved) == (
        peaks["allocated_bytes"],
        peaks["reserved_bytes"],
    )
    actions = [event.action for event in run.events]
    assert stats["segment.all.allocated"] == actions.count("segment_alloc")
    assert stats["segment.all.freed"] == actions.count("segment_free")
    assert stats["num_device_alloc"] == actions.count("segment_alloc") + actions.count("segment_map")
    assert stats["num_device_free"] == actions.count("segment_free") + actions.count("segment_unmap")
    assert stats["allocation.all.allocated"] == actions.count("alloc")
    assert stats["allocation.all.freed"] == actions.count("free_requested")
    assert stats["active.all.freed"] == actions.count("free_completed")
    assert stats["num_ooms"] == actions.count("oom") == len(run.failures)
    if not any(action == "pool" for action, _, _ in program):
        assert stats["num_alloc_retries"] >= stats["num_ooms"]


@settings(deadline=None, max_examples=150)
@given(steps, sizes, streams)
def test_any_request_gets_the_best_fit_or_new_memory(
    program: list[tuple[str, int, int]], size: int, stream: int
) -> None:
    run = start_run()
    allocator = run.allocator
    for step in program:
        run.step(*step)
    allocator.complete_pending()
    expected = best_fit(allocator, size, stream, run.pool_id)
    del run.events[:]
    failed = len(run.failures)
    run.step("malloc", size, stream)
    actions = [event.action for event in run.events]
    if expected is not None:
        assert run.live[-1] == expected
        assert actions == ["alloc"]
    elif len(run.failures) > failed:
        # Everything that could be given back was, and still there was no room. Not while a private pool is filled, though.
        assert actions[-1] == "oom"
        assert allocator.memory.free < segment_size(round_size(size))
        assert run.pool_id != (0, 0) or all(
            any(block.state != "inactive" for block in segment.blocks)
            for segment in allocator.segments()
            if segment.segment_pool_id == (0, 0)
        )
    else:
        assert actions[-2:] == ["segment_alloc", "alloc"]
        assert set(actions[:-2]) <= {"segment_free"}
        assert run.events[-2].size == segment_size(round_size(size))
    check_invariants(allocator)


@settings(deadline=None, max_examples=60)
@given(steps, settings_choices)
def test_after_freeing_everything_nothing_is_left(
    program: list[tuple[str, int, int]], options: AllocatorSettings
) -> None:
    run = start_run(settings=options)
    for step in program:
        run.step(*step)
    for address in run.live:
        run.allocator.free(address)
    run.leave_pools()
    run.allocator.empty_cache()
    assert run.allocator.segments() == ()
    stats = run.allocator.memory_stats()
    assert {value for key, value in stats.items() if key.endswith(".current")} == {0}
    assert run.allocator.memory.reserved == 0
