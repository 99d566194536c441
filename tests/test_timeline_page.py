"""The timeline page: what is in it, that it counts as the ledger does, and that nothing of a hostile file leaves its place."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import pickle
import random
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pages_own_tests
import pytest
from causes_cells import notebook
from hostile_snapshots import MARKUP, recording, with_markup
from hypothesis import given, settings
from hypothesis import strategies as st

import gpumem_magic
from gpumem_magic.attribution.ledger import TENANT_CATEGORIES
from gpumem_magic.attribution.view import DeviceView
from gpumem_magic.files.loaded import position_of, report_of, views_of
from gpumem_magic.snapshot.files import read
from gpumem_magic.timeline_page import page as page_module
from gpumem_magic.timeline_page.data import page_data, plain, script_json
from gpumem_magic.timeline_page.page import document
from gpumem_magic.timeline_page.source import TimelineMark, source_of
from gpumem_magic.timeline_page.view import TimelineView, timeline_of_files
from gpumem_magic.user_report import Report, load

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared" / "data" / "snapshots"
NODE = shutil.which("node")
_SCRIPTS = re.compile(r"<script([^>]*)>(.*?)</script>", re.DOTALL)


def saved(folder: Path, data: Any, name: str = "run.pickle") -> Path:
    path = folder / name
    path.write_bytes(pickle.dumps(data, 4))
    return path


def opened(path: Path) -> list[DeviceView]:
    return views_of(read(path))


def data_of(page: str) -> Any:
    """The numbers in a page, as the browser reads them."""
    ((attributes, text),) = [one for one in _SCRIPTS.findall(page) if "application/json" in one[0]]
    assert 'id="data"' in attributes
    return json.loads(text)


def with_node(program: str, content: str) -> Any:
    """What an ES module prints as JSON, given a text on its standard input; the page's modules are at `model` and `machine`."""
    if NODE is None:
        pytest.skip("node is not installed")
    folder = (ROOT / "gpumem_magic" / "timeline_page").as_uri()
    head = (
        f'import {{ Device, paint, wholeView }} from "{folder}/model.js";\n'
        'import { readFileSync } from "node:fs";\nconst input = readFileSync(0, "utf8");\n'
    )
    done = subprocess.run(
        [NODE, "--input-type=module", "-e", head + program], input=content, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


# What is in it


def test_the_columns_are_the_allocations(tmp_path: Path) -> None:
    (view,) = opened(saved(tmp_path, recording(random.Random(3), 60)))[:1]
    device = json.loads(script_json(page_data("a run", [source_of(view, "GPU 0")])))["devices"][0]
    born = 0
    for number, one in enumerate(view.timeline.allocations):
        born += device["born"][number]
        assert born == one.born
        assert device["lived"][number] == (-1 if one.freed is None else one.freed - one.born)
        assert (device["address"][number], device["size"][number]) == (one.address, one.size)
        label = view.labels[number]
        assert TENANT_CATEGORIES[device["category"][number]] == label.category
        texts = [device["strings"][code // 3] for code in device["stacks"][device["stack"][number]]]
        frames = view.log.events[one.born].frames
        assert len(texts) == len(frames)
        end = device["freedBy"][number]
        assert len(device["stacks"][end] if end >= 0 else ()) == len(view.frames_of_free(one))
        if frames:
            assert texts[0].endswith(".py:12 step") or "adam.py:180" in texts[0], "Python's frames come first"
    for told, extent in zip(device["extents"], view.timeline.extents, strict=True):
        assert len(device["stacks"][told[-1]]) == len(view.frames_of_extent(extent))
    assert any(device["stacks"][told[-1]] for told in device["extents"])
    assert device["events"] == len(view.log.events)
    assert device["notes"] == list(view.recording.notes)


@pytest.mark.parametrize("length", [0, 1, 30, 300])
def test_the_page_counts_as_the_ledger_does(tmp_path: Path, length: int) -> None:
    views = opened(saved(tmp_path, recording(random.Random(length), length)))
    content = script_json(page_data("a run", [source_of(view, "GPU") for view in views]))
    program = """
        const data = JSON.parse(input);
        const answer = data.devices.map((one) => {
          const device = new Device(one);
          return [...Array(device.events + 1).keys()].map((p) => {
            const { sizes, rounding, allocated, reserved } = device.sums(p, data.categories.length);
            const free = device.segmentsAt(p).reduce((sum, s) => sum + s.size - s.used, 0);
            return { sizes, rounding, allocated, reserved, free, height: device.height[p], peak: device.peak };
          });
        });
        console.log(JSON.stringify(answer));
    """
    for view, positions in zip(views, with_node(program, content), strict=True):
        assert len(positions) == len(view.timeline) + 1
        for position, found in enumerate(positions):
            told = view.sizes(position)
            assert found["sizes"] == [told[name] for name in TENANT_CATEGORIES]
            assert found["rounding"] == told["rounding"]
            assert found["allocated"] == found["height"] == told["allocated"]
            assert found["reserved"] == told["reserved"]
            assert found["reserved"] - found["allocated"] == told["cached"] >= found["free"]
            assert found["peak"] == view.peak[1]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real recordings (shared/data/snapshots) are not here")
@pytest.mark.parametrize(
    "name", ["small-97-events", "transformer-xl-forward-expandable", "alloc-and-free-completed-only", "one-event"]
)
def test_real_recordings_count_alike_in_the_page(name: str) -> None:
    (view,) = opened(SHARED / f"{name}.pickle.gz")[:1]
    content = script_json(page_data(name, [source_of(view, "GPU")]))
    program = """
        const data = JSON.parse(input);
        const device = new Device(data.devices[0]);
        const step = Math.max(Math.floor(device.events / 50), 1);
        const answer = [];
        for (let p = 0; p <= device.events; p += step) {
          const segments = device.segmentsAt(p);
          answer.push([p, device.sums(p, data.categories.length), segments.length,
            segments.reduce((sum, s) => sum + s.size, 0), segments.reduce((sum, s) => sum + s.used, 0)]);
        }
        console.log(JSON.stringify(answer));
    """
    for position, sums, segments, total, used in with_node(program, content):
        told = view.sizes(position)
        there = view.timeline.segments_at(position)
        assert sums["sizes"] == [told[category] for category in TENANT_CATEGORIES]
        assert (sums["allocated"], sums["reserved"]) == (told["allocated"], told["reserved"])
        assert (segments, total) == (len(there), sum(one.total_size for one in there))
        assert used == sum(one.active_size for one in there)


def test_the_marks_of_a_file_are_errors_and_ranges(tmp_path: Path) -> None:
    data = recording(random.Random(1), 30)
    first = data["device_traces"][0]
    first.insert(10, {"action": "oom", "device_free": 5, "size": 1 << 40, "stream": 0, "time_us": 1_000_008})
    data["external_annotations"] = [
        {"device": 0, "time_us": first[20]["time_us"], "stage": "START", "name": "epoch 3"},
        {"device": 0, "time_us": first[21]["time_us"], "stage": "END", "name": "epoch 3"},
        {"device": 9, "time_us": first[20]["time_us"], "stage": "START", "name": "elsewhere"},
        {"device": 0, "time_us": "soon", "stage": "START", "name": 7},
    ]
    views = [view for view in opened(saved(tmp_path, data)) if view.device == 0]
    source = source_of(views[0], "GPU 0")
    assert [(mark.words, mark.kind) for mark in source.marks] == [("out of memory", "error"), ("epoch 3", "range")]
    assert source.marks[0].position == 10
    assert "out of memory" in document("a run", [source])


def test_the_marks_of_a_cell_say_during_which_statement_an_event_came(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = "%%gpumem\nn = 1\na = torch.ones(256, device='cuda')\nb = a.repeat(4)\n"
    with notebook("virtual:64MiB,context=0MiB,idle=0MiB") as book:
        book.cell(cell + "c = torch.ones(1 << 30, device='cuda')")
        report = gpumem_magic.last_report()
    assert report is not None

    def names(marks: Sequence[TimelineMark]) -> list[str]:
        return [mark.words.split(" = ")[0] for mark in marks]

    (source,) = report.timeline().sources
    events = source.view.log.events
    assert names(source.marks) == ["a", "b", "c", "failed: c"], "n = 1 asked for nothing"
    during = {
        event.size: names([mark for mark in source.marks if mark.position <= number])[-1]
        for number, event in enumerate(events)
        if event.action == "alloc"
    }
    assert (during[1024], during[4096]) == ("a", "b")
    # Too many for a chart: what follows has no words, and where it failed is kept.
    monkeypatch.setattr("gpumem_magic.timeline_page.source._MOST_MARKS", 1)
    (source,) = report.timeline().sources
    assert names(source.marks) == ["a", "", "failed: c"]


def test_the_page_opens_where_it_is_asked_to(tmp_path: Path) -> None:
    views = opened(saved(tmp_path, recording(random.Random(3), 60)))
    for at, position in (("peak", views[0].peak[1]), ("end", len(views[0].timeline)), ("7", 8)):
        assert (
            data_of(timeline_of_files([views], position_of(views[0], at)).to_html())["devices"][0]["opensAt"]
            == position
        )


# One file, and nothing else


def test_the_page_is_one_file_that_allows_only_itself(tmp_path: Path) -> None:
    page = timeline_of_files([opened(saved(tmp_path, recording(random.Random(2))))]).to_html()
    assert "http" not in page.replace('http-equiv="Content-Security-Policy"', "")
    assert "//" not in re.sub(r"(?m)(^|\s)// .*$", "", page.replace("/*", "").replace("*/", ""))
    for word in ("fetch(", "XMLHttpRequest", "import(", "eval(", "innerHTML", "document.write", "@import", "url("):
        assert word not in page
    assert not re.search(r"<[^>]*\s(src|href|on\w+|style)=", page[: page.index('id="data"')].split("</style>")[1])
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    policy = html.unescape(policy)
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    (script,) = [text for attributes, text in _SCRIPTS.findall(page) if "module" in attributes]
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    for text, kind in ((script, "script-src"), (style, "style-src")):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}'" in policy


def test_the_modules_become_one_script() -> None:
    script = page_module._script()
    assert "import " not in re.sub(r"/\*.*?\*/|//.*", "", script, flags=re.DOTALL)
    assert not re.search(r"^export ", script, re.MULTILINE)
    names = re.findall(r"^(?:function|class|const|let) (\w+)", script, re.MULTILINE)
    assert len(names) == len(set(names)), "two modules use one name"


def test_a_page_without_devices_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one device"):
        document("nothing", [])
    with pytest.raises(ValueError, match="at least one device"):
        TimelineView("nothing", [])


# Hostile texts


def test_markup_in_a_file_stays_text(tmp_path: Path) -> None:
    path = saved(tmp_path, with_markup(recording(random.Random(4), 60)))
    loaded = read(path)
    views = views_of(loaded)
    view = timeline_of_files([views])
    page = document(MARKUP, view.sources)
    assert page.count("<script") == page.count("</script>") == 2
    assert "<img" not in page
    assert "onerror=" not in page[: page.index('id="data"')].replace(html.escape(MARKUP), "")
    data = data_of(page)
    assert data["title"] == MARKUP
    assert any(MARKUP in text for text in data["devices"][0]["strings"])
    element = TimelineView(MARKUP, view.sources)._repr_mimebundle_()[0]["text/html"]
    assert element.count("<img") == 1
    assert element.count("<iframe") == 1
    assert "onerror" not in re.sub(r'srcdoc="[^"]*"|title="[^"]*"', "", element)
    assert "\x1b" not in str(Report.of(report_of(loaded, views=views)))


@given(st.text(max_size=900))
@settings(max_examples=200)
def test_any_text_is_short_printable_and_cannot_end_the_element(text: str) -> None:
    clean = plain(text)
    assert len(clean) <= 300
    assert clean.isprintable() or not clean
    written = script_json({"text": text, text: [text]})
    assert not set(written) & set("<>&\u2028\u2029\n")
    assert json.loads(written) == {"text": text, text: [text]}


# In a notebook


def shown(path: Path, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return load(path).timeline()._repr_mimebundle_(**more)


def test_the_notebook_gets_a_frame_a_picture_and_words(tmp_path: Path) -> None:
    path = saved(tmp_path, recording(random.Random(2), 80))
    data, metadata = shown(path)
    assert data["text/plain"].startswith("<Timeline of GPU 0: ")
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert metadata["image/png"]["alt"]
    (frame,) = re.findall(r"<iframe ([^>]*)>", data["text/html"])
    assert 'sandbox="allow-scripts"' in frame
    (srcdoc,) = re.findall(r'srcdoc="([^"]*)"', frame)
    assert html.unescape(srcdoc) == load(path).timeline().to_html()
    # Where frames are taken out, the picture is left.
    rest = re.sub(r"<iframe.*?</iframe>", "", data["text/html"], flags=re.DOTALL)
    assert 'src="data:image/png;base64,' in rest
    assert 'alt="&lt;Timeline of' in rest


def test_nothing_is_drawn_that_nobody_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    view = load(saved(tmp_path, recording(random.Random(2)))).timeline()
    drawn: list[bool] = []
    monkeypatch.setattr(view, "to_png", lambda: drawn.append(True))
    assert set(view._repr_mimebundle_(include=["text/plain"])[0]) == {"text/plain"}
    assert not drawn


def test_a_picture_that_fails_leaves_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    view = load(saved(tmp_path, recording(random.Random(2)))).timeline()

    def broken() -> Any:
        raise RuntimeError("no fonts")

    monkeypatch.setattr(view, "to_png", broken)
    with pytest.warns(UserWarning, match="could not draw the timeline: RuntimeError: no fonts"):
        data, _ = view._repr_mimebundle_()
    assert set(data) == {"text/plain", "text/html"}


def test_the_picture_shows_every_layer_that_is_there(tmp_path: Path) -> None:
    import io

    import numpy as np
    from PIL import Image

    from gpumem_magic.views.palette import COLOURS

    path = saved(tmp_path, recording(random.Random(6), 120))
    view = load(path).timeline()
    content, width, height = view.to_png()
    image = np.asarray(Image.open(io.BytesIO(content)).convert("RGB")).reshape(-1, 3)
    assert len(image) == width * height
    sizes = views_of(read(path))[0].sizes(view.sources[0].view.peak[1])
    for name in (*TENANT_CATEGORIES, "cached"):
        colour = [int(COLOURS[name][at : at + 2], 16) for at in (1, 3, 5)]
        pixels = int((image == colour).all(axis=1).sum())
        assert pixels > 100 or sizes[name] < 0.01 * sizes["reserved"], name


def test_dollars_and_many_devices_do_not_trouble_the_picture(tmp_path: Path) -> None:
    files: Sequence[list[DeviceView]] = [
        opened(saved(tmp_path, recording(random.Random(number), 20), f"$\\frac{{rank}}$ {number}.pickle"))
        for number in range(6)
    ]
    assert timeline_of_files(files).to_png()[0].startswith(b"\x89PNG")


# Files, ranks, reports


def test_a_page_is_replaced_as_a_whole(tmp_path: Path) -> None:
    view = load(saved(tmp_path, recording(random.Random(2)))).timeline()
    target = tmp_path / "page.html"
    target.write_text("before")
    view.save(target)
    assert target.read_text("utf-8") == view.to_html()
    with pytest.raises(OSError, match="nowhere"):
        view.save(tmp_path / "nowhere" / "page.html")
    assert {one.name for one in tmp_path.iterdir()} == {"run.pickle", "page.html"}


def test_several_ranks_are_side_by_side(tmp_path: Path) -> None:
    files = [opened(saved(tmp_path, recording(random.Random(seed), 40), f"rank{seed}.pickle")) for seed in (0, 5)]
    view = timeline_of_files(files)
    names = [device["name"] for device in data_of(view.to_html())["devices"]]
    assert len(names) == sum(map(len, files))
    assert names[0].startswith("rank0.pickle")
    assert names[-1].startswith("rank5.pickle")
    assert view.title == "2 recordings: rank0.pickle, rank5.pickle"


def test_a_report_without_its_recording_says_so(tmp_path: Path) -> None:
    report = load(saved(tmp_path, recording(random.Random(2))))
    copy = Report.from_dict(report.to_dict())
    assert copy == report
    with pytest.raises(ValueError, match="has no recording"):
        copy.timeline()
    with pytest.raises(ValueError, match="has no recording"):
        copy.save_snapshot(tmp_path / "out.pickle")


def test_the_pages_own_tests_pass() -> None:
    pages_own_tests.run("timeline.test.mjs")
