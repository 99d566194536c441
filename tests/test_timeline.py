"""The timeline's recount, held against the allocator that made the trace, and on traces that are not whole."""

from __future__ import annotations

import pytest
from allocator_programs import Run, settings_choices, shape, start_run, steps
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumem_magic.snapshot.model import Block, Segment, TraceEvent, with_free_space
from gpumem_magic.snapshot.rangemax import RangeMax
from gpumem_magic.snapshot.rules import AllocatorSettings
from gpumem_magic.snapshot.start import start_of
from gpumem_magic.snapshot.timeline import Allocation, Timeline
from gpumem_magic.units import MIB

BASE = 0x7F0000000000


def events_of(*lines: tuple[str, int, int]) -> list[TraceEvent]:
    """(action, address above the base, size)"""
    return [TraceEvent(action, BASE + address, size) for action, address, size in lines]


WHOLE = events_of(
    ("segment_alloc", 0, 20 * MIB),
    ("alloc", 0, 4 * MIB - 100),
    ("alloc", 4 * MIB, 15 * MIB),  # 1 MiB is left: not split off
    ("free_requested", 0, 4 * MIB - 100),
    ("free_completed", 0, 4 * MIB - 100),
    ("alloc", 0, 3 * MIB),  # 1 MiB is left here too
    ("free_requested", 4 * MIB, 15 * MIB),
    ("oom", 12345, 60 * MIB),
    ("free_completed", 4 * MIB, 15 * MIB),
)


