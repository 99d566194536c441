"""Snapshot files in all their forms: what is read, what is said about each, what is refused, and what PyTorch's tools open."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import re
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpumem_magic.snapshot import files
from gpumem_magic.snapshot.files import SnapshotFileError, read, write
from gpumem_magic.snapshot.model import Frame, Snapshot, TraceEvent
from gpumem_magic.snapshot.plain import snapshot_from_data, snapshot_to_data
from gpumem_magic.snapshot.redact import redacted

SHARED = Path(__file__).parents[1].parent / "shared" / "data" / "snapshots"
RECORDED = sorted(SHARED.glob("*.pickle*")) if SHARED.is_dir() else []
MIB = 1 << 20
BASE = 0x7F0000000000

USER = {"filename": "/home/anna/secret_project/train.py", "name": "train_secret_model", "line": 12}
ADAM = {"filename": "/opt/env/lib/python3.11/site-packages/torch/optim/adam.py", "name": "_init_group", "line": 180}
NATIVE = {"filename": "??", "name": "at::native::empty_cuda(c10::IntArrayRef)", "line": 0}


def event(action: str, address: int, size: int, **more: Any) -> dict[str, Any]:
    key = "device_free" if action == "oom" else "addr"
    return {"action": action, key: address, "size": size, "stream": 0, "time_us": 1_700_000_000_000_000, **more}


def segment(address: int = BASE, device: int = 0, **more: Any) -> dict[str, Any]:
    """Two MiB with one block of 512 bytes in use."""
    blocks = [
        {"address": address, "size": 512, "requested_size": 400, "state": "active_allocated", "frames": [USER]},
        {"address": address + 512, "size": 2 * MIB - 512, "requested_size": 0, "state": "inactive", "frames": []},
    ]
    return {
        "device": device,
        "address": address,
        "total_size": 2 * MIB,
        "allocated_size": 512,
        "active_size": 512,
        "requested_size": 400,
        "stream": 0,
        "segment_type": "small",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
        **more,
    }


def snapshot_data() -> dict[str, Any]:
    """Complete, as 2.10 writes it: a segment, a block that stays and one that goes."""
    stack = [NATIVE, ADAM, USER]
    trace = [
        event("segment_alloc", BASE, 2 * MIB, frames=stack),
        event("alloc", BASE, 400, frames=stack),
        event("alloc", BASE + 512, 1000, frames=[USER]),
        event("free_requested", BASE + 512, 1000, frames=[USER]),
        event("free_completed", BASE + 512, 1000, frames=[USER]),
        event("oom", 77, 1 << 40),
    ]
    for one in trace:
        one.update(compile_context="N/A", user_metadata="step of Anna")
    return {
        "segments": [segment()],
        "device_traces": [trace],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "expandable_segments": False},
        "external_annotations": [
            {"device": 0, "time_us": 1_700_000_000_000_000, "stage": "START", "name": "epoch of Anna"}
        ],
    }


def saved(folder: Path, data: Any, name: str = "run.pickle", protocol: int = 4) -> Path:
    path = folder / name
    path.write_bytes(pickle.dumps(data, protocol))
    return path


def refused(path: Path) -> str:
    with pytest.raises(SnapshotFileError) as caught:
        read(path)
    text = str(caught.value)
    assert path.name in text
    assert "\n" not in text
    return text


# Forms


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickles_of_every_protocol(tmp_path: Path, protocol: int) -> None:
    loaded = read(saved(tmp_path, snapshot_data(), protocol=protocol))
    assert loaded.snapshot == snapshot_from_data(snapshot_data())
    assert loaded.form == "pickle"
    assert all(device.kind == "empty" for device in loaded.devices)
    assert loaded.devices[0].events
    assert all(device.has_frames for device in loaded.devices)
    assert loaded.devices[0].notes() == []
    assert loaded.torch == "2.10 or newer"
    assert loaded.devices[0].in_use == 512


def test_gzip_of_one_and_of_several_members_with_padding(tmp_path: Path) -> None:
    content = pickle.dumps(snapshot_data(), 4)
    path = tmp_path / "run.pickle.gz"
    path.write_bytes(gzip.compress(content))
    assert read(path).form == "gzip pickle"
    path.write_bytes(gzip.compress(content[:100]) + gzip.compress(content[100:]) + b"\0" * 20)
    assert read(path).snapshot == snapshot_from_data(snapshot_data())


def test_json(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("\ufeff \n" + json.dumps(snapshot_data()), encoding="utf-8")
    loaded = read(path)
    assert loaded.snapshot == snapshot_from_data(snapshot_data())
    assert loaded.form == "JSON"
    path.write_bytes(gzip.compress(json.dumps(snapshot_data()).encode()))
    assert read(path).form == "gzip JSON"


def test_pages_of_pytorch(tmp_path: Path) -> None:
    from torch.cuda import _memory_viz

    path = tmp_path / "page.html"
    for page in (_memory_viz.trace_plot(snapshot_data()), _memory_viz.segment_plot(snapshot_data())):
        path.write_text(page)
        loaded = read(path)
        assert loaded.form == "HTML"
        assert loaded.snapshot == snapshot_from_data(snapshot_data())
        assert loaded.devices[0].notes() == []
    path.write_text(page + re.sub(r"(?s).*(\[\{.name.*?\}\]).*", r"\1", page))
    assert read(path).snapshot == snapshot_from_data(snapshot_data())


def test_the_bare_list_of_segments(tmp_path: Path) -> None:
    loaded = read(saved(tmp_path, [segment()]))
    assert loaded.snapshot.segments == snapshot_from_data(snapshot_data()).segments
    assert not loaded.devices[0].events
    assert loaded.devices[0].kind == "none"
    assert "no trace" in loaded.devices[0].notes()[0]


def test_the_form_of_2_0(tmp_path: Path) -> None:
    frames = [USER]
    blocks = [
        {"size": 1024, "requested_size": 900, "state": "inactive"},
        {
            "size": 512,
            "state": "active_allocated",
            "history": [{"addr": BASE + 1024, "real_size": 400, "frames": frames}, {"addr": 1, "real_size": 1}],
        },
        {"size": 2 * MIB - 1536, "requested_size": 7, "state": "active_awaiting_free"},
    ]
    old = {
        key: value
        for key, value in segment(blocks=blocks).items()
        if key not in ("segment_pool_id", "is_expandable", "frames")
    }
    loaded = read(saved(tmp_path, {"segments": [old], "device_traces": []}))
    first, second, third = loaded.snapshot.segments[0].blocks
    assert loaded.torch == "2.0"
    assert (first.address, second.address, third.address) == (BASE, BASE + 1024, BASE + 1536)
    assert second.requested_size == 400
    assert second.frames == (Frame(**USER),)
    assert third.state == "active_pending_free"


def test_devices_streams_pools_and_expandable_segments_are_kept(tmp_path: Path) -> None:
    data = snapshot_data()
    data["segments"] += [
        segment(BASE + 4 * MIB, stream=0x55, segment_pool_id=(0, 3)),
        segment(BASE, device=2, is_expandable=True),
    ]
    data["device_traces"] += [[], [event("segment_map", BASE, 2 * MIB), event("alloc", BASE, 400, pool_id=(0, 3))]]
    loaded = read(saved(tmp_path, data))
    _, private, expandable = loaded.snapshot.segments
    assert (private.stream, private.segment_pool_id) == (0x55, (0, 3))
    assert expandable.is_expandable
    assert loaded.snapshot.device_traces[2][1].pool_id == (0, 3)
    assert [(device.device, device.kind) for device in loaded.devices] == [(0, "middle"), (2, "empty")]
    assert not all(device.kind == "empty" for device in loaded.devices)
    assert loaded.devices[0].notes()[0].startswith("The recording begins in the middle")


def test_stacks_of_the_forward_tell_the_version(tmp_path: Path) -> None:
    data = snapshot_data()
    data["device_traces"][0][1]["forward_frames"] = [USER]
    assert read(saved(tmp_path, data)).torch == "2.13 or newer"


# What is said about a file


def test_a_trace_that_begins_in_the_middle(tmp_path: Path) -> None:
    data = snapshot_data()
    del data["device_traces"][0][:2]
    loaded = read(saved(tmp_path, data))
    assert loaded.devices[0].kind == "middle"
    assert not loaded.devices[0].overran
    assert loaded.devices[0].notes() == [
        "The recording begins in the middle: memory was in use before its first event."
    ]


def test_a_ring_buffer_that_overran(tmp_path: Path) -> None:
    data = snapshot_data()
    pair = [event("alloc", BASE + 512, 1000), event("free_requested", BASE + 512, 1000)]
    data["device_traces"][0] = [*pair, event("free_completed", BASE + 512, 1000), *[event("snapshot", 0, 0)] * 1997]
    loaded = read(saved(tmp_path, data))
    assert loaded.devices[0].overran
    (note,) = loaded.devices[0].notes()
    assert "2,000 events" in note
    assert "overran" in note


@pytest.mark.parametrize("number", range(5))
def test_nothing_complete_is_left_when_any_of_its_first_events_is_missing(tmp_path: Path, number: int) -> None:
    data = snapshot_data()
    del data["device_traces"][0][number]
    # A block whose free_requested (3) or free_completed (4) event is missing was still seen from its beginning.
    assert [one.kind == "empty" for one in read(saved(tmp_path, data)).devices] == [number >= 3]


def test_missing_kinds_of_events_and_stacks_are_named(tmp_path: Path) -> None:
    data = snapshot_data()
    trace = [one for one in data["device_traces"][0] if one["action"] in ("alloc", "free_completed")]
    for one in trace:
        del one["frames"]
    data["device_traces"] = [trace]
    data["segments"][0]["blocks"][0]["frames"] = []
    notes = " ".join(read(saved(tmp_path, data)).devices[0].notes())
    assert "no free_requested or segment events" in notes
    assert "no stacks" in notes


@pytest.mark.parametrize(
    ("without", "version"),
    [
        ((), "2.10 or newer"),
        (("user_metadata",), "2.8-2.9"),
        (("user_metadata", "compile_context"), "2.5-2.7"),
        (("user_metadata", "compile_context", "external_annotations"), "2.3-2.4"),
        (("user_metadata", "compile_context", "external_annotations", "allocator_settings"), "2.2"),
        (("user_metadata", "compile_context", "external_annotations", "allocator_settings", "time_us"), "2.1"),
    ],
)
def test_the_version_follows_from_the_keys(tmp_path: Path, without: tuple[str, ...], version: str) -> None:
    data = {key: value for key, value in snapshot_data().items() if key not in without}
    data["device_traces"] = [
        [{key: value for key, value in one.items() if key not in without} for one in data["device_traces"][0]]
    ]
    assert read(saved(tmp_path, data)).torch == version


def test_an_empty_recording(tmp_path: Path) -> None:
    loaded = read(saved(tmp_path, {"segments": [], "device_traces": [[], []]}))
    assert loaded.devices == ()


# What is refused


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it is empty"),
        (b"hello", "neither a pickle"),
        (b"PK\x03\x04abc", "zip archive"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
        (b"<html></html>", "web page without a snapshot"),
        (b'<script>[{"name": "a", "base64": "abc"}]</script>', "the snapshot in the page is damaged"),
        (b'{"segments": [', "its JSON is damaged"),
        (b"[" * 100_000, "nested too deep"),
        (b"[1" + b",[1" * 70 + b"]" * 71, "deep"),
        (b'{"segments": 1' + b"0" * 10_000 + b"}", ""),
        (b"\x1f\x8b\x08junk", "gzip data are"),
        (gzip.compress(b"x" * 1000, mtime=0)[:-9], "gzip data are"),
        (b"{}", "neither 'segments' nor 'device_traces'"),
        (b"[3]", "it is no snapshot"),
        (b"[{}, 3]", "segments[0]"),
        (pickle.dumps("text", 4), "neither 'segments'"),
        (pickle.dumps({"segments": "x"}, 4), "segments is not a list, but 'x'"),
        (
            pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc"}]]}, 4),
            "device_traces[0][0].addr is not there",
        ),
        (
            pickle.dumps({"device_traces": [[event("alloc", -1, 1)]]}, 4),
            "device_traces[0][0].addr is not a whole number of up to 64 bits, but -1",
        ),
        (pickle.dumps({"device_traces": [[event("alloc", 1, 1 << 64)]]}, 4), "device_traces[0][0].size is not"),
        (b'{"device_traces": [[{"action": "oom", "device_free": 1e9, "size": 1}]]}', "device_free is not a whole"),
        (b'{"device_traces": [[{"action": "alloc", "addr": NaN, "size": 1}]]}', "but nan"),
        (pickle.dumps({"device_traces": [[event(3, 1, 1)]]}, 4), "device_traces[0][0].action is not a word, but 3"),
        (pickle.dumps({"device_traces": [["x"]]}, 4), "device_traces[0][0] is not a dictionary"),
        (pickle.dumps({"device_traces": [[event("alloc", 1, 1, frames=[{}])]]}, 4), "a frame of filename"),
        (pickle.dumps([segment(device=1 << 30)], 4), "segments[0].device"),
        (pickle.dumps([segment(segment_type="huge")], 4), "segments[0].segment_type"),
        (pickle.dumps([segment(blocks=[{"size": 1, "state": "odd"}])], 4), "segments[0].blocks[0].state"),
        (pickle.dumps([segment(blocks=[{"size": True, "state": "inactive"}])], 4), "segments[0].blocks[0].size"),
        (pickle.dumps([segment(segment_pool_id=[1])], 4), "the pool id"),
        (pickle.dumps({"segments": [], "device_traces": [[]] * 5000}, 4), "device_traces"),
        (pickle.dumps({"segments": [], "allocator_settings": [1]}, 4), "allocator_settings is not a dictionary"),
        (pickle.dumps({"segments": [], "external_annotations": [1]}, 4), "external_annotations[0]"),
    ],
)
def test_what_is_no_snapshot_is_refused_in_one_line(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "run.file"
    path.write_bytes(content)
    assert words in refused(path)


def test_folders_missing_files_and_devices(tmp_path: Path) -> None:
    assert "folder" in refused(tmp_path)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "nothing.pickle")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        assert "not a regular file" in refused(tmp_path / "pipe")


def test_a_gzip_bomb_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "bomb.pickle.gz"
    path.write_bytes(gzip.compress(b"\0" * (64 * MIB)))
    tracemalloc.start()
    try:
        assert "unpacked, it is larger than" in refused(path)
        assert tracemalloc.get_traced_memory()[1] < 40 * MIB
    finally:
        tracemalloc.stop()


def test_a_file_over_the_limit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path, snapshot_data())
    monkeypatch.setattr(files, "MAX_BYTES", 1000)
    assert "at most" in refused(path)


def test_text_that_no_encoding_can_carry_is_replaced(tmp_path: Path) -> None:
    data = snapshot_data()
    data["device_traces"][0][1]["frames"] = [{"filename": "a\ud800.py", "name": "ü", "line": 1}]
    frame = read(saved(tmp_path, data)).snapshot.device_traces[0][1].frames[0]
    assert frame == Frame("a?.py", "ü", 1)


# Writing


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    snapshot = snapshot_from_data(snapshot_data())
    path = tmp_path / "out.pickle"
    write(snapshot, path, {"torch": "2.13.0", "rows": [{"line": 1, "iteration": (1, 2)}]})
    loaded = read(path)
    assert loaded.snapshot == snapshot
    assert loaded.torch == "2.13.0"
    assert loaded.extra == {"torch": "2.13.0", "rows": [{"line": 1, "iteration": [1, 2]}]}
    assert path.read_bytes()[:2] == b"\x80\x04"
    assert os.listdir(tmp_path) == ["out.pickle"]
    assert (
        pickle.loads(path.read_bytes())["segments"] == snapshot_to_data(snapshot_from_data(snapshot_data()))["segments"]
    )


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "out.pickle"
    path.write_bytes(b"before")
    with pytest.raises(TypeError):
        write(Snapshot((), ()), path, {"object": object()})
    odd = Snapshot((), (), {"function": lambda: None})
    with pytest.raises((AttributeError, pickle.PicklingError)):
        write(odd, path)
    assert path.read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["out.pickle"]
    with pytest.raises(OSError, match="nowhere"):
        write(Snapshot((), ()), tmp_path / "nowhere" / "out.pickle")


def test_pytorchs_own_tools_open_what_is_written(tmp_path: Path) -> None:
    from torch.cuda import _memory_viz

    path = tmp_path / "out.pickle"
    write(snapshot_from_data(snapshot_data()), path, {"torch": "2.13.0"})
    data = pickle.loads(path.read_bytes())
    plain = _memory_viz.trace(snapshot_data())
    assert _memory_viz.trace(data) == plain
    assert "# oom" in plain or "OutOfMemoryError" in plain
    assert _memory_viz.segsum(data) == _memory_viz.segsum(snapshot_data())
    assert _memory_viz.memory(data, str) == _memory_viz.memory(snapshot_data(), str)
    assert "train_secret_model" in _memory_viz.memory(data, str)
    assert "base64" in _memory_viz.trace_plot(data)
    assert "base64" in _memory_viz.segment_plot(data)


# Redaction


def test_a_redacted_copy_names_nobody(tmp_path: Path) -> None:
    data = snapshot_data()
    data["allocator_settings"] |= {
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128",
        "path": "/home/anna",
        "x": {"a": "/b", "1": 2},
    }
    snapshot = snapshot_from_data(data)
    path = tmp_path / "shared.pickle"
    write(redacted(snapshot), path)
    content = path.read_bytes().lower()
    for word in (b"anna", b"secret", b"/home", b"/opt/", b"epoch"):
        assert word not in content
    copy = read(path).snapshot
    assert copy.external_annotations == ()
    assert {event.metadata for event in snapshot.device_traces[0]} == {"step of Anna"}
    assert not any(event.metadata for event in copy.device_traces[0])
    assert copy.allocator_settings["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:128"
    native, adam, user = copy.device_traces[0][1].frames
    assert native == Frame(**NATIVE)
    assert adam == Frame("torch/optim/adam.py", "_init_group", 180)
    assert user == Frame("file1.py", "function1", 12)
    assert copy.device_traces[0][2].frames == (user,)
    assert copy.device_traces[0][0].time_us == 0

    def bare(one: TraceEvent) -> TraceEvent:
        return one._replace(frames=(), time_us=0, metadata="")

    assert [bare(one) for one in copy.device_traces[0]] == [bare(one) for one in snapshot.device_traces[0]]
    assert [replace(one, frames=(), blocks=()) for one in copy.segments] == [
        replace(one, frames=(), blocks=()) for one in snapshot.segments
    ]
    assert redacted(copy).segments[0].blocks[0].size == 512


# Real recordings


def _plain(segment: dict[str, Any]) -> tuple[Any, ...]:
    """What every PyTorch writes of a segment."""
    sizes = [(block["size"], block["state"].replace("awaiting", "pending")) for block in segment["blocks"]]
    return tuple(segment[key] for key in ("address", "total_size", "stream", "segment_type")), sizes


@pytest.mark.skipif(not RECORDED, reason="the real recordings (shared/data/snapshots) are not here")
@pytest.mark.parametrize("path", sorted(RECORDED, key=lambda one: one.stat().st_size)[:24], ids=lambda one: one.name)
def test_every_real_recording_reads_and_comes_back(path: Path, tmp_path: Path) -> None:
    loaded = read(path)
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    theirs, ours = pickle.loads(content), snapshot_to_data(loaded.snapshot)
    assert [_plain(segment) for segment in ours["segments"]] == [_plain(segment) for segment in theirs["segments"]]
    for our_trace, their_trace in zip(ours["device_traces"], theirs.get("device_traces", ()), strict=True):
        for event, other in zip(our_trace, their_trace, strict=True):
            known = other.keys() & event.keys() - {"compile_context", "user_metadata"}
            assert known >= {"action", "size", "stream"}
            assert {key: event[key] for key in known} == {key: other[key] for key in known}
    assert loaded.torch != "unknown"
    assert loaded.devices
    assert all(device.notes() for device in loaded.devices if device.kind != "empty")
    target = tmp_path / "copy.pickle"
    write(loaded.snapshot, target)
    assert read(target).snapshot == loaded.snapshot
