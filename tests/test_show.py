"""`gpumem show`: a snapshot file in the terminal, several side by side, and what can be written beside it."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from allocator_training import train
from hostile_snapshots import MARKUP, event, recording, with_markup

from gpumem_magic import cli
from gpumem_magic.attribution.groups import groups_of
from gpumem_magic.attribution.sites import folded
from gpumem_magic.commands.side_by_side import short_names
from gpumem_magic.files.loaded import report_of, views_of
from gpumem_magic.report.filling import in_words
from gpumem_magic.report.model import TensorGroup
from gpumem_magic.snapshot.files import SnapshotFileError, read, write
from gpumem_magic.snapshot.model import ACTIVE, INACTIVE, Block, Segment, Snapshot
from gpumem_magic.units import counted, human
from gpumem_magic.user_report import Report, load
from gpumem_magic.views.explain import answer
from gpumem_magic.views.segments import fragmentation

SHARED = Path(__file__).parents[1].parent / "shared" / "data" / "snapshots"
MIB = 1 << 20


def one_device(seed: int = 3, length: int = 60) -> dict[str, Any]:
    data = recording(random.Random(seed), length)
    return {**data, "segments": data["segments"][:1], "device_traces": data["device_traces"][:1]}


def saved(folder: Path, data: Any, name: str = "run.pickle") -> str:
    path = folder / name
    path.write_bytes(pickle.dumps(data, 4))
    return str(path)


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command: (exit status, standard output, standard error)."""

    def run(*arguments: str, command: str = "show") -> tuple[int, str, str]:
        status = cli.main([command, *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_a_report_the_largest_allocations_and_the_segments(show: Any, tmp_path: Path) -> None:
    path = saved(tmp_path, one_device())
    status, text, errors = show(path, "--top", "3")
    assert (status, errors) == (0, "")
    view = views_of(read(path))[0]
    report = Report.of(report_of(read(path)))
    # There is no `report` in a terminal.
    assert str(report).replace("print(report.", "print(gpumem_magic.load(PATH).") in text
    assert text.startswith(f"{path}: pickle, written by torch ")
    groups = groups_of(view, view.peak[1])
    live = view.timeline.live_at(view.peak[1])
    assert sum(one.requested for one in groups) == sum(one.requested for one in live)
    assert sum(one.count for one in groups) == len(live)
    assert [one.requested for one in groups] == sorted((one.requested for one in groups), reverse=True)
    heading = "The largest allocations (at the peak), those of one stack together:"
    section = text[text.index(heading) : text.index("\nSegments (at the peak")]
    heads = [line for line in section.splitlines() if line[2:12].strip()]
    assert len(heads) - 1 == len(groups[:3]) + (len(groups) > 3)
    for one in groups[:3]:
        assert all(line in section for line in one.stack)
        assert one.why in section
    segments = text[text.index("\nSegments (at the peak") : text.index("\nWhat asked for the segments (at the peak)")]
    assert segments.rstrip().endswith("that are partly in use.")


def test_python_frames_come_first_and_the_library_is_folded(tmp_path: Path) -> None:
    data = one_device()
    own = [
        {"filename": "??", "name": "at::empty_cuda(long)", "line": 0},
        {"filename": "/env/lib/python3.11/site-packages/torch/nn/modules/linear.py", "name": "forward", "line": 125},
        {
            "filename": "/env/lib/python3.11/site-packages/torch/nn/modules/module.py",
            "name": "_call_impl",
            "line": 1700,
        },
        {"filename": "/home/me/model.py", "name": "forward", "line": 30},
        {
            "filename": "/env/lib/python3.11/site-packages/torch/nn/modules/module.py",
            "name": "_call_impl",
            "line": 1700,
        },
        {"filename": "/home/me/train.py", "name": "<module>", "line": 88},
        {"filename": "??", "name": "_start", "line": 0},
    ]
    native = [
        {"filename": "??", "name": "c10::cuda::CUDACachingAllocator::malloc(long)", "line": 0},
        {"filename": "??", "name": "at::_ops::bmm::call(at::Tensor const&)", "line": 0},
        {
            "filename": "??",
            "name": "torch::autograd::generated::BmmBackward0::apply(std::vector<at::Tensor>&&)",
            "line": 0,
        },
    ]
    births = [one for one in data["device_traces"][0] if one["action"] == "alloc"]
    for number, one in enumerate(births):
        one["frames"] = own if number % 2 else native
    view = views_of(read(saved(tmp_path, data)))[0]
    stacks = {tuple(folded(view.frames_of(one))) for one in view.timeline.live_at(view.peak[1])}
    assert stacks == {
        (
            "(2 library frames)",
            "/home/me/model.py:30 forward",
            "(1 library frame)",
            "/home/me/train.py:88 <module>",
        ),
        ("(2 library frames)", "torch::autograd::generated::BmmBackward0::apply"),
    }


def test_the_answer_says_where_in_the_program_the_peak_was(tmp_path: Path) -> None:
    data = one_device()
    view = views_of(read(saved(tmp_path, data)))[0]
    number = view.peak[1] - 1
    at_peak = next(one for one in data["device_traces"][0][number:] if one["action"] == "alloc")
    said = []
    for frames in (
        [
            {"filename": "??", "name": "at::_ops::bmm::call(at::Tensor const&)", "line": 0},
            {"filename": "/home/me/model.py", "name": "forward", "line": 30},
        ],
        [{"filename": "??", "name": "torch::autograd::generated::BmmBackward0::apply(x&&)", "line": 0}],
        [],
    ):
        at_peak["frames"] = frames
        answer_of_file = " ".join(answer(report_of(read(saved(tmp_path, data)))).split())
        said.append(answer_of_file[answer_of_file.index("Peak at ") :])
    event_words = f"Peak at event {number:,} of {view.end:,}"
    assert said == [
        f"{event_words} (model.py:30 forward, in bmm).",
        f"{event_words} (BmmBackward0, in backward).",
        f"{event_words}.",
    ]


def test_another_moment(show: Any, tmp_path: Path) -> None:
    path = saved(tmp_path, one_device())
    view = views_of(read(path))[0]
    status, text, _ = show(path, "--at", "7")
    assert status == 0
    assert "event 7 of" in text
    assert "The largest allocations (after event 7), those of one stack together:" in text
    assert "Segments (after event 7;" in text
    at_end = show(path, "--at", "end", "--top", "0")[1]
    assert "The largest" not in at_end
    report = report_of(read(path), at="7")
    row = next(row for row in report.checkpoints if row.kind == "statement")
    assert row.allocated == view.timeline.allocated_at(8)
    assert sum(size for size in row.categories.values() if size) == row.reserved


def test_between_two_events(show: Any, tmp_path: Path) -> None:
    path = saved(tmp_path, one_device())
    view = views_of(read(path))[0]
    status, text, _ = show(path, "--between", "5", "20", "--top", "1")
    assert status == 0
    assert "(at the highest after one of the events 5 to 20" in text
    best = max(range(6, 22), key=view.timeline.allocated_at)
    assert f"event {best - 1} of" in text or best == view.peak[1]
    for wrong in (("9", "3"), ("0", "99999"), ("-1", "3")):
        status, text, errors = show(path, "--between", *wrong)
        assert (status, text) == (2, "")
        assert "give two events from 0 to" in errors


def test_what_is_sought(show: Any, tmp_path: Path) -> None:
    data = one_device()
    births = [one for one in data["device_traces"][0] if one["action"] == "alloc"]
    for number, one in enumerate(births):
        one["frames"] = [
            {"filename": "/home/me/cache.py" if number % 2 else "/home/me/x.py", "name": "Make_It", "line": 7}
        ]
    path = saved(tmp_path, data)
    view = views_of(read(path))[0]
    inside = [one for one in view.timeline.live_at(view.peak[1]) if "cache" in str(view.frames_of(one))]
    total = sum(one.requested for one in inside)
    text = show(path, "--search", "CACHE.PY:7 make")[1]
    assert f"'CACHE.PY:7 make' is in {len(inside)} allocations (at the peak): {human(total)}." in text
    assert "/home/me/x.py" not in text[text.index("'CACHE") :]
    own = show(path, "--category", r"kv=cache\.py", "--category", "none=nothing_like_it")[1]
    section = own[own.index("By your own categories (at the peak):") :]
    assert f"{human(total):>10}  kv, {len(inside)} allocations" in section
    assert f"{human(0):>10}  none, 0 allocations" in section
    assert "all else" in section
    for wrong in ("kv", "=x", "kv=", "kv=("):
        status, text, errors = show(path, "--category", wrong)
        assert (status, text) == (2, "")
        assert errors.startswith(f"gpumem: --category {wrong}: ")
    assert show(path, path, "--search", "x")[0] == 2


def test_ranges_and_settings(show: Any, tmp_path: Path) -> None:
    data = one_device()
    for number, one in enumerate(data["device_traces"][0]):
        one["time_us"] = 1000 + number
    data["external_annotations"] = [
        {"name": "## step ##", "device": 0, "stage": stage, "time_us": when}
        for stage, when in (("START", 1005), ("END", 1020), ("START", 1030), ("END", 1040), ("END", 1041))
    ]
    for one in data["device_traces"][0][8:12]:
        one["user_metadata"] = "warm up"
    data["device_traces"][0][20]["user_metadata"] = ["no text"]
    data["allocator_settings"] = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}
    path = saved(tmp_path, data)
    view = views_of(read(path))[0]
    highest = max(view.timeline.peak(5, 20)[0], view.timeline.peak(30, 40)[0])
    text = show(path)[1]
    assert f"{human(highest):>10}  ## step ##, 2 ×; highest at event " in text
    assert f"{human(view.timeline.peak(8, 12)[0]):>10}  warm up, 1 ×; highest at event " in text
    assert "Allocator settings: max_split_size_mb:128." in text


def test_events_and_what_asked_for_segments(show: Any, tmp_path: Path) -> None:
    path = saved(tmp_path, one_device())
    view = views_of(read(path))[0]
    text = show(path, "--events")[1]
    position = view.peak[1]
    listed = [
        line for line in text[text.index("\nEvents ") :].splitlines() if line[2:11].strip().replace(",", "").isdigit()
    ]
    numbers = [int(line[2:11].replace(",", "")) for line in listed]
    assert numbers == [one for one in range(position - 11, position + 10) if 0 <= one < view.end]
    assert [number for number, line in zip(numbers, listed, strict=True) if line[0] == ">"] == [position - 1]
    for number, line in zip(numbers, listed, strict=True):
        event = view.log.events[number]
        assert f" {event.action} " in line
        assert human(event.size) in line
    between = show(path, "--events", "--between", "0", str(view.end - 1))[1]
    assert between.count("alloc  ") == sum("alloc" in event.action for event in view.log.events)
    asked = text[text.index("What asked for the segments (at the peak):") :].split("\n\n")[0]
    assert (
        f"{human(view.timeline.reserved_at(position)):>10}  in {counted(len(view.timeline.segments_at(position)), 'segment')}\n"
        in asked
    )
    assert "/home/me/train.py:12 step" in asked
    assert "Events " not in show(path)[1]
    assert show(path, path, "--events")[0] == 2


@pytest.mark.parametrize("at", ["-1", "99999", "now", "1.5", "9" * 30, "\u0663"])
def test_no_such_moment(show: Any, tmp_path: Path, at: str) -> None:
    path = saved(tmp_path, one_device())
    status, text, errors = show(path, f"--at={at}")
    assert (status, text) == (2, "")
    assert errors.startswith(f"gpumem: {path}: no event ")
    assert errors.count("\n") == 1


def test_devices(show: Any, tmp_path: Path) -> None:
    data = recording(random.Random(5), 60)
    assert len(data["device_traces"]) == 1
    other = recording(random.Random(6), 90)
    second = one_device(6, 90)
    for segment in second["segments"]:
        segment["device"] = 3
    both = {
        **data,
        "segments": [*data["segments"], *second["segments"]],
        "device_traces": [*data["device_traces"], [], [], *second["device_traces"]],
    }
    path = saved(tmp_path, both)
    views = views_of(read(path))
    assert {view.device for view in views} == {0, 3}
    assert views[0].peak[0] >= views[1].peak[0]
    report = load(path)
    assert report.device.index == views[0].device
    assert [one.device.index for one in report.devices] == [views[1].device]
    assert report.devices[0] == Report.of(report_of(read(path), views[1].device))
    text = show(path, "--device", "3")[1]
    assert "GPU 3 of run.pickle" in text
    status, text, errors = show(path, "--device", "1")
    assert (status, text) == (2, "")
    assert errors == f"gpumem: {path}: it has no device 1. It has: 0, 3.\n"
    assert other


def test_what_is_written_beside(show: Any, tmp_path: Path) -> None:
    path = saved(tmp_path, one_device())
    json_path, page, copy = tmp_path / "out.json", tmp_path / "out.html", tmp_path / "copy.pickle"
    assert show(path, "--json", str(json_path), "--html", str(page), "--redact", str(copy))[0] == 0
    assert Report.load(json_path) == load(path)
    assert json.loads(json_path.read_text())["schema"] == 1
    written = page.read_text("utf-8")
    assert written.startswith("<!DOCTYPE html>")
    # The page begins with what the report does.
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', written, re.DOTALL)
    assert json.loads(data)["devices"][0]["answer"] == answer(load(path))
    for word in (b"/home/me", b"train.py", b"/env/"):
        assert word in Path(path).read_bytes()
        assert word not in copy.read_bytes()
    before, after = views_of(read(path))[0], views_of(read(copy))[0]
    assert after.peak == before.peak
    assert after.sizes(before.peak[1]) == before.sizes(before.peak[1]), "categories are found in the copy too"


@pytest.mark.parametrize("option", ["--json", "--html", "--redact"])
def test_a_place_that_cannot_be_written(show: Any, tmp_path: Path, option: str) -> None:
    """It is refused before anything is read or printed."""
    path = saved(tmp_path, one_device())
    folder = tmp_path / "nowhere"
    status, text, errors = show(path, option, str(folder / "file"))
    assert (status, text) == (2, "")
    assert errors == f"gpumem: {option}: there is no folder {folder}: make it first, or save elsewhere\n"
    assert show(path, option, str(tmp_path))[::2] == (
        2,
        f"gpumem: {option}: {tmp_path} is a folder: give the path of a file\n",
    )
    assert [one.name for one in tmp_path.iterdir()] == ["run.pickle"]


@pytest.mark.parametrize("option", ["--json", "--html", "--redact"])
def test_the_recording_itself_is_never_replaced(show: Any, tmp_path: Path, option: str) -> None:
    path = saved(tmp_path, one_device())
    link = tmp_path / "link.pickle"
    link.symlink_to(path)
    before = Path(path).read_bytes()
    for target in (path, str(link)):
        status, text, errors = show(path, option, target)
        assert (status, text) == (2, "")
        assert errors == f"gpumem: {option}: {target} is the recording itself: give another path\n"
    assert Path(path).read_bytes() == before


def test_a_link_stays_one_and_what_it_names_is_replaced(show: Any, tmp_path: Path) -> None:
    (tmp_path / "a folder").mkdir()
    target, link = tmp_path / "a folder" / "pagé.html", tmp_path / "link.html"
    link.symlink_to(target)
    assert show(saved(tmp_path, one_device()), "--html", str(link))[0] == 0
    assert link.is_symlink()
    assert target.read_text("utf-8").startswith("<!DOCTYPE html>")


def test_a_disk_that_is_full_is_one_line(show: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "hidden.part")

    path, page = saved(tmp_path, one_device()), tmp_path / "page.html"
    page.write_text("before")
    monkeypatch.setattr("gpumem_magic.snapshot.whole_file.os.replace", full)
    status, _, errors = show(path, "--html", str(page))
    assert (status, errors) == (2, f"gpumem: cannot write {page}: No space left on device\n")
    assert page.read_text() == "before"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["page.html", "run.pickle"]


def test_an_interrupt_is_one_line(show: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gpumem_magic.snapshot.files.read", interrupted)
    for command in ("show", "replay"):
        assert show("any.pickle", command=command) == (130, "", "gpumem: interrupted\n")


def test_several_ranks_side_by_side(show: Any, tmp_path: Path) -> None:
    paths = [saved(tmp_path, one_device(seed), f"rank{seed}.pickle") for seed in (3, 5, 8)]
    status, text, _ = show(*paths, "--html", str(tmp_path / "ranks.html"))
    assert status == 0
    head, *rows = text.splitlines()
    assert head.split() == ["MiB", "at", "the", "peak", "rank3.pickle", "rank5.pickle", "rank8.pickle"]
    found = {row.rsplit(None, 3)[0].strip(): row.rsplit(None, 3)[1:] for row in rows}
    assert found["allocated"] == [f"{round(views_of(read(path))[0].peak[0] / MIB):,}" for path in paths]
    assert "rank8.pickle" in (tmp_path / "ranks.html").read_text("utf-8")
    assert show(*paths, "--redact", "x.pickle")[0] == 2
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    same = [saved(folder, one_device(), "rank.pickle") for folder in folders]
    head = show(*same)[1].splitlines()[0]
    assert head.split()[-2:] == ["a/rank.pickle", "b/rank.pickle"], "files of one name are told apart by their folders"


def test_what_several_files_begin_with_is_folded() -> None:
    assert short_names(["x/snapshot_of_job_rank0.pickle", "x/snapshot_of_job_rank10.pickle"]) == [
        "…rank0.pickle",
        "…rank10.pickle",
    ]
    assert short_names(["x/a_1.pickle", "x/a_2.pickle"]) == ["a_1.pickle", "a_2.pickle"]
    assert short_names(["jobs/7/rank0/out.pickle", "jobs/7/rank1/out.pickle"]) == [
        "rank0/out.pickle",
        "rank1/out.pickle",
    ]
    assert short_names(["one.pickle"]) == ["one.pickle"]


def test_files_that_cannot_be_read_do_not_hide_the_others(show: Any, tmp_path: Path) -> None:
    good = [saved(tmp_path, one_device(seed), f"rank{seed}.pickle") for seed in (3, 5)]
    empty, missing = tmp_path / "rank4.pickle", tmp_path / "rank6.pickle"
    empty.write_bytes(b"")
    page = tmp_path / "page.html"
    status, text, errors = show(good[0], str(empty), good[1], str(missing), "--html", str(page))
    assert status == 2
    assert text == show(*good)[1]
    assert errors == (
        f"gpumem: {empty}: it is empty. Copy or record it again.\n"
        f"gpumem: cannot read {missing}: No such file or directory\n"
    )
    assert "rank5.pickle" in page.read_text("utf-8")
    status, text, errors = show(str(empty), str(missing))
    assert (status, text, errors.count("\n")) == (2, "", 2)


def test_the_device_that_failed_stands_out(show: Any, tmp_path: Path) -> None:
    fine = saved(tmp_path, one_device(), "rank0.pickle")
    run = train(2, stacks=True)
    write(
        Snapshot(run.allocator.segments(), (tuple(run.events),), run.allocator.settings_dict()),
        tmp_path / "rank1.pickle",
    )
    status, text, _ = show(fine, str(tmp_path / "rank1.pickle"))
    assert status == 0
    table, verdict = text.strip().split("\n\n")
    assert table.splitlines()[-1].split(None, 2) == ["failed", "-", "out of memory"]
    assert verdict.startswith("rank1.pickle: ")
    assert "Fragmentation is the cause" in verdict
    assert "failed" not in show(fine, fine)[1]


def test_where_memory_ran_out_comes_first(show: Any, tmp_path: Path) -> None:
    """Before a device with a higher peak; and what is listed is what was there when the request failed."""
    run = train(2, stacks=True)
    size = 4 * sum(segment.total_size for segment in run.allocator.segments())
    other = Segment(1, 1 << 40, size, 0, "large", (Block(1 << 40, size, size, ACTIVE),))
    write(
        Snapshot((*run.allocator.segments(), other), (tuple(run.events), ()), run.allocator.settings_dict()),
        tmp_path / "run.pickle",
    )
    views = views_of(read(tmp_path / "run.pickle"))
    assert [view.device for view in views] == [0, 1]
    assert views[1].peak[0] > views[0].peak[0]
    failed = max(index for index, one in enumerate(views[0].log.events) if one.action == "oom")
    text = show(str(tmp_path / "run.pickle"))[1]
    listed = text.partition("The largest allocations (at the failure), those of one stack together:\n")[2]
    assert listed.split("  ")[1].strip() == human(groups_of(views[0], failed + 1)[0].requested)
    assert "Segments (at the failure;" in text
    assert "The largest allocations (at the peak)" in show(str(tmp_path / "run.pickle"), "--at", "peak")[1]
    contents = load(tmp_path / "run.pickle").to_dict()["contents"]
    assert sum(one["bytes"] for one in contents["allocations"]) == views[0].timeline.allocated_at(failed + 1)


def test_a_state_without_events_is_one_moment(show: Any, tmp_path: Path) -> None:
    data = one_device()
    path = saved(tmp_path, {"segments": data["segments"]}, "state.pickle")
    status, text, _ = show(path)
    assert status == 0
    assert sum(line.startswith("the end (the file has no events)") for line in text.splitlines()) == 1
    assert "the start" not in text
    assert "unknown (unknown" not in text
    assert show(path, "--at", "0")[2].endswith("no event '0'. It has none: give peak or end.\n")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it is empty"),
        (b"\x80\x04cos\nsystem\n.", "it holds a global"),
        (pickle.dumps({"segments": [], "device_traces": []}), "nothing to report"),
        (b"hello", "it is neither a pickle"),
    ],
)
@pytest.mark.parametrize("command", ["show", "diff"])
def test_files_that_are_none(show: Any, tmp_path: Path, content: bytes, words: str, command: str) -> None:
    path = tmp_path / "bad\nname.pickle"
    path.write_bytes(content)
    status, text, errors = show(str(path), *([str(path)] if command == "diff" else []), command=command)
    assert (status, text) == (2, "")
    assert words in errors
    assert errors.count("\n") == 1


