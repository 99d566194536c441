"""``gpumem replay``: what it prints, its JSON, and when it succeeds; and the sentences of a failed request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from allocator_training import WEIGHT, Training, train

from gpumem_magic import cli
from gpumem_magic.snapshot.files import write
from gpumem_magic.snapshot.model import ACTIVE, INACTIVE, LARGE_POOL, Block, Segment, Snapshot, TraceEvent
from gpumem_magic.units import MIB, mib
from gpumem_magic.user_report import Report, load
from gpumem_magic.views import explain

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
    assert one["was"]["peak_reserved"] == one["recorded_peak_reserved"]
    assert one["was"]["retries"] == 2
    assert one["would_be"]["peak_reserved"] <= one["available"]
    assert cli.main(["replay", failed, "--conf", "expandable_segments:True"]) == 0
    printed = capsys.readouterr().out
    assert "The recorded out-of-memory error would not have happened." in printed
    assert "highest reserved" in printed
    assert cli.main(["replay", failed, "--conf", "garbage_collection_threshold:0.8"]) == 0
    assert "would still have happened" in capsys.readouterr().out
    assert cli.main(["replay", failed, "--conf", "roundup_power2_divisions:4"]) == 0
    assert "that the recording served would have failed" in capsys.readouterr().out


def test_without_a_failure_nobody_knows_how_much_there_was(tmp_path: Path, capsys: Printed) -> None:
    path = save(tmp_path / "fine.pickle", train(2, available=1 << 40))
    assert cli.main(["replay", path, "--conf", "max_split_size_mb:128"]) == 0
    assert "No request failed in the recording" in capsys.readouterr().out


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
    verdict = explain.verdict(report)
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
    verdict = explain.verdict(report)
    assert verdict is not None
    assert "even with perfect packing" in verdict
    assert "No allocator setting can make up for the missing memory." in explain.remarks(report)
