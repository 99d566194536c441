"""`gpumem diff`: what changed between two snapshots, by category and by place in the code."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from hostile_snapshots import BASE, event

from gpumem_magic import cli
from gpumem_magic.commands.diff_events import words
from gpumem_magic.commands.same_code import together
from gpumem_magic.files.loaded import views_of
from gpumem_magic.snapshot.files import read
from gpumem_magic.snapshot.model import INACTIVE, Block, Segment, TraceEvent
from gpumem_magic.snapshot.pairing import Recorded, pair
from gpumem_magic.snapshot.timeline import Timeline

SHARED = Path(__file__).parents[1].parent / "shared" / "data" / "snapshots"
MIB = 1 << 20
MODEL = [{"filename": "/home/me/model.py", "name": "build", "line": 10}]
BATCH = [
    {"filename": "/env/lib/python3.11/site-packages/torch/_tensor.py", "name": "to", "line": 5},
    {"filename": "/home/me/data.py", "name": "batch", "line": 20},
]


def snapshot(*requests: tuple[int, Any], freed: int = 0) -> dict[str, Any]:
    """Allocations of MiB with stacks, one behind the other; the first `freed` are freed at the end."""
    trace = [event("segment_alloc", BASE, 200 * MIB, 0, MODEL)]
    blocks = []
    address = BASE
    for number, (size, frames) in enumerate(requests):
        trace.append(event("alloc", address, size * MIB, number, frames))
        state = "inactive" if number < freed else "active_allocated"
        blocks.append(
            {"address": address, "size": size * MIB, "requested_size": size * MIB, "state": state, "frames": frames}
        )
        address += size * MIB
    for number in range(freed):
        trace += [
            event(action, blocks[number]["address"], requests[number][0] * MIB, 90, [])
            for action in ("free_requested", "free_completed")
        ]
    rest = BASE + 200 * MIB - address
    blocks.append({"address": address, "size": rest, "requested_size": 0, "state": "inactive", "frames": []})
    segment = {
        "device": 0,
        "address": BASE,
        "total_size": 200 * MIB,
        "stream": 0,
        "segment_type": "large",
        "blocks": blocks,
    }
    return {"segments": [segment], "device_traces": [trace]}


@pytest.fixture
def diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Compares two snapshots' data: the lines that it prints."""

    def run(a: Any, b: Any, *options: str) -> list[str]:
        paths = []
        for name, data in (("a.pickle", a), ("b.pickle", b)):
            path = tmp_path / name
            path.write_bytes(pickle.dumps(data, 4))
            paths.append(str(path))
        assert cli.main(["diff", *paths, *options]) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        return captured.out.splitlines()

    return run


def table_of(lines: list[str]) -> dict[str, list[str]]:
    first = next(number for number, line in enumerate(lines) if line.startswith("MiB at the"))
    rows: dict[str, list[str]] = {}
    for line in lines[first + 1 :]:
        if not line:
            break
        name, a, b, change = line.rsplit(None, 3)
        rows[name.strip()] = [a, b, change]
    return rows


def test_bytes_and_places(diff: Any) -> None:
    before = snapshot((10, MODEL), (4, BATCH), (3, []))
    after = snapshot((10, MODEL), (4, BATCH), (20, BATCH), (1, []))
    lines = diff(before, after)
    rows = table_of(lines)
    assert rows["allocated"] == ["17", "35", "+18"]
    assert rows["reserved"] == ["200", "200", "0"]
    assert rows["cached, free"] == ["183", "165", "-18"]
    places = lines[lines.index("Where the most changed:") + 1 :]
    assert places[0].split(None, 2) == ["+20.0", "MiB", "/home/me/data.py:20 batch  (4.0 MiB -> 24.0 MiB)"]
    assert places[1].split(None, 2)[:2] == ["-2.0", "MiB"]
    assert "without a stack  (3.0 MiB -> 1.0 MiB)" in places[1]
    assert len(places) == 2, "what did not change is left out"