def test_a_trace_by_hand() -> None:
    timeline = Timeline((), WHOLE)
    assert len(timeline) == 9
    assert timeline.unmatched == timeline.unplaced == 0
    assert timeline.allocations == [
        Allocation(0, BASE, 4 * MIB - 100, 4 * MIB, 0, 1, 3, 4),
        Allocation(1, BASE + 4 * MIB, 15 * MIB, 16 * MIB, 0, 2, 6, 8),
        Allocation(2, BASE, 3 * MIB, 4 * MIB, 0, 5, None, None),
    ]
    assert [timeline.allocated_at(position) // MIB for position in range(10)] == [0, 0, 4, 20, 16, 16, 20, 4, 4, 4]
    assert [timeline.reserved_at(position) // MIB for position in range(10)] == [0] + [20] * 9
    assert timeline.requested_at(3) == 19 * MIB - 100
    assert timeline.requested_at(7) == 3 * MIB
    assert timeline.peak(0, 9) == (20 * MIB, 3)
    assert timeline.peak(4, 9) == (20 * MIB, 6)
    assert timeline.peak(4, 4) == (16 * MIB, 4)
    assert timeline.peak_reserved(0, 9) == (20 * MIB, 1)
    assert [life.index for life in timeline.live_at(6)] == [1, 2]
    assert [life.index for life in timeline.live_at(7)] == [2]


def test_segments_at_a_position() -> None:
    timeline = Timeline((), WHOLE)
    assert timeline.segments_at(0) == ()
    (segment,) = timeline.segments_at(1)
    assert (segment.address, segment.total_size, segment.segment_type) == (BASE, 20 * MIB, "large")
    assert segment.blocks == (Block(BASE, 20 * MIB, 0, "inactive"),)
    states = [[(block.size // MIB, block.state) for block in timeline.segments_at(p)[0].blocks] for p in (4, 5, 7, 9)]
    assert states == [
        [(4, "active_pending_free"), (16, "active_allocated")],
        [(4, "inactive"), (16, "active_allocated")],
        [(4, "active_allocated"), (16, "active_pending_free")],
        [(4, "active_allocated"), (16, "inactive")],
    ]
    assert [timeline.largest_free_at(p) // MIB for p in range(10)] == [0, 20, 16, 0, 0, 4, 0, 0, 0, 16]
    assert timeline.largest_free_at(1, stream=0) == 20 * MIB
    assert timeline.largest_free_at(1, stream=7) == 0


def test_positions_are_checked() -> None:
    timeline = Timeline((), WHOLE)
    for wrong in (-1, 10):
        with pytest.raises(IndexError, match=r"not within 0\.\.9"):
            timeline.allocated_at(wrong)
        with pytest.raises(IndexError):
            timeline.live_at(wrong)
        with pytest.raises(IndexError):
            timeline.peak(0, wrong)
    with pytest.raises(ValueError, match="no range"):
        timeline.peak(5, 4)


def test_an_empty_trace() -> None:
    timeline = Timeline((), ())
    assert len(timeline) == 0
    assert timeline.peak(0, 0) == timeline.peak_reserved(0, 0) == (0, 0)
    assert timeline.live_at(0) == []


def test_blocks_that_were_there() -> None:
    start = Segment(
        0,
        BASE,
        20 * MIB,
        3,
        "large",
        (
            Block(BASE, 6 * MIB, 5 * MIB, "active_allocated"),
            Block(BASE + 6 * MIB, 4 * MIB, 4 * MIB, "active_pending_free"),
            Block(BASE + 10 * MIB, 10 * MIB, 77, "inactive"),
        ),
    )
    timeline = Timeline([start], events_of(("free_requested", 0, 5 * MIB), ("free_completed", 6 * MIB, 4 * MIB)))
    assert timeline.allocations == [
        Allocation(0, BASE, 5 * MIB, 6 * MIB, 3, -1, 0, None),
        Allocation(1, BASE + 6 * MIB, 4 * MIB, 4 * MIB, 3, -1, -1, 1),
    ]
    assert [timeline.allocated_at(p) // MIB for p in range(3)] == [6, 0, 0]
    assert [timeline.requested_at(p) // MIB for p in range(3)] == [5, 0, 0]
    assert [life.index for life in timeline.live_at(0)] == [0]
    assert [block.size // MIB for block in timeline.segments_at(2)[0].blocks] == [6, 14]
    assert timeline.unmatched == 0


def test_what_lies_in_no_segment_is_reserved_while_it_is_there() -> None:
    """A trace without its segments' events; and one block that reaches out of its segment, over a gap, into the next."""
    timeline = Timeline(
        (), events_of(("alloc", 0, 3 * MIB), ("free_requested", 0, 3 * MIB), ("free_completed", 0, 3 * MIB))
    )
    assert [timeline.reserved_at(p) // MIB for p in range(4)] == [0, 3, 3, 0]
    assert (timeline.outside, timeline.unplaced) == (1, 1)
    start = [
        Segment(0, BASE + place * MIB, 2 * MIB, 0, "large", (Block(BASE + place * MIB, 2 * MIB, 2 * MIB, "inactive"),))
        for place in (0, 4)
    ]
    timeline = Timeline(start, events_of(("alloc", MIB, 4 * MIB), ("segment_alloc", 2 * MIB, 2 * MIB)))
    assert [timeline.allocated_at(p) // MIB for p in range(3)] == [0, 4, 4]
    assert [timeline.reserved_at(p) // MIB for p in range(3)] == [4, 6, 6]
    assert [sum(one.total_size for one in timeline.segments_at(p)) // MIB for p in range(3)] == [4, 6, 6]
    assert timeline.outside == 1


def test_a_trace_from_the_middle() -> None:
    timeline = Timeline(
        (),
        events_of(
            ("free_completed", 0, 1000),  # its free_requested came before the trace
            ("free_requested", 2048, 500),
            ("free_completed", 2048, 500),
            ("alloc", 0, 2000),
            ("segment_free", 2 * MIB, 2 * MIB),
            ("free_requested", 0, 2000),
            ("free_completed", 0, 2000),
        ),
    )
    assert timeline.unmatched == 3
    assert timeline.unplaced == 1
    assert [timeline.allocated_at(p) for p in range(8)] == [0, 0, 0, 0, 2048, 2048, 0, 0]
    assert timeline.reserved_at(7) == 0


def test_a_missing_free_ends_when_the_memory_is_used_again() -> None:
    timeline = Timeline(
        (),
        events_of(
            ("segment_alloc", 0, 2 * MIB),
            ("alloc", 0, 1000),
            ("alloc", 1024, 1000),
            ("alloc", 512, 2000),
            ("snapshot", 0, 0),
        ),
    )
    assert timeline.unmatched == 2
    assert timeline.allocated_at(5) == 2048
    assert [life.completed for life in timeline.allocations] == [3, 3, None]


def test_a_trace_without_free_requested() -> None:
    timeline = Timeline((), events_of(("segment_alloc", 0, 2 * MIB), ("alloc", 0, 1000), ("free_completed", 0, 1000)))
    assert timeline.allocations[0].freed == timeline.allocations[0].completed == 2
    assert timeline.allocated_at(3) == 0
    assert timeline.unmatched == 0


def test_a_segment_that_goes_with_blocks_in_it() -> None:
    timeline = Timeline((), events_of(("segment_alloc", 0, 2 * MIB), ("alloc", 0, 1000), ("segment_free", 0, 2 * MIB)))
    assert timeline.unmatched == 1
    assert (timeline.allocated_at(3), timeline.reserved_at(3)) == (0, 0)


def test_segments_that_touch_stay_apart() -> None:
    timeline = Timeline(
        (),
        events_of(
            ("segment_alloc", 0, 20 * MIB), ("segment_alloc", 20 * MIB, 20 * MIB), ("alloc", 16 * MIB, 3 * MIB + 512)
        ),
    )
    # Less than 1 MiB is left up to the end of the first segment; the second one is not a part of it.
    assert timeline.allocations[0].size == 4 * MIB
    assert len(timeline.segments_at(3)) == 2


def test_expandable_segments_grow_and_shrink() -> None:
    timeline = Timeline(
        (),
        events_of(
            ("segment_map", 0, 20 * MIB),
            ("segment_map", 20 * MIB, 20 * MIB),
            ("alloc", 0, 30 * MIB),
            ("alloc", 30 * MIB, 9 * MIB + 512),
            ("free_requested", 0, 30 * MIB),
            ("free_completed", 0, 30 * MIB),
            ("segment_unmap", 0, 20 * MIB),
        ),
    )
    assert [timeline.reserved_at(p) // MIB for p in range(8)] == [0, 20, 40, 40, 40, 40, 40, 20]
    # Expandable segments split anything off, in the large pool too.
    assert timeline.allocations[1].size == 9 * MIB + 512
    (before,) = timeline.segments_at(6)
    assert (before.address, before.total_size, before.is_expandable) == (BASE, 40 * MIB, True)
    assert [block.size for block in before.blocks] == [30 * MIB, 9 * MIB + 512, MIB - 512]
    (after,) = timeline.segments_at(7)
    assert (after.address, after.total_size) == (BASE + 20 * MIB, 20 * MIB)
    assert timeline.unmatched == timeline.unplaced == 0


@given(st.lists(st.integers(0, 20), min_size=1, max_size=2000), st.data())
def test_range_maxima(values: list[int], data: st.DataObject) -> None:
    table = RangeMax(values)
    begin = data.draw(st.integers(0, len(values) - 1))
    end = data.draw(st.integers(begin, len(values) - 1))
    best = max(values[begin : end + 1])
    assert table.highest(begin, end) == (best, values.index(best, begin))


# Against the allocator.


def played(
    program: list[tuple[str, int, int]], options: AllocatorSettings, auto_complete: bool
) -> tuple[Run, list[object]]:
    """A run, and after each step (events so far, allocated, reserved, segments)."""
    run = start_run(settings=options, auto_complete=auto_complete)
    states: list[object] = []
    for step in program:
        run.step(*step)
        allocator = run.allocator
        states.append((len(run.events), allocator.allocated, allocator.reserved, shape(allocator.segments())))
    return run, states


def recounted(timeline: Timeline, position: int) -> tuple[int, int, int, list[object]]:
    return (
        position,
        timeline.allocated_at(position),
        timeline.reserved_at(position),
        shape(timeline.segments_at(position)),
    )


@settings(deadline=None, max_examples=150)
@given(steps, settings_choices, st.booleans())
def test_the_recount_agrees_with_the_allocator(
    program: list[tuple[str, int, int]], options: AllocatorSettings, auto_complete: bool
) -> None:
    run, states = played(program, options, auto_complete)
    timeline = Timeline((), run.events, options)
    assert timeline.unmatched == timeline.unplaced == 0
    for state in states:
        assert state == recounted(timeline, state[0])  # type: ignore[index]
    end = len(run.events)
    assert timeline.peak(0, end)[0] == run.allocator.peak_allocated
    assert timeline.peak_reserved(0, end)[0] == run.allocator.peak_reserved
    for position in range(end + 1):
        live = timeline.live_at(position)
        assert sum(life.size for life in live) == timeline.allocated_at(position)
        assert sum(life.requested for life in live) == timeline.requested_at(position)
        segments = timeline.segments_at(position)
        assert sum(segment.allocated_size for segment in segments) == timeline.allocated_at(position)
        assert sum(segment.total_size for segment in segments) == timeline.reserved_at(position)


@settings(deadline=None, max_examples=80)
@given(steps, steps, settings_choices, st.booleans())
def test_a_log_that_starts_with_a_snapshot(
    before: list[tuple[str, int, int]],
    after: list[tuple[str, int, int]],
    options: AllocatorSettings,
    auto_complete: bool,
) -> None:
    run, _ = played(before, options, auto_complete)
    start = run.allocator.segments()
    first = len(run.events)
    states = [(0, run.allocator.allocated, run.allocator.reserved, shape(start))]
    for step in after:
        run.step(*step)
        allocator = run.allocator
        states.append((len(run.events) - first, allocator.allocated, allocator.reserved, shape(allocator.segments())))
    timeline = Timeline(start, run.events[first:], options)
    assert timeline.unmatched == timeline.unplaced == 0
    for state in states:
        assert state == recounted(timeline, state[0])


@settings(deadline=None, max_examples=80)
@given(steps, st.integers(0, 200), settings_choices)
def test_a_trace_without_its_start_never_counts_below_zero(
    program: list[tuple[str, int, int]], dropped: int, options: AllocatorSettings
) -> None:
    run, _ = played(program, options, True)
    timeline = Timeline((), run.events[dropped:], options)
    for position in range(len(timeline) + 1):
        live = timeline.live_at(position)
        assert sum(life.size for life in live) == timeline.allocated_at(position) >= 0
        assert timeline.reserved_at(position) >= 0


@settings(deadline=None, max_examples=120)
@given(steps, steps)
def test_the_start_of_a_trace_is_found_again(
    before: list[tuple[str, int, int]], after: list[tuple[str, int, int]]
) -> None:
    run, _ = played(before, AllocatorSettings(), False)
    start = run.allocator.segments()
    first = len(run.events)
    for step in after:
        run.step(*step)
    found = start_of(run.allocator.segments(), run.events[first:])
    assert found.orphans == 0
    if found.uncertain == 0:
        assert shape(found.segments) == shape(start)
    else:
        # Sizes may be short by up to 1 MiB; where things lie is right all the same.
        for guess, truth in zip(found.segments, start, strict=True):
            assert (guess.address, guess.total_size) == (truth.address, truth.total_size)
            used = [block for block in truth.blocks if block.state != "inactive"]
            guesses = [block for block in guess.blocks if block.state != "inactive"]
            assert [block.address for block in guesses] == [block.address for block in used]
            assert all(0 <= b.size - a.size <= MIB for a, b in zip(guesses, used, strict=True))


def test_a_block_that_waited_when_the_trace_began() -> None:
    """A trace without any request of a free: whether it leaves them out shows only in what it allocated itself."""
    final = Segment(0, BASE, 20 * MIB, 0, "large", with_free_space(BASE, 20 * MIB, ()))
    end = ("free_completed", 0, 4 * MIB)
    elsewhere = [("alloc", 8 * MIB, 4 * MIB), ("free_completed", 8 * MIB, 4 * MIB)]
    for events, state in (([end], "active_pending_free"), ([end, *elsewhere], "active_allocated")):
        (segment,) = start_of([final], events_of(*events)).segments
        assert [(one.size // MIB, one.state) for one in segment.blocks] == [(4, state), (16, "inactive")]


def test_the_start_of_an_expandable_trace() -> None:
    """Backwards: what was mapped comes off, what was unmapped comes back; ranges that touch are one segment."""
    block = Block(BASE + 20 * MIB, 20 * MIB, 20 * MIB, "active_allocated")
    final = Segment(0, BASE + 20 * MIB, 20 * MIB, 0, "large", (block,), is_expandable=True)
    events = events_of(
        ("free_requested", 0, 12 * MIB),
        ("free_completed", 0, 12 * MIB),
        ("segment_unmap", 0, 20 * MIB),
        ("segment_map", 40 * MIB, 20 * MIB),
        ("segment_unmap", 40 * MIB, 20 * MIB),
        ("segment_unmap", 1 << 40, 4 * MIB),
    )
    found = start_of([final], events)
    assert (found.uncertain, found.orphans) == (0, 0)
    first, second = found.segments
    assert (first.address, first.total_size, first.segment_type, first.is_expandable) == (BASE, 40 * MIB, "large", True)
    assert [(one.size // MIB, one.state[0]) for one in first.blocks] == [(12, "a"), (8, "i"), (20, "a")]
    # Large pages would not add up to 4 MiB.
    assert (second.address, second.total_size, second.segment_type) == (BASE + (1 << 40), 4 * MIB, "small")
    timeline = Timeline(found.segments, events)
    assert timeline.segments_at(len(timeline)) == (final,)


def test_a_leftover_is_found_by_what_comes_behind_it() -> None:
    before = Segment(
        0,
        BASE,
        20 * MIB,
        0,
        "large",
        (Block(BASE, 5 * MIB, 4 * MIB, "active_allocated"), Block(BASE + 5 * MIB, 15 * MIB, 0, "inactive")),
    )
    after = Segment(0, BASE, 20 * MIB, 0, "large", (Block(BASE, 20 * MIB, 0, "inactive"),))
    behind = events_of(
        ("alloc", 5 * MIB, 2 * MIB), ("free_requested", 5 * MIB, 2 * MIB), ("free_completed", 5 * MIB, 2 * MIB)
    )
    gone = events_of(("free_requested", 0, 4 * MIB), ("free_completed", 0, 4 * MIB))
    found = start_of([after], [*behind, *gone])
    assert (shape(found.segments), found.uncertain) == (shape((before,)), 0)
    # Freed before anything shows its end, its size stays a lower bound.
    assert start_of([after], [*gone, *behind]).uncertain == 1


def test_with_many_live_blocks_what_is_kept_grows_with_the_trace_only() -> None:
    run = start_run(total=1 << 40)
    for number in range(9000):
        run.step("malloc", 512 * (number % 700 + 1), 0)
        if number % 4 == 3:
            run.step("free", number * 7919, 0)
    timeline = Timeline((), run.events)
    assert len(timeline.live_at(len(timeline))) == 6750
    assert sum(map(len, timeline._live_at_waypoints[:-1])) <= len(timeline)
    # Counted one by one, at moments on both sides of every kept list and between.
    live: dict[int, int] = {}
    checked = {place + step for place in timeline._waypoints for step in (-1, 0, 1, 300)}
    assert len(checked) > 20
    for position, event in enumerate(run.events, start=1):
        if event.action == "alloc":
            live[event.address] = event.size
        elif event.action == "free_requested":
            del live[event.address]
        if position in checked:
            assert {one.address: one.requested for one in timeline.live_at(position)} == live
