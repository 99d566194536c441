"""The report as an object: its schema, its files, and that what was saved comes back equal."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import report_samples as samples
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumem_magic.devices.base import DeviceFacts
from gpumem_magic.files import report_file
from gpumem_magic.recording.model import StandIn
from gpumem_magic.report.inside import ActivationBreakdown, LayerRow
from gpumem_magic.report.model import CATEGORIES, LATER_CATEGORIES, Cause, Folded, Peak, ReportError, Row, Skipped
from gpumem_magic.user_report import Report

SAMPLES = [samples.colab, samples.trainer, samples.two_devices, samples.small]

sizes = st.integers(0, 2**48)
maybe = st.none() | sizes
texts = st.text(max_size=20)
categories = st.fixed_dictionaries(dict.fromkeys(CATEGORIES, maybe))
figures = {
    "allocated": sizes,
    "reserved": sizes,
    "device_used": maybe,
    "peak_allocated": sizes,
    "peak_reserved": sizes,
    "categories": categories,
}


def rows(parts: st.SearchStrategy[Row] | None) -> st.SearchStrategy[Row]:
    return st.builds(
        Row,
        kind=st.sampled_from(["before", "statement", "part", "skipped", "error", "after"]),
        label=texts,
        statement=texts,
        line=st.integers(0, 10**6),
        iteration=st.lists(st.integers(1, 10**9), max_size=3).map(tuple),
        loops=st.lists(st.integers(1, 99), max_size=3).map(tuple),
        skipped=st.none()
        | st.builds(Skipped, first=st.integers(1, 9), last=st.integers(9, 99), like=st.none() | st.integers(1, 9)),
        parts=st.just(()) if parts is None else st.lists(parts, max_size=2).map(tuple),
        **figures,
    )


nested = rows(rows(rows(None)))
single = st.builds(
    Report,
    torch=texts,
    device=st.builds(
        DeviceFacts,
        name=texts,
        kind=st.sampled_from(["cuda", "virtual"]),
        index=st.integers(0, 15),
        uuid=st.none() | texts,
        total_bytes=maybe,
        smi_total_bytes=maybe,
    ),
    checkpoints=st.lists(nested, max_size=3).map(tuple),
    peak=st.builds(Peak, where=texts, **figures),
    error=st.none()
    | st.builds(
        ReportError,
        type=texts,
        message=texts,
        line=st.none() | st.integers(0, 999),
        requested=maybe,
        rounded=maybe,
        segment=maybe,
        largest_free=maybe,
    ),
    evidence=st.dictionaries(texts, sizes, max_size=3),
    retries=st.integers(0, 99),
    stand_ins=st.lists(st.builds(StandIn, line=texts, count=st.integers(1, 99)), max_size=2).map(tuple),
    folded=st.lists(st.builds(Folded, line=st.integers(1, 99), total=sizes, kept=sizes), max_size=2).map(tuple),
    remarks=st.lists(texts, max_size=2).map(tuple),
    overhead_seconds=st.floats(0, 1e9, allow_nan=False),
)
reports = st.builds(lambda first, others: replace(first, devices=tuple(others)), single, st.lists(single, max_size=1))


@settings(max_examples=40, deadline=None)
@given(reports)
def test_every_report_survives_json(report):
    assert Report.from_dict(json.loads(report.to_json())) == report
    assert Report.from_dict(report.to_dict()) == report


@settings(max_examples=15, deadline=None)
@given(reports)
def test_no_report_breaks_a_face(report):
    assert str(report)
    assert "\n" not in repr(report)
    data, _ = report.view("table")._repr_mimebundle_(include={"text/plain", "text/html"})
    assert set(data) == {"text/plain", "text/html"}


@pytest.mark.parametrize("make", SAMPLES)
def test_samples_add_up_and_have_exactly_the_schema(make):
    report = make()
    data = report.to_dict()
    assert list(data) == [
        "schema", "torch", "device", "checkpoints", "peak", "error", "evidence", "retries", "stand_ins", "folded", "notes",
        "overhead_seconds", "devices", "owners", "causes",
    ]  # fmt: skip
    assert data["schema"] == 1
    assert set(data["device"]) == {"name", "kind", "index", "uuid", "total_bytes", "smi_total_bytes"}
    for row in data["checkpoints"]:
        assert set(row) == {
            "kind", "label", "statement", "line", "iteration", "parts", "allocated", "reserved", "device_used",
            "peak_allocated", "peak_reserved", "categories",
        }  # fmt: skip
        assert tuple(row["categories"]) == CATEGORIES
        assert (
            sum(row["categories"][name] or 0 for name in CATEGORIES[: CATEGORIES.index("context")]) == row["reserved"]
        )


@pytest.mark.parametrize("make", SAMPLES)
@pytest.mark.parametrize("indent", [None, 2])
def test_a_file_holds_the_whole_report(make, indent, tmp_path):
    path = tmp_path / "report.json"
    make().save(path)
    assert Report.load(path) == make()
    path.write_text(make().to_json(indent=indent), encoding="utf-8-sig")
    assert Report.load(str(path)) == make()
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]


def test_statements_stay_readable_in_the_file(tmp_path):
    first = replace(samples.small().checkpoints[1], statement="손실 = 계산()  # 🙂", label="half \ud83d")
    report = replace(samples.small(), checkpoints=(first,))
    assert Report.from_dict(json.loads(report.to_json())) == report
    report = replace(report, checkpoints=(replace(first, label=""),))
    report.save(tmp_path / "report.json")
    assert "손실 = 계산()  # 🙂" in (tmp_path / "report.json").read_text(encoding="utf-8")


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    samples.colab().save(path)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"cannot write .*report\.json: No space left") as caught:
            samples.small().save(path)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]


def test_saving_through_a_link_keeps_the_link(tmp_path):
    (tmp_path / "real.json").write_text("old")
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "real.json")
    samples.small().save(link)
    assert link.is_symlink()
    assert Report.load(tmp_path / "real.json") == samples.small()


def test_missing_folders_and_files_are_said_in_one_line(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*make it first"):
        samples.small().save(tmp_path / "no" / "report.json")
    with pytest.raises(IsADirectoryError, match="is a folder"):
        samples.small().save(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"cannot read .*gone\.json: No such file"):
        Report.load(tmp_path / "gone.json")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not a whole JSON text"),
        (samples.small().to_json().encode()[:-5], "save the report again"),
        (b"\x80\x04", "gpumem_magic.load"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b"[1, 2]", "should be a dictionary, not list"),
        (b"{}", "'schema' is missing"),
        (b'{"schema": 2}', "newer gpumem_magic"),
        (b'{"schema": true}', "reads 1"),
        (b"[" * 100_000, "nested too deeply"),
        (samples.small().to_json().replace('"overhead_seconds": 0.0', '"overhead_seconds": NaN').encode(), "NaN"),
        (samples.small().to_json().replace('"overhead_seconds": 0.0', '"overhead_seconds": 1e999').encode(), "finite"),
    ],
)
def test_what_is_no_report_is_refused_in_one_line(content, words, tmp_path):
    path = tmp_path / "report.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words) as caught:
        Report.load(path)
    assert "\n" not in str(caught.value)
    assert "report.json" in str(caught.value)


def test_a_file_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(report_file, "MAX_FILE_BYTES", 100)
    samples.small().save(tmp_path / "report.json")
    with pytest.raises(ValueError, match="larger than any report"):
        Report.load(tmp_path / "report.json")


def every_key(data, path=()):
    """The path of every key in the report's dictionary (of the first item of a list)."""
    items = data.items() if isinstance(data, dict) else enumerate(data[:1]) if isinstance(data, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from every_key(value, (*path, key))


@pytest.mark.parametrize("make", [samples.colab, samples.trainer, samples.two_devices])
def test_any_missing_or_wrong_key_is_named(make):
    data = make().to_dict()
    for path in every_key(data):
        key = path[-1]
        broken = copy.deepcopy(data)
        place = broken
        for step in path[:-1]:
            place = place[step]
        place[key] = {1: 2}  # no key of the schema takes this
        with pytest.raises(ValueError, match=r"not|schema") as caught:
            Report.from_dict(broken)
        assert "\n" not in str(caught.value)
        if isinstance(key, str):
            assert key in str(caught.value)
        if key in LATER_CATEGORIES:
            del place[key]
            Report.from_dict(broken)  # as a report of before lacks it
        elif isinstance(key, str) and path[0] != "evidence":
            del place[key]
            with pytest.raises(ValueError, match="missing") as caught:
                Report.from_dict(broken)
        if path == ("evidence", key):
            del place[key]
            Report.from_dict(broken)  # kinds of evidence are open


def test_causes_are_kept_once_and_in_their_place_among_the_notes():
    cause = Cause("growth", "It grew.", "Delete it.", 5)
    report = replace(samples.small(), remarks=("first", cause, "last"))
    assert (report.notes, report.causes) == (("first", "It grew. Delete it.", "last"), (cause,))
    data = report.to_dict()
    assert data["notes"] == ["first", "It grew. Delete it.", "last"]
    assert data["causes"] == [{"name": "growth", "text": "It grew.", "remedy": "Delete it.", "bytes": 5}]
    assert Report.from_dict(data).remarks == report.remarks
    # Of a text that was changed by hand nothing is lost.
    data["notes"] = ["last"]
    assert Report.from_dict(data).remarks == ("last", cause)


@pytest.mark.parametrize("depth", [1, 150, 400])
def test_a_tree_of_modules_is_read_as_deep_as_modules_are(depth):
    layer = LayerRow("", "", 1, 2, 3)
    for _ in range(depth):
        layer = LayerRow("0", "Sequential", 1, 2, 3, (layer,))
    report = replace(samples.small(), inside=ActivationBreakdown("at the end", layer))
    if depth < 200:
        assert Report.from_dict(report.to_dict()) == report
        return
    data = samples.small().to_dict()
    child = {"name": "", "type": "", "activations": 1, "parameters": 2, "gradients": 3, "children": []}
    for _ in range(depth):
        child = {**child, "children": [child]}
    data["inside"] = {"moment": "at the end", "layers": child, "operators": []}
    with pytest.raises(ValueError, match="nested too deeply") as caught:
        Report.from_dict(data)
    assert len(str(caught.value)) < 200


def test_an_unknown_kind_of_row_and_true_for_a_number_are_refused():
    data = samples.small().to_dict()
    data["checkpoints"][0]["kind"] = "cell"
    with pytest.raises(ValueError, match=r"'checkpoints\[0\]\.kind' is 'cell'.*one of before, statement"):
        Report.from_dict(data)
    data = samples.small().to_dict()
    data["retries"] = True
    with pytest.raises(ValueError, match="'retries' should be a whole number, not bool"):
        Report.from_dict(data)


def test_keys_that_a_later_version_may_add_do_no_harm():
    data = samples.small().to_dict()
    data["colour"] = "blue"
    assert Report.from_dict(data) == samples.small()


def test_repr_and_views():
    assert repr(samples.colab()) == (
        "<Report Tesla V100-SXM2-16GB: peak 14,439 MiB allocated, 13 rows, OutOfMemoryError>"
    )
    assert repr(samples.small().view("plot")).startswith("<plot of <Report")
    with pytest.raises(ValueError, match="choose one of table, plot"):
        samples.small().view("picture")
    with pytest.raises(AttributeError):
        samples.small().retries = 3


def test_the_model_and_the_text_import_neither_torch_nor_matplotlib():
    code = (
        "import sys; from gpumem_magic import user_report; from gpumem_magic.files import report_file;"
        "from gpumem_magic.views import text, html, explain, display;"
        "print([name for name in ('torch', 'matplotlib', 'pynvml', 'IPython', 'PIL') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
