"""Out of memory, the verdict: held against what the allocator really does with other settings, for more iterations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from allocator_programs import settings_choices, start_run, steps
from allocator_training import BATCH, OUTSIDE, TOTAL, WEIGHT, Training, train
from hypothesis import given, settings

from gpumem_magic.allocator.program import ALLOC, Program, RepeatedPart
from gpumem_magic.allocator.repetition import growth_of, last_iteration
from gpumem_magic.allocator.settings import parse
from gpumem_magic.allocator.verdict import (
    CAPACITY,
    FRAGMENTATION,
    LIMIT,
    OTHER_PROCESS,
    Facts,
    FailedRequest,
    is_small,
    verdict_of,
)
from gpumem_magic.allocator.what_if import Capacity, what_if
from gpumem_magic.snapshot.model import TraceEvent
from gpumem_magic.snapshot.rules import DEFAULT_SETTINGS, AllocatorSettings, segment_size
from gpumem_magic.snapshot.timeline import Allocation, Timeline
from gpumem_magic.units import GIB, MIB

ROUNDS = 4


def number(life: Allocation) -> str:
    return str(life.index)


def verdict(
    run: Training, options: AllocatorSettings = DEFAULT_SETTINGS, rounds: int = ROUNDS, **more: Any
) -> FailedRequest:
    found = verdict_of((), run.events, Timeline((), run.events, options), options, number, rounds=rounds, **more)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def failed() -> Training:
    return train(2)


def test_the_second_step_fails_as_it_did_on_the_real_device(failed: Training) -> None:
    """The published figures: 2.32 GiB wanted, 11.91 GiB allocated, 182.75 MiB free, 14.26 GiB reserved."""
    assert failed.begun == 2
    found = verdict(failed)
    assert failed.failure is not None
    timeline, event = Timeline((), failed.events), len(failed.events) - 1
    allocated, reserved = timeline.allocated_at(event), timeline.reserved_at(event)
    assert failed.events[event].size == failed.failure.rounded
    assert found.free == failed.failure.free
    assert timeline.largest_free_at(event, failed.events[event].stream) == failed.failure.largest_free
    assert (allocated, reserved) == (failed.failure.allocated, failed.failure.reserved)
    assert found.cached == reserved - allocated
    assert found.spare == TOTAL - OUTSIDE - allocated - WEIGHT
    assert abs(found.free - 182.75 * MIB) < 32 * MIB
    assert abs(reserved - 14.26 * GIB) < 0.01 * 14.26 * GIB
    assert found.cause == FRAGMENTATION


def test_the_place_and_what_splits_it(failed: Training) -> None:
    found, lives = verdict(failed), Timeline((), failed.events).allocations
    assert found.more_pieces == 0
    (piece,) = found.pieces
    blocker, left_by = lives[int(piece.what)], lives[int(found.left_by)]
    # The output of the second iteration lies where the first step had a temporary.
    assert blocker.size == piece.bytes
    assert blocker.requested == BATCH
    assert left_by.address <= blocker.address < left_by.address + left_by.size
    assert found.place is not None
    assert found.place >= WEIGHT
    assert left_by.size >= WEIGHT
    assert left_by.completed is not None
    assert left_by.completed < blocker.born


@pytest.mark.parametrize("stacks", [False, True])
def test_settings_do_in_truth_what_the_replay_says(stacks: bool) -> None:
    found = verdict(train(2, stacks=stacks))
    assert (found.tried, found.rounds) == (True, ROUNDS)
    outcomes = {}
    for trial in found.trials:
        truth = train(2 + ROUNDS, parse(trial.conf))
        outcomes[trial.conf] = trial.passes, trial.rounds
        if truth.failure is None:
            assert (trial.passes, trial.rounds) == (True, ROUNDS), trial
            assert trial.peak_reserved == pytest.approx(truth.allocator.peak_reserved, rel=0.01)
        else:
            assert trial.passes is (truth.begun > 2), trial
            assert trial.rounds == max(truth.begun - 2, 0), trial
    assert outcomes["expandable_segments:True"] == (True, ROUNDS)
    assert outcomes["max_split_size_mb:512"] == (True, 1)
    assert outcomes["garbage_collection_threshold:0.8"] == (False, 0)


def test_a_leak_grows_in_the_repetitions_too() -> None:
    """Settings that mend the fragmentation only put off what is kept for ever."""
    leaking = train(2, leak=40 * MIB)
    assert leaking.begun == 2
    found = verdict(leaking, rounds=8)
    trial = next(trial for trial in found.trials if trial.conf == "expandable_segments:True")
    truth = train(2 + 8, parse(trial.conf), leak=40 * MIB)
    assert truth.failure is not None
    assert (trial.passes, trial.rounds) == (truth.begun > 2, truth.begun - 2)
    assert 0 < trial.rounds < 8
    assert found.cause == CAPACITY


def test_a_loop_that_keeps_more_of_another_size_each_time_fills_the_device() -> None:
    """Perfect packing would do for three more of fifty iterations: that is no matter of packing, whatever some setting passes."""
    events: list[TraceEvent] = []
    sizes = [10 * MIB + turn * 17 % 53 * 1024 for turn in range(50)]
    kept = 0
    for size in sizes:
        for place in ((1 + number, (20 + number) * MIB) for number in range(10)):
            events += [TraceEvent(action, *place) for action in ("alloc", "free_requested", "free_completed")]
        events.append(TraceEvent("alloc", (1 << 40) + kept, size))
        kept += size
    events.append(TraceEvent("oom", 0, 20 * MIB))
    events.insert(0, TraceEvent("segment_alloc", 1 << 40, kept + 56 * MIB))
    found = verdict_of((), events, Timeline((), events), DEFAULT_SETTINGS, number)
    assert found is not None
    assert (found.spare, found.cause, found.lasts) == (36 * MIB, CAPACITY, 3)
    program = Program((), events, (), len(events))
    part = last_iteration(program, events)
    assert part is not None
    assert growth_of(program, part) == min(sizes[44:49])


def test_too_little_memory_is_a_matter_of_capacity(failed: Training) -> None:
    small = train(1, available=8 * GIB)
    found = verdict(small)
    assert found.cause == CAPACITY
    assert found.spare is not None
    assert found.spare < 0
    assert (found.tried, found.trials, found.place) == (True, (), None)
    held = verdict(small, facts=Facts(TOTAL, other_processes=-found.spare))
    assert held.cause == OTHER_PROCESS
    assert verdict(small, facts=Facts(TOTAL, other_processes=-found.spare - 1)).cause == CAPACITY


def test_a_limit_of_the_programs_own() -> None:
    run = train(1, AllocatorSettings(memory_fraction=0.4))
    found = verdict(run)
    assert found.cause == LIMIT
    assert found.free is not None
    assert found.free >= segment_size(run.events[-1].size, DEFAULT_SETTINGS)
    known = verdict(run, AllocatorSettings(memory_fraction=0.4), facts=Facts(TOTAL))
    assert (known.cause, known.limit) == (LIMIT, int(0.4 * TOTAL))
    assert not found.tried


def test_expandable_segments_need_whole_pages() -> None:
    """The driver had as much as was asked for, but not in pages of 20 MiB: that is no limit of the program's own."""
    size, free = 30 * MIB, 35 * MIB
    events = [TraceEvent("oom", free, size)]
    for options, cause in ((AllocatorSettings(expandable_segments=True), FRAGMENTATION), (DEFAULT_SETTINGS, LIMIT)):
        found = verdict_of((), events, Timeline((), events, options), options, number)
        assert found is not None
        assert (found.cause, found.spare) == (cause, free - size)


