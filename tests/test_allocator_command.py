"""``gpumem replay``: what it prints, its JSON, and when it succeeds; and the sentences of a failed request."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
from allocator_training import WEIGHT, Training, train

from gpumem_magic import cli
from gpumem_magic.snapshot.files import read, write
from gpumem_magic.snapshot.model import ACTIVE, INACTIVE, LARGE_POOL, Block, Segment, Snapshot, TraceEvent
from gpumem_magic.snapshot.rules import DEFAULT_SETTINGS
from gpumem_magic.units import GIB, MIB, human, mib
from gpumem_magic.user_report import Report, load
from gpumem_magic.views import explain, what_failed

RECORDINGS = Path(__file__).resolve().parents[2] / "shared" / "data" / "snapshots"
_STEPS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
Printed = pytest.CaptureFixture[str]


def save(path: Path, run: Training, *, with_trace: bool = True) -> str:
    trace = tuple(run.events) if with_trace else ()
    write(Snapshot(run.allocator.segments(), (trace,), run.allocator.settings_dict()), path)
    return str(path)


@pytest.fixture
def failed(tmp_path: Path) -> str:
    return save(tmp_path / "failed.pickle", train(2, stacks=True))


def replayed(capsys: Printed, *arguments: str) -> tuple[int, dict[str, Any]]:
    status = cli.main(["replay", *arguments, "--json"])
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return status, data


def test_our_own_recording_agrees(failed: str, capsys: Printed) -> None:
    status, data = replayed(capsys, failed, failed)
    assert (status, data["agrees"]) == (0, True)
    assert len(data["devices"]) == 2
    one = data["devices"][0]
    assert one["file"] == failed
    assert one["placed"] == one["allocations"] == 84
    assert one["decided"] == one["decisions"] > 0
    assert sum(pool["allocations"] for pool in one["pools"]) == one["allocations"]
    assert cli.main(["replay", failed]) == 0
    assert "84 of 84 allocations placed" in capsys.readouterr().out


def test_another_placement_is_a_difference(tmp_path: Path, capsys: Printed) -> None:
    base, size = 1 << 40, 5 * MIB
    blocks = (
        Block(base, size, size, ACTIVE),
        Block(base + size, size, 0, INACTIVE),
        Block(base + 2 * size, size, size, ACTIVE),
        Block(base + 3 * size, size, 0, INACTIVE),
    )
    events = (
        TraceEvent("segment_alloc", base, 4 * size),
        TraceEvent("alloc", base, size),
        # The allocator puts it right behind the first.
        TraceEvent("alloc", base + 2 * size, size),
    )
    path = tmp_path / "moved.pickle"
    write(Snapshot((Segment(0, base, 4 * size, 0, LARGE_POOL, blocks),), (events,)), path)
    status, data = replayed(capsys, str(path))
    assert (status, data["agrees"]) == (1, False)
    (one,) = data["devices"]
    assert (one["placed"], one["allocations"], one["first_difference"]) == (1, 2, 2)
    assert cli.main(["replay", str(path)]) == 1
    assert "1 of 2 allocations placed, 1 of 1 segment decisions: first difference at event 2" in capsys.readouterr().out


def test_what_cannot_be_replayed_says_why(tmp_path: Path, capsys: Printed) -> None:
    run = train(1, available=1 << 40)
    bare = save(tmp_path / "bare.pickle", run, with_trace=False)
    nothing = tmp_path / "nothing.pickle"
    nothing.write_text("nothing", encoding="utf-8")
    status, data = replayed(capsys, bare, str(nothing), str(tmp_path / "missing.pickle"))
    assert (status, data["agrees"]) == (2, False)
    reasons = [one["why_not"] for one in data["devices"]]
    assert "no trace" in reasons[0]
    assert "neither a pickle" in reasons[1]
    assert "No such file" in reasons[2]
    assert cli.main(["replay", bare]) == 2
    assert "not replayed: there is no trace" in capsys.readouterr().out


def test_a_file_is_named_once(tmp_path: Path, capsys: Printed) -> None:
    path = tmp_path / "a name.pickle"
    path.write_bytes(b"")
    assert cli.main(["replay", str(path)]) == 2
    assert capsys.readouterr().out == f"{path}: not replayed: it is empty. Copy or record it again.\n"


def test_would_this_setting_have_helped(failed: str, capsys: Printed) -> None:
    status, data = replayed(capsys, failed, "--conf", "expandable_segments:True")
    (one,) = data["devices"]
    assert (status, data["agrees"]) == (0, None)
    assert one["was"]["recorded_failures"] == one["would_be"]["recorded_failures"] == 1
    assert (one["was"]["passed"], one["would_be"]["passed"]) == (0, 1)
    assert one["was"]["given_back"] == 2
    assert one["would_be"]["peak_reserved"] <= one["available"]
    assert cli.main(["replay", failed, "--conf", "expandable_segments:True"]) == 0
    printed = capsys.readouterr().out
    assert "The recorded out-of-memory error would not have happened." in printed
    assert "highest reserved" in printed
    assert cli.main(["replay", failed, "--conf", "garbage_collection_threshold:0.8"]) == 0
    assert "would still have happened" in capsys.readouterr().out
    assert cli.main(["replay", failed, "--conf", "roundup_power2_divisions:4"]) == 0
    answer = capsys.readouterr().out.splitlines()[0].removeprefix(f"{failed}, device 0: ")
    assert re.match(
        r"It fails at event [\d,]+: a request of .*B, which the recording served, finds no memory\.", answer
    )


def test_without_a_failure_nobody_knows_how_much_there_was(tmp_path: Path, capsys: Printed) -> None:
    path = save(tmp_path / "fine.pickle", train(2, available=1 << 40))
    assert cli.main(["replay", path, "--conf", "max_split_size_mb:128"]) == 0
    assert "Memory never ran short in the recording, so how much there was is unknown." in capsys.readouterr().out


def test_as_recorded_is_what_was_recorded(tmp_path: Path, capsys: Printed) -> None:
    """Memory was given back to go on and no request failed: the recording bounds what there was, and is not run without limit."""
    available = 15 * GIB
    run = train(1, available=available)
    path = save(tmp_path / "tight.pickle", run)
    _, data = replayed(capsys, path, "--conf", "expandable_segments:True")
    (one,) = data["devices"]
    given_back = run.allocator.num_alloc_retries
    assert given_back > 0
    assert one["was"]["given_back"] == given_back
    assert one["was"]["peak_reserved"] == run.allocator.peak_reserved
    assert one["was"]["peak_allocated"] == run.allocator.peak_allocated
    assert available <= one["available"] < available + 2 * GIB
    assert one["available_at_most"]
    assert one["would_be"]["failed"] == []
    assert one["would_be"]["peak_reserved"] <= one["available"]


def test_what_is_not_named_stays_as_recorded(tmp_path: Path, capsys: Printed) -> None:
    recorded = replace(DEFAULT_SETTINGS, expandable_segments=True)
    path = save(tmp_path / "expandable.pickle", train(2, recorded, available=1 << 40))
    _, data = replayed(capsys, path, "--conf", "roundup_power2_divisions:4")
    _, both = replayed(capsys, path, "--conf", "expandable_segments:True,roundup_power2_divisions:4")
    _, other = replayed(capsys, path, "--conf", "expandable_segments:False,roundup_power2_divisions:4")
    figures = [one["devices"][0]["would_be"] for one in (data, both, other)]
    assert figures[0] == figures[1] != figures[2]
    assert cli.main(["replay", path, "--conf", "expandable_segments:True"]) == 0
    line, heads, *_ = capsys.readouterr().out.splitlines()
    assert line == f"{path}, device 0: The recording had these settings already."
    assert heads.split() == ["as", "recorded"]


@pytest.mark.parametrize("option", ["backend:cudaMallocAsync", "throw_on_cudamalloc_oom:True"])
def test_no_figures_for_what_is_not_emulated(failed: str, option: str, capsys: Printed) -> None:
    assert cli.main(["replay", failed, "--conf", f"expandable_segments:True,{option}"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"{option} is not emulated" in printed.err


def test_a_recording_of_another_backend_is_not_replayed(tmp_path: Path, capsys: Printed) -> None:
    run = train(1, available=1 << 40)
    for text in ("backend:cudaMallocAsync", "garbage_collection_threshold:0.8,backend:cudaMallocAsync"):
        path = tmp_path / "async.pickle"
        settings = {"PYTORCH_CUDA_ALLOC_CONF": text}
        write(Snapshot(run.allocator.segments(), (tuple(run.events),), settings), path)
        for more in ((), ("--conf", "expandable_segments:True")):
            status, data = replayed(capsys, str(path), *more)
            assert status == 2
            assert data["devices"][0]["why_not"].endswith("backend:cudaMallocAsync, which is not emulated")


def test_a_trace_of_a_steady_state_says_that_it_cannot_tell(tmp_path: Path, capsys: Printed) -> None:
    run = train(4, available=1 << 40)
    middle = len(run.events) // 2
    path = tmp_path / "steady.pickle"
    write(Snapshot(run.allocator.segments(), (tuple(run.events[middle:]),), run.allocator.settings_dict()), path)
    assert cli.main(["replay", str(path), "--conf", "expandable_segments:True"]) == 0
    line, *figures = capsys.readouterr().out.splitlines()
    assert figures[0].split() == ["as", "recorded"]
    assert f"{human(run.allocator.peak_reserved)}" in figures[2]
    assert "can't tell" in line
    assert "Record the program from its start." in line
    assert "MiB" not in line
    assert "GiB" not in line
    _, data = replayed(capsys, str(path), "--conf", "expandable_segments:True")
    assert "would_be" not in data["devices"][0]


@pytest.mark.skipif(not RECORDINGS.is_dir(), reason="the recordings are not here")
@pytest.mark.parametrize("conf", ["expandable_segments:True", "max_split_size_mb:128"])
@pytest.mark.parametrize("path", sorted(RECORDINGS.glob("*.pickle.gz")), ids=lambda path: path.name)
def test_real_recordings_show_their_own_figures(path: Path, conf: str, capsys: Printed) -> None:
    """Counted anew from the events alone; other figures stand beside them only where a replay gives these."""
    traces = read(path).snapshot.device_traces
    _, data = replayed(capsys, str(path), "--conf", conf)
    for one in data["devices"]:
        if "why_not" in one:
            assert "was" not in one
            continue
        events = traces[one["device"]]
        assert one["was"]["recorded_failures"] == sum(event.action == "oom" for event in events)
        given_back = sum(
            before.action in ("segment_free", "segment_unmap")
            and event.action in ("segment_alloc", "segment_map", "oom")
            for before, event in pairwise(events)
        )
        assert one["was"]["given_back"] == given_back
        if any("begins in the middle" in note for note in one["notes"]):
            continue
        reserved = list(accumulate(_STEPS.get(event.action, 0) * event.size for event in events))
        assert one["was"]["peak_reserved"] == max(reserved)


def test_settings_that_are_none(failed: str, capsys: Printed) -> None:
    assert cli.main(["replay", failed, "--conf", "expandable:yes"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("gpumem: --conf: ")
    assert error.count("\n") == 1


# The sentences


def test_a_file_that_ends_out_of_memory_says_why(failed: str) -> None:
    report = load(failed)
    assert report.error is not None
    found = report.error.verdict
    assert found is not None
    assert found.cause == "fragmentation"
    verdict = what_failed.verdict(report)
    assert verdict is not None
    assert f"{mib(WEIGHT)} MiB wanted" in verdict
    assert "Fragmentation is the cause" in verdict
    assert "split by" in verdict
    assert "train.py:7 loop" in verdict
    remarks = " ".join(explain.remarks(report))
    assert (
        "When replayed with expandable_segments:True or max_split_size_mb:128, the request passes, and so do 5 more"
        in remarks
    )
    assert "With max_split_size_mb:512 it passes, and memory runs out one iteration later." in remarks
    assert "roundup_power2_divisions:8 and garbage_collection_threshold:0.8 do not help." in remarks


def test_the_verdict_is_saved_with_the_report(failed: str) -> None:
    report = load(failed)
    data = json.loads(json.dumps(report.to_dict()))
    assert Report.from_dict(data).error == report.error
    del data["error"]["verdict"]
    again = Report.from_dict(data)
    assert again.error is not None
    assert again.error.verdict is None
    data["error"]["verdict"] = {"cause": "fragmentation"}
    with pytest.raises(ValueError, match=r"error\.verdict\.free"):
        Report.from_dict(data)


def test_too_big_is_said_so(tmp_path: Path) -> None:
    report = load(save(tmp_path / "small.pickle", train(1, available=8192 * MIB)))
    verdict = what_failed.verdict(report)
    assert verdict is not None
    assert "even with perfect packing" in verdict
    assert "No allocator setting can make up for the missing memory." in explain.remarks(report)
