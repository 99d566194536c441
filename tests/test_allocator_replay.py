"""Recordings of real GPUs, replayed: every block must land where PyTorch put it.

The recordings lie beside the project, not in it; without them these tests are skipped.
"""

from __future__ import annotations

import gzip
import io
import pickle
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import pytest
from allocator_programs import settings_choices, shape, start_run, step_without_pools, steps
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumem_magic.allocator.replay import figures, replay
from gpumem_magic.allocator.replayable import replayables
from gpumem_magic.allocator.seed import seed_of
from gpumem_magic.allocator.settings import settings_from_dict
from gpumem_magic.allocator.settling import settled
from gpumem_magic.snapshot.files import read, write
from gpumem_magic.snapshot.model import ACTIVE, Block, Segment, Snapshot, TraceEvent
from gpumem_magic.snapshot.plain import snapshot_from_data
from gpumem_magic.snapshot.rules import AllocatorSettings
from gpumem_magic.snapshot.start import start_of
from gpumem_magic.snapshot.timeline import Timeline
from gpumem_magic.units import MIB

RECORDINGS = Path(__file__).parents[1].parent / "shared" / "data" / "snapshots"

FROM_EMPTY = [
    "small-97-events",
    "transformer-forward-b150",
    "transformer-forward-backward-b100",
    "transformer-forward-backward-b200-mixed",
    "federated-zeroth-order",
]
FROM_THE_MIDDLE = [
    "transformer-medium-128-inference",
    "transformer-medium-512-training",
    "transformer-2.7b-train-bf16",
    "transformer-full-step",
    "transformer-xl-forward-expandable",
]


class DataOnly(pickle.Unpickler):
    """Reads numbers, strings and containers; nothing in the file can name code."""

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"the file wants to load {module_name}.{global_name}")


@cache
def recording(name: str) -> Snapshot:
    path = RECORDINGS / f"{name}.pickle.gz"
    if not path.exists():
        pytest.skip(f"needs the recording {path.name}, which lies in shared/data/snapshots beside the project")
    with gzip.open(path, "rb") as file:
        data: dict[str, Any] = DataOnly(file).load()
    return snapshot_from_data(data)


def only_device(snapshot: Snapshot) -> tuple[list[Segment], tuple[TraceEvent, ...]]:
    """The segments, by address, and events of the one device that has a trace."""
    (index,) = (index for index, trace in enumerate(snapshot.device_traces) if trace)
    segments = sorted((segment for segment in snapshot.segments if segment.device == index), key=lambda s: s.address)
    return segments, snapshot.device_traces[index]


def test_the_reader_loads_no_code() -> None:
    with pytest.raises(pickle.UnpicklingError, match="wants to load"):
        DataOnly(io.BytesIO(pickle.dumps(Path("x")))).load()


@pytest.mark.parametrize("name", FROM_EMPTY + FROM_THE_MIDDLE)
def test_every_block_lands_where_it_did(name: str, record_property: pytest.RecordProperty) -> None:
    snapshot = recording(name)
    final, events = only_device(snapshot)
    options = settings_from_dict(snapshot.allocator_settings)
    start = start_of(final, events, options)
    assert (start.segments == ()) is (name in FROM_EMPTY)
    result = replay(start.segments, events, options, final=final)
    record_property("placed", f"{result.placed} of {result.allocations}")
    assert result.allocations == sum(event.action == "alloc" for event in events) > 0
    assert result.misplaced == result.misjudged == []
    assert result.placed == result.allocations
    assert result.decisions == sum(event.action.startswith("segment") for event in events)
    assert result.unmatched == start.orphans == 0
    assert result.agrees
    assert shape(result.allocator.segments()) == shape(tuple(final))


@pytest.mark.parametrize("name", FROM_EMPTY + FROM_THE_MIDDLE)
def test_the_timeline_ends_in_the_recorded_state(name: str) -> None:
    snapshot = recording(name)
    final, events = only_device(snapshot)
    options = settings_from_dict(snapshot.allocator_settings)
    timeline = Timeline(start_of(final, events, options).segments, events, options)
    end = len(timeline)
    assert timeline.unmatched == timeline.unplaced == 0
    assert timeline.allocated_at(end) == sum(segment.allocated_size for segment in final)
    assert timeline.reserved_at(end) == sum(segment.total_size for segment in final)
    assert timeline.requested_at(end) == sum(segment.requested_size for segment in final)
    assert shape(timeline.segments_at(end)) == shape(tuple(final))


@pytest.mark.parametrize("name", ["small-97-events", "transformer-forward-backward-b100"])
def test_a_wrong_rule_is_noticed(name: str) -> None:
    """The comparison can fail: other rules for splitting or rounding do not survive it."""
    final, events = only_device(recording(name))
    for wrong in (AllocatorSettings(max_split_size=20 * MIB), AllocatorSettings(large_segment_size=22 * MIB)):
        result = replay(start_of(final, events).segments, events, wrong)
        assert result.placed < result.allocations
        assert len(result.misplaced) == result.allocations - result.placed