def test_nothing_failed() -> None:
    run = train(1)
    assert verdict_of((), run.events, Timeline((), run.events), DEFAULT_SETTINGS, number) is None
    events = [TraceEvent("alloc", 1, 512)]
    assert verdict_of((), events, Timeline((), events), DEFAULT_SETTINGS, number, event=0) is None


def test_what_takes_too_long_is_left_out(failed: Training) -> None:
    assert not verdict(failed, most_steps=1000).tried
    assert verdict(failed, most_steps=1000_000).tried
    assert not verdict(failed, can_replay=False).tried


def test_no_iteration_before() -> None:
    """In the first iteration nothing can be repeated, but the request itself is tried."""
    run = train(1, available=14 * GIB - 200 * MIB)
    if run.failure is None:
        pytest.fail("the first step was to fail")
    found = verdict(run)
    assert found.rounds == 0
    assert all(trial.rounds == 0 for trial in found.trials)


# The parts


def program_of(run: Training) -> Program:
    return Program((), run.events, (), len(run.events))


def test_the_last_iteration_begins_at_the_same_request(failed: Training) -> None:
    with_stacks = train(2, stacks=True)
    for run in (failed, with_stacks):
        found = last_iteration(program_of(run), run.events)
        assert found is not None
        # Adam's second temporary of the big weight, in the first step; in the second it was not to be had.
        assert with_stacks.events[found.first].frames[0].line == 14
        assert run.events[found.first].size == WEIGHT
        assert found.stop == len(run.events) - 1


def test_the_last_iteration_of_many() -> None:
    """Where a leak ends it late, an iteration is one iteration, not two."""
    run = train(40, parse("expandable_segments:True"), leak=60 * MIB, stacks=True)
    assert run.failure is not None
    assert run.begun > 3
    program = program_of(run)
    found = last_iteration(program, run.events)
    assert found is not None
    starts = [index for index, event in enumerate(run.events) if event.action == "alloc" and event.frames[0].line == 2]
    assert sum(found.first < start for start in starts) == 1
    # What leaks is made again and kept in every round; nothing else is.
    kept = [run.events[block].size for block in found.once]
    assert kept == []
    assert growth_of(program, found) == 60 * MIB