def test_a_file_that_is_not_there(show: Any, tmp_path: Path) -> None:
    status, _, errors = show(str(tmp_path / "none.pickle"))
    assert status == 2
    assert errors == f"gpumem: cannot read {tmp_path / 'none.pickle'}: No such file or directory\n"


def test_a_terminal_without_unicode_gets_question_marks(tmp_path: Path) -> None:
    path = saved(tmp_path, one_device(), "naïve.pickle")
    for command in ("show", "replay"):
        done = subprocess.run(
            [sys.executable, "-m", "gpumem_magic.cli", command, path],
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
            capture_output=True,
            check=False,
        )
        assert b"na?ve.pickle" in done.stdout
        assert b"codec" not in done.stderr


def test_a_hostile_file_cannot_write_to_the_terminal(show: Any, tmp_path: Path) -> None:
    data = with_markup(one_device())
    path = saved(tmp_path, data, "run\x1b[2J.pickle")
    text = show(path, "--events")[1]
    assert MARKUP[:8] in text or "red" in text
    side_by_side = show(path, saved(tmp_path, data, "b.pickle"))[1]
    difference = show(path, saved(tmp_path, one_device(), "c.pickle"), command="diff")[1]
    for shown in (text, side_by_side, difference):
        assert not [character for character in shown if not character.isprintable() and character != "\n"]