WHY_NOT = {
    "alloc-and-free-completed-only": "do not add up to its size",
    "one-event": "only the state was recorded",
    "segments-only": "there is no trace",
    "torch-2.0-history-format": "only the state was recorded",
}


@pytest.mark.parametrize("path", sorted(RECORDINGS.glob("*.pickle.gz")) or [None], ids=str)
def test_every_recording_is_replayed_or_says_why_not(path: Path | None) -> None:
    """As `gpumem replay` does it: any file that lies there, from the file to the figures."""
    if path is None:
        pytest.skip("needs the recordings, which lie in shared/data/snapshots beside the project")
    found = replayables(read(path))
    assert found
    name = path.name.removesuffix(".pickle.gz")
    for one in found:
        if name in WHY_NOT:
            assert one.seed.reason is not None
            assert WHY_NOT[name] in one.seed.reason
            continue
        assert one.seed.reason is None
        result = replay(one.seed.start, one.events, one.settings, one.device, one.final)
        assert result.agrees
        assert result.placed == result.allocations == sum(event.action == "alloc" for event in one.events) > 0
        of_pools = figures(result, one.events, one.settings)
        assert sum(pool.placed for pool in of_pools) == result.placed
        assert sum(pool.decided for pool in of_pools) == result.decisions


@settings(deadline=None, max_examples=200)
@given(steps, steps, settings_choices)
def test_a_recording_of_ours_from_the_middle(
    before: list[tuple[str, int, int]], after: list[tuple[str, int, int]], options: AllocatorSettings
) -> None:
    """Nothing is known but what a snapshot has: the events, and the segments at the end."""
    run = start_run(settings=options, auto_complete=False)
    for step in before:
        run.step(*step)
    first = len(run.events)
    for step in after:
        run.step(*step)
    final, events = run.allocator.segments(), tuple(run.events[first:])
    seed = seed_of(final, events, options)
    if not any(event.action == "alloc" for event in events):
        assert seed.reason is not None
        return
    assert seed.reason is None
    result = replay(settled(seed, events, options, final=final).start, events, options, final=final)
    assert result.agrees
    assert shape(result.allocator.segments()) == shape(final)


