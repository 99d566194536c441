"""What must hold under any program of requests, frees, streams, pools and settings."""

from __future__ import annotations

from itertools import pairwise

from allocator_programs import settings_choices, sizes, start_run, steps, streams
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumem_magic.allocator.caching import CachingAllocator
from gpumem_magic.snapshot.rules import AllocatorSettings, pool_of, round_size, segment_size
from gpumem_magic.units import MIB


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
    assert (allocator.peak_allocated, allocator.peak_reserved) == (peaks["allocated_bytes"], peaks["reserved_bytes"])
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
