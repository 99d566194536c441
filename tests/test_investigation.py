"""The stepper in Python: strips that lose no byte, readings beside their statements, sentences, what a saved notebook keeps."""

from __future__ import annotations

import base64
import gc
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pages_own_tests
import pytest
import report_samples as samples
from hypothesis import given
from hypothesis import strategies as st
from IPython.utils.capture import capture_output
from PIL import Image
from shell_fakes import clean_shell

import gpumem_magic
from gpumem_magic.devices.base import Label
from gpumem_magic.investigation import figure, memory_map, words
from gpumem_magic.investigation.listing import listing_of
from gpumem_magic.investigation.memory_map import FREE, SegmentPiece, SegmentStrip, Strip, strip_at, strips_of
from gpumem_magic.investigation.page import still
from gpumem_magic.investigation.readings import readings_of
from gpumem_magic.investigation.steps import Investigation, facts, investigation_of
from gpumem_magic.investigation.widget import InvestigationWidget
from gpumem_magic.snapshot.timeline import Timeline
from gpumem_magic.units import MIB
from gpumem_magic.user_report import Report
from gpumem_magic.views.lines import lines

ROOT = Path(__file__).parents[1]
CELL = """%%gpumem -q
model = torch.nn.Linear(4096, 8192, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
for turn in range(2):
    x = torch.randn(512, 4096, device="cuda")
    print("read")
    y = model(x)
    y.sum().backward()
    optimizer.step()
    print("read")
"""
FAILS = """%%gpumem -q
whole = torch.empty(512, 1024, 1024, device="cuda")
del whole
part = torch.empty(128, 1024, 1024, device="cuda")
wall = torch.empty(768, 1024, 1024, device="cuda")
"""


@pytest.fixture(scope="module")
def reports() -> Iterator[dict[str, Report]]:
    with clean_shell() as shell, capture_output(display=False) as captured:
        shell.run_cell("%load_ext gpumem_magic\n%gpumem_device virtual:5GiB\nimport torch", store_history=True)
        found = {}
        for name, cell in {"train": CELL, "fails": FAILS}.items():
            shell.run_cell(cell, store_history=True)
            last = gpumem_magic.last_report()
            assert last is not None, captured.stdout + captured.stderr
            found[name] = last
            if name == "train":
                found["listed"] = investigation_of(last)  # type: ignore[assignment]
            shell.run_cell("%reset -f\nimport torch")
            gc.collect()
        yield found
        shell.user_ns.clear()
        gc.collect()
        shell.run_line_magic("gpumem_device", "off")


def sizes(strip: Strip) -> dict[str, int]:
    found: dict[str, int] = {}
    for segment in strip.segments:
        for piece in segment.pieces:
            found[piece.kind] = found.get(piece.kind, 0) + piece.size
    return found


@pytest.mark.parametrize("name", ["train", "fails"])
def test_every_strip_adds_up_to_its_row(reports: dict[str, Report], name: str) -> None:
    report = reports[name]
    strips = strips_of(report)
    assert len(strips) == len(report.checkpoints)
    for row, strip in zip(report.checkpoints, strips, strict=True):
        assert strip is not None
        held = sizes(strip)
        assert strip.reserved == row.reserved
        assert sum(held.values()) == row.reserved
        assert held.get(FREE, 0) == row.categories["cached"]
        assert sum(size for kind, size in held.items() if kind != FREE) == row.allocated
        for segment in strip.segments:
            ends = [segment.address, *(piece.address + piece.size for piece in segment.pieces)]
            assert ends[:-1] == [piece.address for piece in segment.pieces]
            assert ends[-1] == segment.address + segment.size