def test_a_size_follows_from_where_a_block_was_not_put() -> None:
    """9.5 MiB went to the second segment: so the block in the first has kept more than the 2.5 MiB that it was asked for."""
    base, other = 1 << 40, 2 << 40
    first = Segment(0, base, 12 * MIB, 0, "large", (Block(base, 12 * MIB, 0, "inactive"),))
    rest = Block(other + 19 * MIB // 2, 21 * MIB // 2, 0, "inactive")
    second = Segment(0, other, 20 * MIB, 0, "large", (Block(other, 19 * MIB // 2, 19 * MIB // 2, ACTIVE), rest))
    events = (
        TraceEvent("alloc", other, 19 * MIB // 2),
        TraceEvent("free_requested", base, 5 * MIB // 2),
        TraceEvent("free_completed", base, 5 * MIB // 2),
    )
    seed = seed_of((first, second), events)
    assert seed.unsettled == {base}
    assert not replay(seed.start, events, final=(first, second)).agrees
    found = settled(seed, events, AllocatorSettings(), final=(first, second))
    assert (found.start[0].blocks[0].size, found.raised) == (5 * MIB // 2 + 512, 1)
    result = replay(found.start, events, final=(first, second))
    assert result.agrees
    assert shape(result.allocator.segments()) == shape((first, second))


def test_no_size_is_raised_beyond_what_a_block_can_keep() -> None:
    """What a block kept is at most 1 MiB, so a recording that placed its blocks by another rule still differs."""
    base, other = 1 << 40, 2 << 40
    first = Segment(0, base, 12 * MIB, 0, "large", (Block(base, 12 * MIB, 0, "inactive"),))
    rest = Block(other + 8 * MIB, 12 * MIB, 0, "inactive")
    second = Segment(0, other, 20 * MIB, 0, "large", (Block(other, 8 * MIB, 8 * MIB, ACTIVE), rest))
    events = (
        TraceEvent("alloc", other, 8 * MIB),
        TraceEvent("free_requested", base, 5 * MIB // 2),
        TraceEvent("free_completed", base, 5 * MIB // 2),
    )
    seed = seed_of((first, second), events)
    found = settled(seed, events, AllocatorSettings(), final=(first, second))
    assert (found, found.raised) == (seed, 0)
    assert replay(found.start, events, final=(first, second)).misplaced == [0]


@settings(deadline=None, max_examples=40)
@given(steps, settings_choices)
def test_saved_and_loaded_it_is_the_same(program: list[tuple[str, int, int]], options: AllocatorSettings) -> None:
    run = start_run(settings=options, auto_complete=False)
    for step in program:
        run.step(*step)
    segments = run.allocator.segments()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "own.pickle"
        write(Snapshot(segments, (tuple(run.events),), run.allocator.settings_dict()), path)
        found = replayables(read(path))
    assert [one.device for one in found] == ([0] if segments or run.events else [])
    for one in found:
        assert one.final == segments
        # What a snapshot's settings do not list stays at its default: these two are in no PyTorch's.
        kept = replace(one.settings, max_non_split_rounding=options.max_non_split_rounding)
        assert replace(kept, large_segment_size=options.large_segment_size) == options
        if one.seed.reason is None and kept == options:
            assert replay(one.seed.start, one.events, one.settings, final=one.final).agrees
            there, here = Timeline(one.seed.start, one.events, one.settings), Timeline((), run.events, options)
            for position in range(len(here) + 1):
                assert there.allocated_at(position) == here.allocated_at(position)
                assert there.reserved_at(position) == here.reserved_at(position)


@settings(deadline=None, max_examples=150)
@given(steps, steps, settings_choices)
def test_an_emulated_trace_replays_to_itself(
    before: list[tuple[str, int, int]], after: list[tuple[str, int, int]], options: AllocatorSettings
) -> None:
    run = start_run(settings=options, auto_complete=False)
    for step in before:
        run.step(*step)
    start, first = run.allocator.segments(), len(run.events)
    for step in after:
        run.step(*step)
    result = replay(start, run.events[first:], options, final=run.allocator.segments())
    assert result.misplaced == result.misjudged == []
    assert result.unmatched == 0
    assert shape(result.allocator.segments()) == shape(run.allocator.segments())
    stats, replayed = run.allocator.memory_stats(), result.allocator.memory_stats()
    assert {key: replayed[key] for key in replayed if key.endswith(".current")} == {
        key: stats[key] for key in stats if key.endswith(".current")
    }


HIDDEN_SEARCHES = {
    "the last free that the flush waits for is the one just before it": [
        *[("malloc", 18 * MIB, 0), ("malloc", 15166221, 0), ("free", 0, 0), ("malloc", 1075868, 0), ("malloc", 1, 7)],
        *[("malloc", 2529510, 0), ("malloc", 7713682, 0), ("malloc", 1139881, 0), ("free", 3, 0), ("free", 1, 0)],
        *[("free", 2, 0), ("free", 1, 0), ("malloc", 10 * MIB - 512, 0), ("free", 0, 0), ("record", 1, 7)],
        *[("free", 1, 0), ("malloc", 2 * MIB - 512, 0)],
    ],
    "the free that hides what would fit completes before the search": [
        *[("malloc", 21 * MIB, 0), ("malloc", 511, 0), ("malloc", 1, 0), ("malloc", 5 * MIB, 0), ("record", 0, 7)],
        *[("free", 0, 0), ("malloc", MIB - 512, 0), ("complete_pending", 0, 0), ("malloc", MIB + 1, 0)],
    ],
}


@pytest.mark.parametrize("program", HIDDEN_SEARCHES.values(), ids=HIDDEN_SEARCHES.keys())
def test_a_request_that_flushed_is_told_from_what_surrounds_it(program: list[tuple[str, int, int]]) -> None:
    """When PyTorch searched is no event; which frees came after the search decides where the request goes."""
    options = AllocatorSettings(expandable_segments=True, max_split_size=20 * MIB)
    run = start_run(settings=options, fraction=0.7, auto_complete=False)
    for step in program:
        run.step(*step)
    assert run.allocator.memory_stats()["num_alloc_retries"] == 1
    result = replay((), run.events, options, final=run.allocator.segments())
    assert result.agrees
    assert shape(result.allocator.segments()) == shape(run.allocator.segments())


@settings(deadline=None, max_examples=150)
@given(st.lists(step_without_pools, min_size=20, max_size=60), st.sampled_from([1.0, 0.7]))
def test_expandable_segments_with_a_split_limit_replay_to_themselves(
    program: list[tuple[str, int, int]], fraction: float
) -> None:
    options = AllocatorSettings(expandable_segments=True, max_split_size=20 * MIB)
    run = start_run(settings=options, fraction=fraction, auto_complete=False)
    for step in program:
        run.step(*step)
    assert replay((), run.events, options, final=run.allocator.segments()).agrees


def test_events_about_unknown_memory_are_counted() -> None:
    result = replay((), [TraceEvent("free_requested", 1, 2), TraceEvent("segment_free", 3, 4)])
    assert result.unmatched == 2
    assert result.allocations == 0
