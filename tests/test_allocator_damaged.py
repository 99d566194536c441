"""Damaged and made-up traces: every one is replayed, or refused with a ValueError; nothing else ever happens."""

from __future__ import annotations

from contextlib import suppress
from functools import cache

import pytest
from allocator_training import train
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumem_magic.allocator.program import Program
from gpumem_magic.allocator.replay import replay
from gpumem_magic.allocator.seed import seed_of
from gpumem_magic.allocator.settings import parse
from gpumem_magic.allocator.verdict import verdict_of
from gpumem_magic.allocator.what_if import Capacity, what_if
from gpumem_magic.snapshot.model import Segment, TraceEvent
from gpumem_magic.snapshot.timeline import Timeline
from gpumem_magic.units import GIB

CONFS = ("", "expandable_segments:True", "max_split_size_mb:128")
ACTIONS = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "snapshot",
    "oom",
)
SIZES = (0, 1, 512, 1 << 20, 1 << 25, 1 << 61)

# What is done to an event, at a share of the trace's length, with a number that chooses among what there is.
damage = st.tuples(
    st.sampled_from(["drop", "double", "action", "size", "address", "cut", "stream"]),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 1 << 16),
)


@cache
def recording(conf: str) -> tuple[tuple[Segment, ...], tuple[TraceEvent, ...]]:
    run = train(2, parse(conf))
    return run.allocator.segments(), tuple(run.events)


def damaged(events: list[TraceEvent], kind: str, share: float, number: int) -> list[TraceEvent]:
    place = int(share * len(events))
    event, other = events[place], events[number % len(events)]
    if kind == "drop":
        return [*events[:place], *events[place + 1 :]] or events
    if kind == "double":
        return [*events[:place], other, *events[place:]]
    if kind == "cut":
        return events[place:]
    changed = {
        "action": event._replace(action=ACTIONS[number % len(ACTIONS)]),
        "size": event._replace(size=SIZES[number % len(SIZES)]),
        "address": event._replace(address=(0, 1 << 63, event.address + 512, other.address)[number % 4]),
        "stream": event._replace(stream=7, pool_id=(None, (0, 0), (0, 3))[number % 3]),
    }[kind]
    return [*events[:place], changed, *events[place + 1 :]]


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(CONFS), st.lists(damage, min_size=1, max_size=4), st.integers(0, 40))
def test_a_damaged_recording_is_replayed_or_refused(
    conf: str, damages: list[tuple[str, float, int]], without: int
) -> None:
    final, whole = recording(conf)
    options = parse(conf)
    events = list(whole)
    for kind, share, number in damages:
        events = damaged(events, kind, share, number)
    # Sometimes one of the segments at the end is not there.
    final = tuple(segment for number, segment in enumerate(final) if number != without)
    with suppress(ValueError):
        seed = seed_of(final, events, options)
        timeline = Timeline(seed.start, events, options)
        assert timeline.allocated_at(0) == sum(
            block.size for segment in seed.start for block in segment.blocks if block.state == "active_allocated"
        )
        verdict = verdict_of(
            seed.start, events, timeline, options, str, final=final, rounds=1, can_replay=seed.reason is None
        )
        assert (verdict is not None) is any(event.action == "oom" for event in events)
        if seed.reason is None:
            result = replay(seed.start, events, options, final=final)
            assert 0 <= result.placed <= result.allocations
            what_if(Program(seed.start, events, final), parse(CONFS[1]), Capacity(16 * GIB))


@pytest.mark.parametrize("conf", CONFS)
def test_undamaged_it_agrees(conf: str) -> None:
    final, events = recording(conf)
    seed = seed_of(final, events, parse(conf))
    assert seed.reason is None
    assert replay(seed.start, events, parse(conf), final=final).agrees


def test_memory_in_one_place_twice_is_a_difference() -> None:
    events = [TraceEvent("segment_alloc", 1 << 30, 2 << 20), TraceEvent("segment_alloc", 1 << 30, 2 << 20)]
    result = replay((), events)
    assert (result.unmatched, result.misjudged) == (1, [1])
    assert Timeline((), events).reserved_at(2) == 2 << 20


def test_a_request_that_nobody_serves_is_refused() -> None:
    with pytest.raises(ValueError, match="can't have been served"):
        replay((), [TraceEvent("alloc", 1 << 30, 1 << 61)])