def test_pieces_carry_the_names_and_categories_of_the_report(reports: dict[str, Report]) -> None:
    report = reports["train"]
    last_step = [number for number, row in enumerate(report.checkpoints) if row.statement == "optimizer.step()"][-1]
    strip = strips_of(report)[last_step]
    assert strip is not None
    named = {(piece.kind, piece.name): piece.size for segment in strip.segments for piece in segment.pieces}
    assert named["parameters", "weight"] == 4096 * 8192 * 4
    assert named["gradients", "weight"] == 4096 * 8192 * 4
    assert named["inputs", "x"] == 512 * 4096 * 4


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("alloc"), st.integers(1, 30 * MIB)), st.tuples(st.just("free"), st.integers(0, 99))
        ),
        min_size=1,
        max_size=60,
    ),
    st.integers(0, 40 * MIB),
)
def test_putting_small_pieces_together_loses_no_byte(program: list[tuple[str, int]], smallest: int) -> None:
    from gpumem_magic.allocator.caching import CachingAllocator
    from gpumem_magic.allocator.memory import DeviceMemory

    allocator = CachingAllocator(0, DeviceMemory(1 << 40))
    live: list[int] = []
    for what, number in program:
        if what == "alloc":
            live.append(allocator.malloc(number))
        elif live:
            allocator.free(live.pop(number % len(live)))
    segments = allocator.segments()
    timeline = Timeline(segments, ())
    kinds = ["parameters", "gradients", "activations"]
    labels = [Label(kinds[life.index % 3], "identity") for life in timeline.allocations]
    exact = strip_at(timeline, labels, 0, 0)
    rough = strip_at(timeline, labels, 0, smallest)
    assert sizes(exact) == sizes(rough)
    assert [(one.address, one.size) for one in exact.segments] == [(one.address, one.size) for one in rough.segments]
    for before, after in zip(exact.segments, rough.segments, strict=True):
        large = [piece for piece in before.pieces if piece.size >= smallest]
        assert [piece for piece in after.pieces if piece in large] == large
        assert len(after.pieces) <= (len(large) + 1) * 4 + len(large)


def test_a_report_without_its_recording_has_steps_and_no_strips(reports: dict[str, Report]) -> None:
    loaded = Report.from_dict(reports["train"].to_dict())
    investigation = investigation_of(loaded)
    assert len(investigation.steps) == len(loaded.checkpoints)
    assert not investigation.has_strips
    assert facts(investigation)["segments"] == []
    assert {step["strip"] for step in facts(investigation)["steps"]} == {None}
    # The statements stand alone where the cell is not known, each with its line.
    known = {line.number: line.text for line in listing_of(loaded, "something else")}
    assert known[2] == 'model = torch.nn.Linear(4096, 8192, device="cuda")'
    assert "data:image/png;base64," in still(investigation)["text/html"]


def test_the_cell_is_found_in_the_session(reports: dict[str, Report]) -> None:
    investigation: Investigation = reports["listed"]  # type: ignore[assignment]
    assert [line.text for line in investigation.listing] == CELL.splitlines()
    assert [line.number for line in investigation.listing] == list(range(1, len(CELL.splitlines()) + 1))


def test_readings_stand_beside_the_runs_of_their_statement(reports: dict[str, Report]) -> None:
    report = reports["train"]
    readings = readings_of(report, {'print("read")': [100, None, 300, 400]})
    found = [
        (row.iteration, reading)
        for row, reading in zip(report.checkpoints, readings, strict=True)
        if row.statement == 'print("read")'
    ]
    assert found == [((1,), 100 * MIB), ((1,), None), ((2,), 300 * MIB), ((2,), 400 * MIB)]
    assert sum(reading is not None for reading in readings) == 3
    steps = investigation_of(report, published={'print("read")': [100]}).steps
    (told,) = [step for step in steps if step.published is not None]
    assert told.published == 100 * MIB


@pytest.mark.parametrize(
    ("published", "words_of_it"),
    [
        ({"nowhere": [1]}, "no statement of this report has 'nowhere' in it"),
        ({"optimizer.step": [1, 2, 3]}, "3 readings for 'optimizer.step', which ran 2 times"),
        ({"optimizer.step": ["1"]}, "should be whole MiB"),
        ({"optimizer.step": [-1]}, "should be whole MiB"),
        ({"optimizer.step": [True]}, "should be whole MiB"),
    ],
)
def test_readings_that_fit_nowhere_are_refused_in_one_line(
    reports: dict[str, Report], published: Any, words_of_it: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(words_of_it)) as raised:
        gpumem_magic.investigate(reports["train"], published=published)
    assert "\n" not in str(raised.value)


