"""What a watch leaves behind and shows: numbers, text, pictures; and the widget's messages."""

from __future__ import annotations

import base64
import csv
import io
import json
import math
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from array import array
from pathlib import Path
from typing import Any

import pages_own_tests
import pytest
from watch_fakes import MIB, FakeDevice, observer_of

from gpumem_magic.views.palette import COLOURS
from gpumem_magic.widgets.columns import LAYER_COLOURS, LAYER_LABELS, LAYERS, SENT
from gpumem_magic.widgets.page import left_behind
from gpumem_magic.widgets.picture import svg
from gpumem_magic.widgets.samples import duration
from gpumem_magic.widgets.watch import Watch, WatchSamples


class NoFront:
    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


def watched(count: int = 40, devices: int = 1, capacity: int = 16) -> WatchSamples:
    made = [FakeDevice(index, f"F{index}") for index in range(devices)]
    observer, clock = observer_of(*made, capacity=capacity)
    watch = Watch(10, lambda _: NoFront(), observer)
    watch._started = clock.time
    for number in range(count):
        size = (number % 10) * 10 * MIB
        for device in made:
            device.now = (size, 200 * MIB, size)
        if number == 5:
            observer.mark("<warm> & ready")
        observer.observe()
        clock.time += 0.1
    watch._ended = clock.time
    return watch.samples()


def test_numbers_survive_json_and_csv() -> None:
    samples = watched(devices=2)
    data = json.loads(json.dumps(samples.to_dict(), allow_nan=False))
    assert data["schema"] == 1
    assert data["columns"] == list(SENT)
    assert [device["name"] for device in data["devices"]] == ["F0", "F1"]
    assert data["devices"][0]["samples"] == 40
    assert data["devices"][0]["peak_allocated"] == 90 * MIB
    rows = data["devices"][0]["rows"]
    assert len(rows) <= 16
    assert all(len(row) == len(SENT) for row in rows)
    assert rows[0][SENT.index("context_or_others")] is None
    assert data["marks"][0]["label"] == "<warm> & ready"
    table = list(csv.DictReader(io.StringIO(samples.to_csv())))
    assert len(table) == sum(len(device["rows"]) for device in data["devices"])
    assert {row["device"] for row in table} == {"cuda:0", "cuda:1"}
    assert max(int(row["allocated"]) for row in table) == 90 * MIB
    assert table[0]["context_or_others"] == ""


def test_csv_goes_to_a_file_too(tmp_path: Path) -> None:
    samples = watched()
    assert samples.to_csv(tmp_path / "w.csv") == (tmp_path / "w.csv").read_text()


def test_the_summary_says_the_peak_and_the_marks() -> None:
    text = str(watched())
    assert "GPU memory, watched: 4.0 s, 40 samples at up to 10 Hz" in text
    assert "peak allocated 90.0 MiB" in text
    assert "nvidia-smi up to 500 MiB of 1,024 MiB" in text
    assert "<warm> & ready (0.5 s)" in text
    assert "No GPU was in use" in str(watched(devices=0))


def test_durations_read_like_durations() -> None:
    assert [duration(seconds) for seconds in (0.04, 59.9, 60, 3599, 7620)] == [
        "0.0 s",
        "59.9 s",
        "1 min 00 s",
        "59 min 59 s",
        "2 h 07 min",
    ]


@pytest.mark.parametrize(("count", "devices"), [(0, 0), (0, 1), (1, 1), (40, 2), (3000, 1)])
def test_the_svg_is_well_formed_small_and_self_contained(count: int, devices: int) -> None:
    text = svg(watched(count, devices, capacity=4096))
    ElementTree.fromstring(text)
    assert len(text) < 40_000 * max(devices, 1)
    assert "<script" not in text
    assert text.count("http") == text.count("http://www.w3.org/2000/svg")
    assert "<warm>" not in text


def test_the_svg_has_the_reports_colours() -> None:
    text = svg(watched())
    assert COLOURS["cached"] in text
    assert COLOURS["context"] in text
    assert LAYER_LABELS["not_yet_known"] in text
    assert {layer: LAYER_COLOURS[layer] for layer in LAYERS if layer in COLOURS} == COLOURS


@pytest.mark.parametrize(("count", "devices"), [(0, 0), (1, 1), (40, 2)])
def test_what_is_left_behind_is_html_and_text_alone(count: int, devices: int) -> None:
    samples = watched(count, devices)
    bundle = left_behind(samples)
    assert set(bundle) == {"text/html", "text/plain"}
    assert bundle["text/plain"] == str(samples)
    page = bundle["text/html"]
    assert "<script" not in page
    assert "http" not in page
    assert "<warm>" not in page
    assert page.count("<img") == (1 if count else 0)
    if count:
        data = base64.b64decode(page.split("base64,")[1].split('"')[0])
        assert data.startswith(b"\x89PNG")
        assert len(data) < 200_000


def test_the_figure_is_drawn_without_pyplot_and_shows_every_device() -> None:
    from PIL import Image

    samples = watched(devices=2)
    figure = samples.plot()
    assert len(figure.axes) == 4
    assert figure.axes[0].get_title(loc="left").startswith("cuda:0")
    data = figure._repr_png_()  # type: ignore[attr-defined]
    seen = {colour for _, colour in Image.open(io.BytesIO(data)).convert("RGB").getcolors(1 << 24) or []}
    for layer in ("cached", "context", "not_yet_known"):
        assert tuple(bytes.fromhex(LAYER_COLOURS[layer][1:])) in seen, layer