def test_nothing_goes_behind_two_dashes(show: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["show", saved(tmp_path, one_device()), "--", "more"])
    assert "show takes no arguments" in capsys.readouterr().err


def test_fragmentation_in_text() -> None:
    base = 1 << 40
    half = Segment(
        0, base, 20 * MIB, 0, "large", (Block(base, 10 * MIB, 10 * MIB, ACTIVE), Block(base + 10 * MIB, 10 * MIB, 0, INACTIVE))
    )  # fmt: skip
    empty = Segment(0, base + 64 * MIB, 2 * MIB, 0, "small", (Block(base + 64 * MIB, 2 * MIB, 0, INACTIVE),))
    full = Segment(0, base + 128 * MIB, 2 * MIB, 0, "small", (Block(base + 128 * MIB, 2 * MIB, 5, ACTIVE),))
    lines = fragmentation((half, empty, full), width=10)
    assert lines == [
        "  20.0 MiB [#####.....] 10.0 MiB free, largest piece 10.0 MiB",
        "   2.0 MiB [..........] 2.0 MiB free, largest piece 2.0 MiB",
        "3 segments; 12.0 MiB cached but free in 2 pieces, 10.0 MiB of it in segments that are partly in use.",
    ]
    assert fragmentation(()) == ["No segments."]
    assert fragmentation((full,)) == ["1 segment, all in use."]