def test_readings_of_folded_iterations_are_counted() -> None:
    """The tenth run's reading belongs to the tenth run, also where the rows of most runs were left out."""
    with clean_shell() as shell, capture_output(display=False):
        shell.run_cell("%load_ext gpumem_magic\n%gpumem_device T4\nimport torch", store_history=True)
        shell.run_cell("%%gpumem -q\nfor i in range(30):\n    x = torch.ones(1000, device='cuda')")
        report = gpumem_magic.last_report()
        shell.user_ns.clear()
        gc.collect()
        shell.run_line_magic("gpumem_device", "off")
    assert report is not None
    assert report.folded
    readings = readings_of(report, {"torch.ones": list(range(1, 31))})
    by_iteration = {
        row.iteration[0]: reading
        for row, reading in zip(report.checkpoints, readings, strict=True)
        if row.statement.startswith("x =")
    }
    assert 1 < len(by_iteration) < 30
    assert by_iteration == {number: number * MIB for number in by_iteration}


def test_sentences_say_what_moved(reports: dict[str, Report]) -> None:
    investigation = investigation_of(reports["train"])
    said = {step.title: " ".join(step.sentences) for step in investigation.steps}
    assert said['1: print("read")'] == "No memory moved."
    made = next(text for title, text in said.items() if title.startswith("model ="))
    assert "parameters 128" in made
    assert "came from the device." in made
    assert (
        said["1: optimizer.step()"].startswith("nvidia-smi's figure stays")
        or "No memory moved" in said["1: optimizer.step()"]
    )
    assert investigation.text().count("\n") == len(investigation.steps)


def test_the_failure_says_what_was_wanted(reports: dict[str, Report]) -> None:
    investigation = investigation_of(reports["fails"])
    assert investigation.wanted == 3 * 1024 * MIB
    (failed,) = [step for step in investigation.steps if step.line.row.kind == "error"]
    assert "3,072 MiB wanted" in failed.sentences[0]
    assert failed.strip is not None
    assert failed.strip.free_pieces[0].size == 1536 * MIB
    assert investigation_of(reports["train"]).wanted is None


def strip_of(*pieces: tuple[int, str], address: int = 0) -> Strip:
    made, at = [], address
    for size, kind in pieces:
        made.append(SegmentPiece(at, size * MIB, kind, "x" if kind == "inputs" else None))
        at += size * MIB
    return Strip((SegmentStrip(address, at - address, "large", tuple(made)),))


@pytest.mark.parametrize(
    ("now", "sentence"),
    [
        (strip_of((900, FREE)), ""),
        (
            strip_of((38, "inputs"), (862, FREE)),
            "The free piece of 900 MiB is split: inputs 38.0 MiB (`x`) lies in it now, and the largest piece left is 862 MiB.",
        ),
        (
            strip_of((400, "activations"), (100, FREE), (50, "inputs"), (350, FREE)),
            "The free piece of 900 MiB is split: activations 400 MiB, inputs 50.0 MiB lie in it now, and the largest "
            "piece left is 350 MiB.",
        ),
        (strip_of((900, "gradients")), "The free piece of 900 MiB is taken: gradients 900 MiB."),
        (strip_of((900, "gradients"), address=2000 * MIB), ""),
        (strip_of((100, "gradients"), (900, FREE), address=-100 * MIB), ""),
    ],
)
def test_what_became_of_the_largest_hole(now: Strip, sentence: str) -> None:
    assert words._hole(strip_of((900, FREE)), now) == sentence


def test_small_holes_are_not_worth_a_sentence() -> None:
    assert words._hole(strip_of((40, FREE), (960, "activations")), strip_of((1000, "activations"))) == ""