def test_a_line_that_is_called_in_several_ways(diff: Any) -> None:
    def called_by(file: str, line: int, root: str = "/home/me") -> Any:
        return [*MODEL, {"filename": f"{root}/{file}.py", "name": "run", "line": line}]

    before = snapshot((10, called_by("train", 5)), (4, called_by("check", 9)), (6, called_by("same", 2)))
    after = snapshot(
        *[(10, called_by("train", 5, "/elsewhere"))] * 3, (1, called_by("check", 9)), (6, called_by("same", 2))
    )
    lines = diff(before, after)
    assert [" ".join(line.split()) for line in lines[lines.index("Where the most changed:") + 1 :]] == [
        "+17.0 MiB /home/me/model.py:10 build (20.0 MiB -> 37.0 MiB)",
        "+20.0 MiB 1 -> 3 allocations, called from train.py:5 run",
        "-3.0 MiB 1 -> 1 allocation, called from check.py:9 run",
    ]


def test_the_changes_of_categories_add_up(diff: Any) -> None:
    rows = table_of(diff(snapshot((40, MODEL), (7, BATCH)), snapshot((2, MODEL), (9, []), (50, BATCH))))
    change = sum(int(row[2]) for name, row in rows.items() if name not in ("allocated", "reserved", "cached, free"))
    assert change == int(rows["allocated"][2]) == 14
    assert int(rows["allocated"][2]) + int(rows["cached, free"][2]) == int(rows["reserved"][2]) == 0


def test_the_device_is_named(diff: Any) -> None:
    data = snapshot((10, MODEL))
    other = {**data["segments"][0], "device": 2, "blocks": [dict(data["segments"][0]["blocks"][-1], size=200 * MIB)]}
    lines = diff(data, {**data, "segments": [*data["segments"], other]})
    assert lines[0].endswith("a.pickle, GPU 0")
    assert lines[1].endswith("b.pickle, GPU 0 (it has GPU 2 too)")


def test_a_script_that_was_renamed_is_the_same_code() -> None:
    a = {f"/x/train_v1.py:{line} step": 10 + line for line in range(5)} | {"/x/util.py:3 helper": 5}
    b = {f"/x/train_v2.py:{line} step": 20 + line for line in (*range(4), 9)} | {"/x/other.py:4 other": 6}
    found = together(a, b)
    for line in range(4):
        assert found[f"train_v1.py -> train_v2.py:{line} step"] == (10 + line, 20 + line)
    assert found["/x/train_v1.py:4 step"] == (14, 0)
    assert found["/x/train_v2.py:9 step"] == (0, 29)
    assert found["/x/util.py:3 helper"] == (5, 0)
    assert found["/x/other.py:4 other"] == (0, 6)


def test_equal_files(diff: Any) -> None:
    lines = diff(snapshot((10, MODEL)), snapshot((10, MODEL)))
    assert all(row[2] == "0" for row in table_of(lines).values())
    assert "Where the most changed:" not in lines


def test_two_programs(diff: Any) -> None:
    """Then all of both is a change, which a reader should know."""
    lines = diff(snapshot((10, MODEL), (3, [])), snapshot((4, BATCH), (3, [])))
    assert "No line of code is in both" in lines[lines.index("Where the most changed:") + 1]


def test_at_the_end_and_only_some_places(diff: Any) -> None:
    before, after = snapshot((10, MODEL), (4, BATCH)), snapshot((10, MODEL), (4, BATCH), freed=1)
    assert table_of(diff(before, after))["allocated"][2] == "0"
    lines = diff(before, after, "--at", "end", "--top", "1")
    assert table_of(lines)["allocated"] == ["14", "4", "-10"]
    assert lines[-1].split(None, 2) == ["-10.0", "MiB", "/home/me/model.py:10 build  (10.0 MiB -> 0 B)"]
    assert lines[-2] == "Where the most changed:"