def test_sizes_beyond_64_bits_are_refused(tmp_path: Path) -> None:
    trace = [event("segment_alloc", number << 62, (1 << 62) - 512, number, []) for number in range(4)]
    data = {"segments": [], "device_traces": [trace]}
    with pytest.raises(SnapshotFileError, match="add up to more than 8 EiB"):
        load(saved(tmp_path, data))


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real recordings (shared/data/snapshots) are not here")
@pytest.mark.parametrize("path", sorted(SHARED.glob("*.pickle.gz")), ids=lambda one: one.name.partition(".")[0])
def test_every_real_recording_is_shown(path: Path) -> None:
    loaded = read(path)
    views = views_of(loaded)
    report = Report.of(report_of(loaded, views=views))
    text = str(report)
    assert "Peak" in text
    if any(device.kind != "empty" for device in loaded.devices):
        assert report.notes, "what it lacks is said"
    for view in views:
        position = view.peak[1]
        sizes = view.sizes(position)
        parts = [size for name, size in sizes.items() if name not in ("allocated", "reserved", "cached")]
        assert sum(parts) == sizes["allocated"] == view.peak[0]
        assert min(parts) >= 0
        if any(device.has_frames for device in loaded.devices):
            live = [one for one in view.timeline.live_at(position) if view.labels[one.index].evidence == "stack"]
            assert all(view.frames_of(one) or one.born < 0 for one in live)
        assert len(fragmentation(view.timeline.segments_at(position))) >= 1


