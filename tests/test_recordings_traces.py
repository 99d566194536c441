"""The profiler's traces as recordings: `benchmarks/recordings/traces.py`."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gpumem_magic.snapshot.model import TraceEvent
from gpumem_magic.snapshot.pairing import Recorded, pair
from gpumem_magic.snapshot.timeline import Timeline

MIB = 1 << 20


@pytest.fixture(scope="module")
def traces() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "recordings" / "traces.py"
    spec = importlib.util.spec_from_file_location("traces", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def written(folder: Path, events: Sequence[dict[str, Any]]) -> Path:
    made = [{"name": "[memory]", "args": {"Device Type": 1, "Device Id": 0, **one}} for one in events]
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": [{"name": "aten::mm", "args": {}}, *made]}))
    return path


def test_what_was_there_before_counts_at_the_start(traces: ModuleType, tmp_path: Path) -> None:
    path = written(
        tmp_path,
        [
            {"Addr": 1, "Bytes": 1024},
            {"Addr": 7, "Bytes": -4096},
            {"Addr": 1, "Bytes": -1024},
            {"Addr": 1, "Bytes": 512},
            {"Device Type": 0, "Device Id": -1, "Addr": 1, "Bytes": 9},
        ],
    )
    recording, addressed = traces.read(path)
    assert addressed
    assert [event.size for event in recording.events if event.action == "alloc"] == [1024, 512]
    assert recording.growth == (1024, 512 - 4096)


def test_threads_are_told_in_the_order_of_time(traces: ModuleType, tmp_path: Path) -> None:
    """The profiler writes one thread's events after the other's. Here backward's come first: it frees what forward made."""
    backward, forward = {"Addr": 1, "Bytes": -1024}, [{"Addr": 1, "Bytes": 1024}, {"Addr": 2, "Bytes": 512}]
    path = written(tmp_path, [backward, *forward])
    trace = json.loads(path.read_text())
    for event, time in zip(trace["traceEvents"][1:], (30.5, 9.25, 10.75), strict=True):
        event["ts"] = time
    path.write_text(json.dumps(trace))
    recording, _ = traces.read(path)
    assert [event.action for event in recording.events] == ["alloc", "alloc", "free_requested", "free_completed"]
    assert recording.growth == (1536, 512)


def test_without_addresses_the_youngest_of_a_size_is_freed(traces: ModuleType, tmp_path: Path) -> None:
    recording, addressed = traces.read(written(tmp_path, [{"Bytes": one} for one in (512, 1024, 512, -512)]))
    assert not addressed
    freed = [life.freed is not None for life in recording.timeline.allocations]
    assert freed == [False, False, True]


def test_a_trace_of_the_host_alone_has_nothing_to_compare(traces: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no memory events"):
        traces.read(written(tmp_path, [{"Device Type": 0, "Device Id": -1, "Bytes": 4}]))


def test_a_recording_is_told_in_blocks(traces: ModuleType, tmp_path: Path) -> None:
    """Of 20 MiB from the driver 19.5 are asked for: half a MiB is no block of its own, and goes with it."""
    events = [
        TraceEvent("segment_alloc", 0, 20 * MIB),
        TraceEvent("alloc", 0, 39 * MIB // 2),
        TraceEvent("free_requested", 0, 39 * MIB // 2),
        TraceEvent("free_completed", 0, 39 * MIB // 2),
    ]
    virtual = traces.in_blocks(Recorded((), events, Timeline((), events)), True)
    real, _ = traces.read(written(tmp_path, [{"Addr": 5, "Bytes": 20 * MIB}, {"Addr": 5, "Bytes": -20 * MIB}]))
    found = pair(real, virtual)
    assert (found.matched, found.exact, found.freed_alike, found.same_place) == (1.0, 1, 1, None)


def test_a_raw_timeline_is_one_without_addresses(traces: ModuleType, tmp_path: Path) -> None:
    """Rows of `export_memory_timeline`: 1 was there before (a tensor's own bytes), 2 is made, 3 becomes another kind, 4 goes."""
    path = tmp_path / "timeline.json"
    path.write_text(
        json.dumps(
            [
                [-1, 1, 500, 0],
                [1, 2, 1024, 4],
                [2, 3, -1024, 4],
                [2, 3, 1024, 5],
                [3, 2, 2048, 7],
                [4, 4, -1024, 5],
                [5, 4, -512, 0],
            ]
        )
    )
    recording, addressed = traces.read(path)
    assert not addressed
    assert [(event.action, event.size) for event in recording.events if event.action != "free_completed"] == [
        ("alloc", 1024), ("alloc", 2048), ("free_requested", 1024), ("free_requested", 512),
    ]  # fmt: skip
    assert [segment.total_size for segment in recording.start] == [512]
    assert recording.growth == (3072, 1536)


def test_a_timeline_of_sums_tells_what_is_freed_together_as_one(traces: ModuleType, tmp_path: Path) -> None:
    """`export_memory_timeline` into ``.json``: times, and at each how much there is of every category."""
    path = tmp_path / "timeline.json"
    # There are 4 KiB at first; 1 and 2 KiB are made, the 1 KiB becomes another kind, and both go at once.
    sums = [[0, 4096, 0], [0, 4096, 1024], [0, 4096, 3072], [0, 5120, 2048], [0, 4096, 0], [0, 0, 0]]
    path.write_text(json.dumps([list(range(6)), sums]))
    real, addressed = traces.read(path)
    assert not addressed
    lives = sorted((life.size, life.born >= 0, life.freed is not None) for life in real.timeline.allocations)
    assert lives == [(1024, True, True), (2048, True, True), (4096, False, True)]
