"""The snapshot's dictionaries: PyTorch's keys out and in, and what older versions wrote."""

from __future__ import annotations

import pytest
from allocator_programs import start_run, steps
from hypothesis import given, settings

from gpumem_magic.snapshot.model import Block, Frame, Segment, Snapshot, TraceEvent
from gpumem_magic.snapshot.plain import events_from_data, snapshot_from_data, snapshot_to_data
from gpumem_magic.snapshot.values import PlainDataError
from gpumem_magic.units import MIB


def sample() -> Snapshot:
    stack = (Frame("cell.py", "train", 3), Frame("??", "c10::alloc", 0))
    blocks = (
        Block(0, 1024, 1000, "active_allocated", stack),
        Block(1024, 512, 100, "active_pending_free"),
        Block(1536, 2 * MIB - 1536, 7, "inactive"),
    )
    return Snapshot(
        (Segment(1, 0, 2 * MIB, 5, "small", blocks, frames=stack),),
        ((), (TraceEvent("alloc", 0, 1000, 5, 99, stack, metadata="step 3"), TraceEvent("oom", 4096, 512, 5, 100))),
        {"max_split_size": -1},
        ({"name": "step", "stage": "START"},),
    )


def test_sums_of_a_segment() -> None:
    (segment,) = sample().segments
    assert (segment.allocated_size, segment.active_size, segment.requested_size) == (1024, 1536, 1100)


def test_there_and_back() -> None:
    assert snapshot_from_data(snapshot_to_data(sample())) == sample()


@settings(deadline=None, max_examples=30)
@given(steps)
def test_there_and_back_for_any_program(program: list[tuple[str, int, int]]) -> None:
    run = start_run()
    for step in program:
        run.step(*step)
    snapshot = Snapshot(run.allocator.segments(), (tuple(run.events),), run.allocator.settings_dict())
    assert snapshot_from_data(snapshot_to_data(snapshot)) == snapshot


def test_keys_are_pytorchs() -> None:
    data = snapshot_to_data(sample())
    assert set(data) == {"segments", "device_traces", "allocator_settings", "external_annotations"}
    segment = data["segments"][0]
    assert set(segment) == {
        *("device", "address", "total_size", "allocated_size", "active_size", "requested_size", "stream"),
        *("segment_type", "segment_pool_id", "is_expandable", "frames", "blocks"),
    }
    assert set(segment["blocks"][0]) == {"address", "size", "requested_size", "state", "frames"}
    assert segment["frames"][0] == {"filename": "cell.py", "name": "train", "line": 3}


def test_events_have_frames_only_where_a_stack_was_taken() -> None:
    first, second = snapshot_to_data(sample())["device_traces"][1]
    assert first["frames"]
    assert first["addr"] == 0
    assert "frames" not in second
    assert second["device_free"] == 4096
    assert "addr" not in second
    assert events_from_data([first, second]) == sample().device_traces[1]


def test_blocks_of_2_0_have_no_addresses() -> None:
    data = snapshot_to_data(sample())
    for block in data["segments"][0]["blocks"]:
        del block["address"]
        del block["frames"]
        del block["requested_size"]
    for key in ("segment_pool_id", "is_expandable", "frames"):
        del data["segments"][0][key]
    (segment,) = snapshot_from_data({"segments": data["segments"]}).segments
    assert [(block.address, block.requested_size) for block in segment.blocks] == [
        (0, 1024),
        (1024, 512),
        (1536, 2 * MIB - 1536),
    ]


def test_both_names_of_a_waiting_block_are_known() -> None:
    data = snapshot_to_data(sample())
    data["segments"][0]["blocks"][1]["state"] = "active_awaiting_free"
    assert snapshot_from_data(data) == sample()


@pytest.mark.parametrize("data", [{}, {"segments": [{}]}, {"segments": 3}, {"segments": [], "device_traces": [[{}]]}])
def test_what_is_not_a_snapshot_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(PlainDataError):
        snapshot_from_data(data)