def test_segments_that_came_and_went() -> None:
    one, two = strip_of((900, FREE)), strip_of((2376, "temporaries"), address=4000 * MIB)
    assert words._segments(one, one) == "No segment came or went."
    assert words._segments(one, two) == (
        "1 segment (2,376 MiB) came from the device and 1 segment (900 MiB) went back to it."
    )
    assert (
        words._segments(Strip(()), Strip(one.segments + two.segments)) == "2 segments (3,276 MiB) came from the device."
    )


def test_the_facts_are_json_and_small(reports: dict[str, Report]) -> None:
    investigation = investigation_of(reports["train"], source=CELL)
    sent = facts(investigation)
    assert json.loads(json.dumps(sent)) == sent
    assert len(json.dumps(sent)) < 60_000
    for step, row in zip(sent["steps"], reports["train"].checkpoints, strict=True):
        assert sum(sent["segments"][number]["size"] for number in step["strip"]) == row.reserved
        assert sum(step["categories"].values()) == row.device_used
    for segment in sent["segments"]:
        assert sum(piece[0] for piece in segment["pieces"]) == segment["size"]
    # What did not change is sent once.
    assert len(sent["segments"]) < sum(len(step["strip"]) for step in sent["steps"]) / 2


@pytest.mark.parametrize("make", [samples.colab, samples.trainer, samples.two_devices, samples.small])
def test_any_report_can_be_stepped_through(make: Any) -> None:
    report = make()
    investigation = investigation_of(report)
    assert [step.line.row for step in investigation.steps] == [
        line.row for line in lines(report, parts=False) if line.row.kind != "peak"
    ]
    assert all(step.sentences for step in investigation.steps)
    assert json.dumps(facts(investigation))


def test_a_statement_cannot_put_markup_into_the_page(reports: dict[str, Report]) -> None:
    report = reports["train"]
    first = report.checkpoints[1]
    bad = replace(
        report, checkpoints=(report.checkpoints[0], replace(first, statement='x = "<script>alert(1)</script>$a$"'))
    )
    page = still(investigation_of(replace(bad, source=None)))
    assert "<script" not in page["text/html"]
    assert "&lt;script&gt;" in page["text/html"]


# The picture


def test_the_picture_has_the_colours_of_what_is_there(reports: dict[str, Report]) -> None:
    investigation = investigation_of(reports["fails"])
    data, width, height = figure.png(investigation)
    image = Image.open(io.BytesIO(data)).convert("RGB")
    assert image.size == (width, height)
    colours = {colour for count, colour in image.getcolors(1 << 24) or [] if count > 200}
    from gpumem_magic.views.palette import ALARM, COLOURS

    kinds = {kind for step in investigation.steps if step.strip is not None for kind in sizes(step.strip)} - {FREE}
    assert kinds
    for kind in kinds:
        assert tuple(bytes.fromhex(COLOURS[kind][1:])) in colours
    assert tuple(bytes.fromhex(ALARM[1:])) in colours