def test_a_device_that_one_of_them_lacks(diff: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    diff(snapshot((10, MODEL)), snapshot((10, MODEL)), "--device", "0")
    assert cli.main(["diff", str(tmp_path / "a.pickle"), str(tmp_path / "b.pickle"), "--device", "2"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"gpumem: {tmp_path / 'a.pickle'}: it has no device 2")


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real recordings (shared/data/snapshots) are not here")
def test_two_real_recordings(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("transformer-forward-b150", "transformer-forward-backward-b100")
    paths = [str(SHARED / f"{name}.pickle.gz") for name in names]
    assert cli.main(["diff", *paths]) == 0
    rows = table_of(capsys.readouterr().out.splitlines())
    peaks = [views_of(read(path))[0].peak[0] for path in paths]
    assert rows["allocated"][:2] == [f"{round(peak / MIB):,}" for peak in peaks]
    for column in range(2):
        parts = [
            int(row[column].replace(",", ""))
            for name, row in rows.items()
            if name not in ("allocated", "reserved", "cached, free")
        ]
        # Each is rounded to a whole MiB.
        assert abs(sum(parts) - int(rows["allocated"][column].replace(",", ""))) <= len(parts)


def test_runs_from_different_folders_are_the_same_code(diff: Any) -> None:
    def trained(folder: str, size: int) -> dict[str, Any]:
        return snapshot(
            (size, [{"filename": f"{folder}/src/train.py", "name": "step", "line": 7}]),
            (3, [{"filename": f"{folder}/src/data.py", "name": "load", "line": 2}]),
        )

    lines = diff(trained("/home/me/run1", 10), trained("/scratch/you", 16))
    changed = lines[lines.index("Where the most changed:") + 1 :]
    assert changed == ["     +6.0 MiB  .../src/train.py:7 step  (10.0 MiB -> 16.0 MiB)"]


def test_the_longest_end_of_a_path_decides() -> None:
    a = {"/a/x/model/__init__.py:1 f": 1, "/a/x/data/__init__.py:1 f": 2, "native::op": 5}
    b = {"C:\\b\\model\\__init__.py:1 f": 10, "C:\\b\\data\\__init__.py:1 f": 20, "native::op": 7}
    assert together(a, b) == {
        ".../model/__init__.py:1 f": (1, 10),
        ".../data/__init__.py:1 f": (2, 20),
        "native::op": (5, 7),
    }


def test_what_could_be_either_is_neither() -> None:
    a, b = {"/a/one/run.py:1 f": 1, "/a/two/run.py:1 f": 2}, {"/b/run.py:1 f": 4}
    assert together(a, b) == {**{place: (size, 0) for place, size in a.items()}, "/b/run.py:1 f": (0, 4)}


def test_one_path_in_both_runs_stands_for_itself_only() -> None:
    a, b = {"/a/run.py:1 f": 1}, {"/a/run.py:1 f": 2, "/b/run.py:1 f": 4}
    assert together(a, b) == {"/a/run.py:1 f": (1, 2), "/b/run.py:1 f": (0, 4)}


def test_a_line_that_only_one_run_has_keeps_its_whole_path() -> None:
    assert together({"/a/run.py:1 f": 1}, {"/b/run.py:2 f": 4}) == {"/a/run.py:1 f": (1, 0), "/b/run.py:2 f": (0, 4)}


# ---- allocation by allocation


def test_two_recordings_are_compared_allocation_by_allocation(diff: Any) -> None:
    a = snapshot((10, MODEL), (20, BATCH), (30, BATCH), freed=1)
    b = snapshot((10, MODEL), (30, BATCH), (5, MODEL), freed=1)
    lines = diff(a, b, "--events")
    text = "\n".join(lines)
    assert lines[3] == "B's peak is 25.00 % lower: 45.0 MiB more than at the start, A's 60.0 MiB."
    # 10 and 30 have partners: four of six, and 40 of 60 MiB.
    assert "66.67 % of the allocations match, and 66.67 % of A's bytes." in lines
    assert "They first part after 1 allocation: A asks for 20,971,520 bytes" in text
    assert "data.py:20" in text
    assert "model.py:10" in text.partition("Only in B:")[2]
    assert any(line.startswith("growth at end") for line in lines)


def test_a_line_of_the_program_stands_before_one_of_a_library(diff: Any) -> None:
    library = {"filename": "/env/lib/python3.11/site-packages/einops/_backends.py", "name": "einsum", "line": 291}
    cell = {"filename": "/tmp/ipykernel_7/12.py", "name": "<module>", "line": 3}
    lines = diff(snapshot((10, [library, *MODEL])), snapshot((20, [library, cell]), (30, [library])), "--events")
    assert "/home/me/model.py:10 build" in lines[lines.index("Only in A:") + 1]
    of_b = lines[lines.index("Only in B:") + 1 :]
    assert "_backends.py:291 einsum" in of_b[0]
    assert "12.py:3 <module>" in of_b[1]
    assert any(
        line.startswith("They part at the first allocation: A asks for 10,485,760 bytes, /home/me") for line in lines
    )


def test_what_both_ask_for_in_another_order_is_neithers_alone(diff: Any) -> None:
    a = snapshot((10, MODEL), (20, BATCH), (30, MODEL), (40, BATCH))
    b = snapshot((10, MODEL), (30, MODEL), (40, BATCH), (20, BATCH))
    for one, other, when in ((a, b, "2 allocations later"), (b, a, "2 allocations sooner")):
        lines = diff(one, other, "--events")
        at = lines.index("Both ask for these, B in another order:")
        assert lines[at + 1].split()[:4] == ["1", "x", "20,971,520", "bytes"]
        assert f"  {when}: " in lines[at + 1]
        assert not any(line.startswith("Only in") for line in lines)
    far = [(1, BATCH)] * 20
    lines = diff(snapshot((20, MODEL), *far), snapshot(*far, (20, MODEL)), "--events")
    assert [line for line in lines if line.startswith(("Only", "Both"))] == ["Only in A:", "Only in B:"]


def test_what_is_freed_at_another_time_is_said(diff: Any) -> None:
    kept, freed = snapshot((10, MODEL), (20, BATCH)), snapshot((10, MODEL), (20, BATCH), freed=1)
    for a, b, when in ((kept, freed, "although A never does"), (freed, kept, "never")):
        lines = diff(a, b, "--events")
        at = lines.index("B frees at another time:")
        assert lines[at + 1].split()[:4] == ["1", "x", "10,485,760", "bytes"]
        assert f"  {when}: " in lines[at + 1]
        assert "model.py:10" in lines[at + 1]


def test_blocks_that_were_cut_otherwise_are_said() -> None:
    """10.5 MiB take a free block of 11 MiB whole, and 10.5 of one of 40."""

    def begun(free: int) -> Recorded:
        start = (Segment(0, 64 * MIB, free, 0, "large", (Block(64 * MIB, free, 0, INACTIVE),)),)
        events = [TraceEvent("alloc", 64 * MIB, 21 * MIB // 2)]
        return Recorded(start, events, Timeline(start, events))

    one, other = begun(11 * MIB), begun(40 * MIB)
    lines = list(words(one, other, pair(one, other), 3))
    assert lines[0] == "B's peak is 4.55 % lower: 10.5 MiB more than at the start, A's 11.0 MiB."
    assert [line.strip() for line in lines if "keep" in line] == [
        "the bytes asked for grow alike: blocks keep more beside them in A, up to 1 MiB each"
    ]
    assert not any("keep" in line for line in words(one, one, pair(one, one), 3))


def test_recordings_of_two_programs_are_said_to_be_that(diff: Any) -> None:
    lines = diff(snapshot((10, MODEL), (20, BATCH), (5, BATCH)), snapshot((30, MODEL), (5, BATCH)), "--events")
    assert lines[3].startswith("Hardly one program's: 40.00 % of the allocations match.")


def test_a_recording_agrees_with_itself(diff: Any) -> None:
    same = snapshot((10, MODEL), (20, BATCH), freed=1)
    lines = diff(same, same, "--events")
    assert "100.00 % of the allocations match, and 100.00 % of A's bytes." in lines
    assert lines[3] == "The peak is the same: 30.0 MiB more than at the start."
    assert not any(line.startswith(("Only in", "They first part", "B frees")) for line in lines)


class Marked:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("a file was executed",))


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps(Marked()), pickle.dumps({"segments": 3})])
def test_what_is_no_recording_is_one_line(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "good.pickle", tmp_path / "bad.pickle"
    good.write_bytes(pickle.dumps(snapshot((10, MODEL))))
    bad.write_bytes(content)
    for files in ((good, bad), (bad, good)):
        assert cli.main(["diff", "--events", *map(str, files)]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("gpumem: ")
        assert len(captured.err.strip().splitlines()) == 1
        assert captured.out == ""


def test_a_snapshot_without_events_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "still.pickle"
    path.write_bytes(pickle.dumps({**snapshot((10, MODEL)), "device_traces": [[]]}))
    assert cli.main(["diff", "--events", str(path), str(path)]) == 2
    assert "no events to compare" in capsys.readouterr().err