# ---- the widget


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], Any]]:
    """What widgets would have sent to the page."""
    pytest.importorskip("anywidget", reason="the live chart needs anywidget")
    from gpumem_magic.widgets.widget import WatchWidget

    messages: list[tuple[dict[str, Any], Any]] = []
    monkeypatch.setattr(WatchWidget, "send", lambda self, content, buffers=None: messages.append((content, buffers)))
    return messages


def no_picture() -> Any:
    raise AssertionError("nobody asks for what a picture is made of")


def test_a_sample_is_one_small_message_of_exact_numbers(sent: list[Any]) -> None:
    from gpumem_magic.widgets.fronts import WidgetFront

    observer, _ = observer_of(FakeDevice(0), FakeDevice(1))
    front = WidgetFront(observer, 0.1, lambda *request: None, no_picture)
    observer.series.clear()
    sample = observer.observe()
    front.show(sample, "running")
    assert [facts["title"] for facts in front.widget.series] == ["cuda:0", "cuda:1"]
    ((content, (buffer,)),) = sent
    assert content == {"k": "rows", "n": 1, "s": [0, 1]}
    numbers = array("d", buffer).tolist()
    assert len(numbers) == 2 * len(SENT)
    for number, value in zip(numbers, [*sample.rows[0][1], *sample.rows[1][1]], strict=True):
        assert number == value or (math.isnan(number) and math.isnan(value))
    assert (len(buffer) + len(json.dumps(content))) / 2 < 400
    front.widget.leave()


def test_the_page_asks_and_is_answered(sent: list[Any]) -> None:
    from gpumem_magic.widgets.fronts import WidgetFront

    asked: list[Any] = []
    observer, clock = observer_of(FakeDevice())
    front = WidgetFront(observer, 0.1, lambda *request: asked.append(request), no_picture)
    observer.mark("a")
    for _ in range(3):
        observer.observe()
        clock.time += 1
    receive = front.widget._received
    for message in (
        {"k": "pause"},
        {"k": "mark", "text": "b", "time": 5.5},
        {"k": 7},
        None,
        {"k": "mark", "time": "x"},
    ):
        receive(front.widget, message, [])
    assert asked == [("pause", "", None), ("mark", "b", 5.5), ("mark", "", None)]
    receive(front.widget, {"k": "hello"}, [])
    ((content, (buffer,)),) = sent
    assert content["k"] == "history"
    assert content["s"] == [0, 0, 0]
    assert [mark["label"] for mark in content["m"]] == ["a"]
    assert len(buffer) == 3 * len(SENT) * 8
    front.widget.leave()


def test_a_pause_still_says_that_the_kernel_lives(sent: list[Any]) -> None:
    from gpumem_magic.widgets.fronts import WidgetFront

    observer, _ = observer_of(FakeDevice())
    front = WidgetFront(observer, 0.1, lambda *request: None, no_picture)
    front.show(observer.observe(resting=True), "paused")
    front.show(observer.observe(resting=True), "paused")
    assert [content["k"] for content, _ in sent] == ["alive"]
    assert front.widget.state == "paused"
    front.widget.leave()


def test_a_cell_that_ends_before_the_first_sample_has_its_picture_with_it(
    sent: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpumem_magic.widgets.fronts import WidgetFront

    observer, _ = observer_of(FakeDevice())
    watch = Watch(10, lambda _: NoFront(), observer)
    front = WidgetFront(observer, 0.1, lambda *request: None, watch.samples)
    replaced: list[dict[str, Any]] = []
    monkeypatch.setattr(front, "_replace", replaced.append)
    front.cell_ended()
    assert replaced == []
    front.show(observer.observe(), "running")
    front.show(observer.observe(), "running")
    (bundle,) = replaced
    assert "<img" in bundle["text/html"]
    front.cell_ended()
    assert len(replaced) == 2
    front.widget.leave()


def test_leaving_closes_every_comm() -> None:
    pytest.importorskip("anywidget", reason="the live chart needs anywidget")
    from gpumem_magic.widgets.widget import WatchWidget

    widget = WatchWidget(lambda *request: None, no_picture)
    layout = widget.layout
    widget.leave()
    assert widget.comm is None
    assert layout.comm is None


def test_the_page_runs_without_loading_anything() -> None:
    pytest.importorskip("anywidget", reason="the live chart needs anywidget")
    from gpumem_magic.widgets.widget import WatchWidget

    script = WatchWidget._esm
    style = WatchWidget._css
    for text in (script, style):
        assert "http" not in text
        assert "@import" not in text
    assert "import " not in script.replace("import()", "")
    assert "fetch(" not in script


def test_the_modules_of_the_page_are_one_script(tmp_path: Path) -> None:
    pytest.importorskip("anywidget", reason="the live chart needs anywidget")
    from gpumem_magic.widgets.widget import WatchWidget

    script = WatchWidget._esm
    names = re.findall(r"^(?:export )?(?:const|class|function) (\w+)", script, re.MULTILINE)
    assert len(names) == len(set(names)), "a name that two of the modules have"
    assert script.count("export default") == 1
    node = shutil.which("node")
    if node is not None:
        file = tmp_path / "script.mjs"
        file.write_text(script, encoding="utf-8")
        subprocess.run([node, "--check", str(file)], check=True)


def test_the_pages_own_tests_pass() -> None:
    pages_own_tests.run("watch.test.mjs")