def test_the_answer_names_a_place_where_all_is_from_it_and_else_all_of_the_category() -> None:
    def told(*places: str) -> str:
        groups = [TensorGroup(100 * MIB, 1, "temporaries", inner=place) for place in places]
        return in_words([*groups, TensorGroup(60 * MIB, 9, "")], {"temporaries": 260 * MIB})

    assert told("a.py:1 f", "b.py:2 g") == "260 MiB are temporaries (100 MiB by a.py:1 f)"
    assert told("a.py:1 f", "") == "260 MiB are temporaries (100 MiB by a.py:1 f)"
    nearly = [
        TensorGroup(size * MIB, 1, "temporaries", inner=place) for size, place in ((5, "b.py:2 g"), (95, "a.py:1"))
    ]
    assert in_words(nearly, {"temporaries": 100 * MIB}) == "100 MiB are temporaries, nearly all of a.py:1"
    several = [TensorGroup(20 * MIB, 1, "temporaries", inner=f"a.py:{line}") for line in range(6)]
    assert in_words(several, {"temporaries": 120 * MIB}) == "120 MiB are temporaries"
    assert told("a.py:1 f", "a.py:1 f") == "200 MiB are temporaries of a.py:1 f"
    assert told("", "") == "260 MiB are temporaries"


def test_a_part_of_a_category_without_a_name_is_called_a_part() -> None:
    groups = [
        TensorGroup(1200 * MIB, 4, "parameters", kept_by="net"),
        TensorGroup(1024 * MIB, 4, "parameters"),
        TensorGroup(50 * MIB, 4, "gradients"),
    ]
    told = in_words(groups, {"parameters": 2224 * MIB, "gradients": 50 * MIB})
    assert told == "1,200 MiB are parameters of `net`; 1,024 MiB are parameters (of 2,224 MiB in all)"