def test_rows_without_a_move_are_left_out_of_the_picture(reports: dict[str, Report]) -> None:
    investigation = investigation_of(reports["train"], published={'print("read")': [10, 20, 30, 40]})
    shown = figure.rows_of(investigation.steps)
    assert not any(step.line.text.startswith("print") for step in shown)
    # The readings stand in the row of the state that they were taken in.
    assert [step.published // MIB for step in shown if step.published is not None][:1] == [10]
    many = figure.rows_of(
        [replace(step, strip=None, line=replace(step.line, row=replace(step.line.row, kind="error"))) for step in shown]
        * 40
    )
    assert len(many) == figure.MAX_ROWS


def test_a_picture_that_cannot_be_drawn_leaves_the_words(
    reports: dict[str, Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no fonts")

    monkeypatch.setattr(figure, "png", broken)
    with pytest.warns(UserWarning, match="could not draw the checkpoints: RuntimeError: no fonts"):
        page = still(investigation_of(reports["train"]))
    assert "<img" not in page["text/html"]
    assert "optimizer.step()" in page["text/html"]
    assert "optimizer.step()" in page["text/plain"]


# The widget


def test_the_widget_shows_itself_and_a_picture_that_stays(reports: dict[str, Report]) -> None:
    with clean_shell() as shell:
        shell.display_formatter.active_types = shell.display_formatter.format_types
        with capture_output() as captured:
            shell.user_ns["report"] = reports["train"]
            shell.run_cell("import gpumem_magic\ngpumem_magic.investigate(report)")
    (kept,) = [output.data for output in captured.outputs]
    # The page puts the stepper in the picture's place where it can.
    assert '<div class="gpumem-place" data-place="' in kept["text/html"]
    assert set(kept) == {"text/html", "text/plain"}
    (image,) = re.findall(r'src="data:image/png;base64,([^"]+)"', kept["text/html"])
    assert Image.open(io.BytesIO(base64.b64decode(image))).width > 1000
    assert not re.search(r"<script|<link|https?:", kept["text/html"])


def test_in_a_terminal_it_is_text(reports: dict[str, Report]) -> None:
    with clean_shell() as shell, capture_output() as captured:
        shell.display_formatter.active_types = ["text/plain"]
        shell.user_ns["report"] = reports["train"]
        shell.run_cell("import gpumem_magic\ngpumem_magic.investigate(report)")
    assert "Peak 4" in captured.stdout
    assert "optimizer.step()" in captured.stdout
    assert captured.outputs == []


@given(st.integers(-(10**9), 10**9))
def test_the_step_stays_within(step: int) -> None:
    widget = InvestigationWidget(investigation_of(samples.colab()))
    try:
        widget.step = step
        assert 0 <= widget.step < len(samples.colab().checkpoints)
    finally:
        widget.close()


def test_it_begins_at_the_failure_or_at_the_peak(reports: dict[str, Report]) -> None:
    failing, training = (gpumem_magic.investigate(reports[name]) for name in ("fails", "train"))
    assert reports["fails"].checkpoints[failing.step].kind == "error"
    highest = reports["train"].peak.peak_allocated
    assert reports["train"].checkpoints[training.step].peak_allocated == highest
    assert all(row.peak_allocated < highest for row in reports["train"].checkpoints[: training.step])
    assert gpumem_magic.investigate(reports["train"], step=0).step == 0


def test_what_moved_nothing_is_quiet_unless_somebody_read_a_figure_there(reports: dict[str, Report]) -> None:
    report = reports["train"]
    steps = investigation_of(report).steps
    assert [step.is_quiet for step in steps] == [step.line.moved_nothing for step in steps]
    quiet = [step for step in steps if step.is_quiet]
    assert quiet
    assert not any(step.line.row.kind in ("before", "error", "after") for step in quiet)
    words = quiet[0].line.row.statement
    told = [one for one in investigation_of(report, published={words: [100]}).steps if one.published]
    assert told[0].line.moved_nothing
    assert not told[0].is_quiet


def test_what_is_no_report_is_refused() -> None:
    with pytest.raises(TypeError, match=r"needs a report .*, not NoneType"):
        gpumem_magic.investigate(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no rows to step through"):
        gpumem_magic.investigate(replace(samples.small(), checkpoints=()))


def test_looking_leaves_the_report_as_it_was(reports: dict[str, Report]) -> None:
    before = reports["train"].to_json()
    widget = gpumem_magic.investigate(reports["train"])
    widget.step = 3
    assert reports["train"].to_json() == before
    assert memory_map.strips_of(reports["train"]) == memory_map.strips_of(reports["train"])


def test_the_package_alone_imports_no_widget() -> None:
    code = "import gpumem_magic, sys; print([n for n in ('torch', 'anywidget', 'matplotlib') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


# The page


def test_the_page_runs_without_loading_anything() -> None:
    pytest.importorskip("anywidget", reason="the stepper needs anywidget")
    from gpumem_magic.investigation.widget import InvestigationWidget

    for text in (InvestigationWidget._esm, InvestigationWidget._css):
        assert not re.search(r"https?:|@import|\bimport\b|fetch\(|url\(|innerHTML|eval\(", text)


def test_the_pages_own_tests_pass() -> None:
    pages_own_tests.run("investigation.test.mjs")