def test_only_earlier_runs_of_the_statement_count(failed: Training) -> None:
    program = program_of(failed)
    assert last_iteration(program, failed.events, among=[range(5)]) is None
    found = last_iteration(program, failed.events)
    assert found is not None
    assert last_iteration(program, failed.events, among=[range(found.first, found.first + 1)]) == found


def test_a_program_runs_again_as_recorded() -> None:
    run = train(3, available=TOTAL)
    program = Program((), run.events)
    outcome = what_if(program, DEFAULT_SETTINGS, Capacity(TOTAL, TOTAL))
    assert outcome.failed == ()
    assert outcome.peak_reserved == run.allocator.peak_reserved
    assert outcome.peak_allocated == run.allocator.peak_allocated


def test_a_stretch_without_relations_makes_its_blocks_anew() -> None:
    run = train(1, available=TOTAL)
    program = Program((), run.events)
    first = next(step for step in program.steps if step.action == ALLOC)
    again = list(program.run(RepeatedPart(0, len(run.events)), 2))
    assert len(again) == 3 * len(program.steps)
    blocks = [step.block for step in again if step.action == ALLOC]
    assert len(blocks) == len(set(blocks))
    assert [step.block for step in again if step.action == ALLOC and step.event == first.event] == [
        first.block + turn * len(run.events) for turn in range(3)
    ]
    with pytest.raises(ValueError, match="not within"):
        list(program.run(RepeatedPart(0, len(run.events) + 1), 1))


def test_an_emptied_cache_is_emptied_again() -> None:
    events = [
        TraceEvent("segment_alloc", 1 << 30, 20 * MIB),
        TraceEvent("alloc", 1 << 30, 5 * MIB),
        TraceEvent("free_requested", 1 << 30, 5 * MIB),
        TraceEvent("free_completed", 1 << 30, 5 * MIB),
        TraceEvent("segment_free", 1 << 30, 20 * MIB),
        TraceEvent("segment_alloc", 1 << 30, 2 * MIB),
        TraceEvent("alloc", 1 << 30, 100),
    ]
    # A request was behind the release: it decides for itself whether it needs that.
    assert what_if(Program((), events), DEFAULT_SETTINGS).peak_reserved == 22 * MIB
    emptied = [*events[:5], TraceEvent("snapshot", 0, 0), *events[5:]]
    assert what_if(Program((), emptied), DEFAULT_SETTINGS).peak_reserved == 20 * MIB


def test_a_fraction_without_a_total_is_left_out() -> None:
    run = train(1, available=TOTAL)
    tight = replace(DEFAULT_SETTINGS, memory_fraction=0.1)
    assert what_if(Program((), run.events), tight, Capacity(TOTAL)).failed == ()
    assert what_if(Program((), run.events), tight, Capacity(TOTAL, TOTAL)).failed != ()


_BUT_FOR = {"record", "pool", "release_pool", "empty_cache", "complete_pending"}


@settings(deadline=None, max_examples=100)
@given(steps, settings_choices)
def test_any_program_runs_again_as_recorded(program: list[tuple[str, int, int]], options: AllocatorSettings) -> None:
    """The same settings do the same again: peaks, retries, and the requests that failed."""
    run = start_run(settings=options)
    for step in program:
        if step[0] not in _BUT_FOR:
            run.step(*step)
    outcome = what_if(Program((), run.events), options, Capacity(80 * MIB, 80 * MIB))
    assert outcome.failed == ()
    assert outcome.peak_reserved == run.allocator.peak_reserved
    assert outcome.retries == run.allocator.num_alloc_retries
    assert (outcome.recorded_failures, outcome.passed) == (len(run.failures), 0)
    assert outcome.peak_allocated == run.allocator.peak_allocated


@settings(deadline=None, max_examples=60)
@given(steps, settings_choices)
def test_any_failed_request_has_a_verdict(program: list[tuple[str, int, int]], options: AllocatorSettings) -> None:
    run = start_run(settings=options)
    for step in program:
        run.step(*step)
    timeline = Timeline((), run.events, options)
    failures = [index for index, event in enumerate(run.events) if event.action == "oom"]
    assert len(failures) == len(run.failures)
    for index, failure in zip(failures, run.failures, strict=True):
        found = verdict_of((), run.events, timeline, options, number, event=index, facts=Facts(80 * MIB), rounds=1)
        assert found is not None
        rounded = run.events[index].size
        assert (found.free, timeline.reserved_at(index), rounded) == (failure.free, failure.reserved, failure.rounded)
        assert found.spare is not None
        assert found.cause in (CAPACITY, FRAGMENTATION, LIMIT)
        full = found.spare < 0 or found.lasts is not None or (is_small(found.spare, 80 * MIB) and not found.lasting)
        assert full is (found.cause == CAPACITY) or found.cause == LIMIT
        if found.place is not None:
            assert found.place >= rounded
            assert sum(piece.bytes for piece in found.pieces) < rounded