def test_tensors_of_which_most_came_and_went_are_not_called_what_the_rest_are() -> None:
    def told(*kinds: str) -> str:
        groups = [
            TensorGroup(100 * MIB, 1, kind, "float32", (5120, 5120), statement="f(x)", line=3, keeper=str(number))
            for number, kind in enumerate(kinds)
        ]
        return in_words(groups, dict.fromkeys(kinds, 100 * MIB)).partition("`f(x)` (line 3)")[2]

    assert told("activations", "activations", "temporaries") == ": activations"
    assert told("activations", "temporaries", "temporaries") == ""


def test_parameters_that_are_whole_for_a_moment_are_told_so() -> None:
    groups = [
        TensorGroup(1025 * MIB, 32, "parameters"),
        TensorGroup(1024 * MIB, 3, "parameters", kept_by="fully_shard"),
    ]
    told = in_words(groups, {"parameters": 2049 * MIB}, most=1)
    assert told == "1,024 MiB are parameters that `fully_shard` gathered for layers at work (of 2,049 MiB in all)"


def test_the_last_part_of_a_category_is_told_with_all_of_it_where_more_is_left() -> None:
    parts = [TensorGroup(size * MIB, 4, "parameters", kept_by=name) for name, size in (("net", 1200), ("ema", 1024))]
    states = TensorGroup(1000 * MIB, 4, "optimizer_state", kept_by="AdamW")
    sizes = {"parameters": 3000 * MIB, "optimizer_state": 1001 * MIB}
    told = in_words([*parts, states], sizes)
    assert told == (
        "1,200 MiB are parameters of `net`; 1,024 MiB are parameters of `ema` (of 3,000 MiB in all); "
        "1,000 MiB are optimizer state of `AdamW`"
    )


