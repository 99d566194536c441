"""The published JSON schema: it is the dataclasses', and every report that is written keeps to it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import report_samples
from hostile_snapshots import recording
from project_scripts import load as load_script
from test_show import saved

from gpumem_magic import cli
from gpumem_magic.files.loaded import views_of
from gpumem_magic.snapshot.files import read
from gpumem_magic.user_report import Report, load

jsonschema = pytest.importorskip("jsonschema")
DOCS = Path(__file__).resolve().parents[1] / "docs"
json_schema = load_script(DOCS / "json_schema.py").json_schema
SHARED = DOCS.parents[1] / "shared" / "data" / "snapshots"


def checked(data: Any) -> Any:
    jsonschema.Draft202012Validator(json_schema()).validate(data)
    return data


def test_it_is_a_schema_and_says_what_everything_is() -> None:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    assert all(one["description"] for one in schema["$defs"].values())
    report = schema["$defs"]["ReportData"]["properties"]
    assert set(load_sample()) <= set(report)
    page = (DOCS / "json.md").read_text("utf-8")
    assert "report.schema.json" in page


def load_sample() -> dict[str, Any]:
    data: dict[str, Any] = report_samples.colab().to_dict()
    return data


@pytest.mark.parametrize("name", ["colab", "trainer", "two_devices", "small"])
def test_reports_of_cells(name: str) -> None:
    checked(json.loads(getattr(report_samples, name)().to_json()))


def test_what_is_none_is_refused(tmp_path: Path) -> None:
    data = json.loads(load(saved(tmp_path, recording(random.Random(1), 60))).to_json())
    checked(data)
    for change in ({"schema": 2}, {"peak": None}, {"device": {}}, {"contents": {"where": "here"}}):
        with pytest.raises(jsonschema.ValidationError):
            checked({**data, **change})
    wrong = json.loads(json.dumps(data))
    wrong["contents"]["allocations"][0]["bytes"] = "many"
    with pytest.raises(jsonschema.ValidationError):
        checked(wrong)


def _contents_add_up(path: str, data: dict[str, Any], at: str) -> None:
    """The groups and segments are all that the device holds then, with the stacks of the file."""
    for report in (data, *data["devices"]):
        view = views_of(read(path), report["device"]["index"])[0]
        position = view.peak[1] if at == "peak" else view.end
        contents = report["contents"]
        assert contents["position"] == position
        assert sum(group["bytes"] for group in contents["allocations"]) == view.timeline.allocated_at(position)
        assert sum(group["requested"] for group in contents["allocations"]) == view.timeline.requested_at(position)
        assert sum(group["count"] for group in contents["allocations"]) == len(view.timeline.live_at(position))
        assert sum(segment["bytes"] for segment in contents["segments"]) == view.timeline.reserved_at(position)
        stacks = [[tuple(contents["frames"][number].values()) for number in one] for one in contents["stacks"]]
        assert {tuple(stacks[group["stack"]]) for group in contents["allocations"]} == {
            view.frames_of(one) for one in view.timeline.live_at(position)
        }
        for segment, found in zip(view.timeline.segments_at(position), contents["segments"], strict=True):
            assert (segment.address, segment.total_size) == (found["address"], found["bytes"])
            assert segment.active_size == found["in_use"]
            asked = [
                event.frames
                for event in view.log.events[:position]
                if event.action == "segment_alloc" and event.address == segment.address
            ]
            if asked:
                assert tuple(stacks[found["stack"]]) == asked[-1]


@pytest.mark.parametrize("at", ["peak", "end"])
@pytest.mark.parametrize("seed", [1, 5, 9])
def test_files(seed: int, at: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = saved(tmp_path, recording(random.Random(seed), 80)), tmp_path / "report.json"
    assert cli.main(["show", path, "--at", at, "--json", str(out)]) == 0
    capsys.readouterr()
    data = checked(json.loads(out.read_text("utf-8")))
    _contents_add_up(path, data, at)
    assert Report.load(out).to_dict() == data


@pytest.mark.parametrize("path", sorted(SHARED.glob("*.pickle.gz")) or [None], ids=lambda path: path and path.name)
def test_real_recordings(path: Path | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if path is None:
        pytest.skip("the recordings are not here")
    out = tmp_path / "report.json"
    assert cli.main(["show", str(path), "--json", str(out)]) == 0
    capsys.readouterr()
    _contents_add_up(str(path), checked(json.loads(out.read_text("utf-8"))), "peak")


def test_several_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = saved(tmp_path, recording(random.Random(2), 60))
    broken, out = tmp_path / "broken.pickle", tmp_path / "all.json"
    broken.write_bytes(b"")
    assert cli.main(["show", good, str(broken), "--json", str(out)]) == 2
    capsys.readouterr()
    data = checked(json.loads(out.read_text("utf-8")))
    assert [one["file"] for one in data["files"]] == [good, str(broken)]
    assert data["files"][0]["report"] == load(good).to_dict()
    assert "it is empty" in data["files"][1]["error"]
