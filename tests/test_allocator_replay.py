"""Recordings of real GPUs, replayed: every block must land where PyTorch put it.

The recordings lie beside the project, not in it; without them these tests are skipped.
"""

from __future__ import annotations

import gzip
import io
import pickle
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import pytest
from allocator_programs import settings_choices, shape, start_run, steps
from hypothesis import given, settings

from gpumem_magic.allocator.replay import replay
from gpumem_magic.allocator.settings import settings_from_dict
from gpumem_magic.snapshot.model import Segment, Snapshot, TraceEvent
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
    return Snapshot.from_dict(data)


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


def test_events_about_unknown_memory_are_counted() -> None:
    result = replay((), [TraceEvent("free_requested", 1, 2), TraceEvent("segment_free", 3, 4)])
    assert result.unmatched == 2
    assert result.allocations == 0