def test_workspace_is_one_item_whichever_line_asked_for_it_first() -> None:
    groups = [
        TensorGroup(32 * MIB, 1, "workspace", statement="f(x)", line=3, expression="f(x)"),
        TensorGroup(33 * MIB, 2, "workspace"),
        TensorGroup(16 * MIB, 1, "workspace", "uint8", (16 * MIB,), operator="convolution", statement="g(x)", line=4),
        TensorGroup(20 * MIB, 4, "parameters", kept_by="net"),
    ]
    told = in_words(groups, {"workspace": 81 * MIB, "parameters": 20 * MIB})
    assert told == "81.0 MiB are workspace (scratch memory of cuBLAS and cuDNN); 20.0 MiB are parameters of `net`"


def test_json_on_standard_output_is_all_that_is_there(
    show: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = saved(tmp_path, one_device())
    status, text, errors = show(path, "--json", "-")
    assert (status, errors) == (0, "")
    assert json.loads(text)["schema"]
    assert not (tmp_path / "-").exists()
    (tmp_path / "report.json").write_text(text)
    status, _, errors = show("report.json")
    assert status == 2
    assert "Report.load" in errors
    assert "only one" in show(path, path, "--json", "-")[2]


def test_a_moment_that_was_asked_for_comes_before_the_peak(show: Any, tmp_path: Path) -> None:
    path = saved(tmp_path, one_device())
    text = show(path, "--at", "3")[1]
    assert text.splitlines()[2].startswith("After event 3: ")
    assert text.index("After event 3") < text.index("Peak ")


def test_a_file_without_events_says_so(show: Any, tmp_path: Path) -> None:
    path = saved(tmp_path, {"segments": one_device()["segments"]})
    assert "no events, only a state" in show(path, "--between", "0", "1")[2]
    assert "no events, only a state" in show(path, "--events")[1]


def test_the_picture_of_a_file(show: Any, tmp_path: Path) -> None:
    path, picture = saved(tmp_path, one_device()), tmp_path / "peak.png"
    assert show(path, "--png", str(picture))[0] == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    status, text, errors = show(path, path, "--png", str(picture))
    assert (status, text) == (2, "")
    assert "--png is for one file" in errors
    assert show(path, "--png", str(path))[0] == 2, "the file that is read is not written over"


def test_of_several_keepers_the_first_is_code_and_how_many_more_is_not() -> None:
    pair = TensorGroup(64 * MIB, 2, "inputs", "float32", (4096, 2048), keeper="name", kept_by="a and 1 more")
    own = replace(pair, kept_by="outs[0] of run()")
    assert in_words([pair], {"inputs": 64 * MIB}).endswith("tensors, kept by `a` and 1 more")
    assert in_words([own], {"inputs": 64 * MIB}).endswith("tensors, kept by `outs[0]` of run()")
