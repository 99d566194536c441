"""The report as HTML, and the bundle that a notebook gets."""

from __future__ import annotations

import base64
import logging
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import report_samples as samples
from causes_cells import notebook as running_notebook

from gpumem_magic.report.model import ALLOCATED_CATEGORIES, Owner, ReportError, TensorGroup, TensorKind
from gpumem_magic.views import display, explain
from gpumem_magic.views.elements import style
from gpumem_magic.views.html import Picture, card
from gpumem_magic.views.opened_row import MOST_LINES
from gpumem_magic.views.story import story_of

HOSTILE = "x = '</script><img src=x onerror=alert(1)>' + \"<b a='&amp;'>\" # `$(rm)`"
VOID = {"img", "hr", "meta", "br"}
PICTURE = Picture(b"\x89PNG", 1060, 500)


@pytest.fixture
def notebook(monkeypatch):
    """Another test may have started an IPython shell of the terminal's kind."""
    monkeypatch.setattr(display, "in_terminal", lambda: False)


class Reader(HTMLParser):
    """Collects elements and text, and fails where an element is not closed in its place."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def hostile():
    report = samples.colab()
    group = TensorGroup(
        bytes=5 << 20, count=2, category="activations", dtype=HOSTILE, shape=(3,), operator=HOSTILE,
        inputs=(TensorKind((1,), HOSTILE),), statement=HOSTILE, line=3, inner=HOSTILE, module=HOSTILE, keeper="name",
        kept_by=HOSTILE,
    )  # fmt: skip
    rows = tuple(
        replace(row, statement=HOSTILE, label=HOSTILE, parts=(replace(row, kind="part", label=HOSTILE),) * 2)
        for row in report.checkpoints
    )
    return replace(
        report,
        checkpoints=rows,
        answer=HOSTILE,
        device=replace(report.device, name=HOSTILE),
        peak=replace(report.peak, where=HOSTILE, tensors=(group,)),
        error=ReportError(HOSTILE, HOSTILE, 3, 5, tensors=(group,)),
        remarks=(HOSTILE,),
        evidence={HOSTILE: 5},
        owners=(Owner(HOSTILE, "variable", HOSTILE, 5 << 20, 5 << 20, HOSTILE, HOSTILE, 5),),
        stand_ins=(replace(report.stand_ins[0], line=HOSTILE),),
    )


def without_style(text: str) -> str:
    assert text.count("<style>") == text.count("</style>") == 1
    return re.sub("<style>.*?</style>", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("make", [samples.colab, samples.trainer, samples.two_devices, samples.small, hostile])
def test_it_is_whole_and_holds_no_script_and_no_link(make):
    report = make()
    for text in (card(report, PICTURE), card(report, None), card(report, PICTURE, table=False)):
        reader = Reader(without_style(text))
        names = {tag for tag, _ in reader.elements}
        assert names <= {"div", "section", "p", "strong", "img", "details", "summary", "hr", "table", "thead", "tbody", "tr",
                         "th", "td", "code", "pre", "ul", "li", "span", "i", "b", "u", "em"}  # fmt: skip
        for _, attributes in reader.elements:
            assert not any(name.startswith("on") for name in attributes)
            assert not set(attributes) & {"href", "srcset", "id"}
            assert "url(" not in (attributes.get("style") or "")
            if "src" in attributes:
                assert attributes["src"] == "data:image/png;base64," + base64.b64encode(b"\x89PNG").decode()


def test_the_style_sheet_loads_nothing_and_touches_nothing_else():
    sheet = style()
    assert sheet.startswith("<style>")
    assert sheet.count("<") == 2
    for word in ("url(", "@import", "http", "expression", "javascript"):
        assert word not in sheet
    rules = re.sub(r"@(media|container|supports)[^{]*\{", "", sheet.removeprefix("<style>").removesuffix("</style>"))
    for selector in re.findall(r"([^{}]+)\{", rules):
        for one in re.sub(r":is\([^)]*\)", lambda found: found[0].replace(",", ";"), selector).split(","):
            assert ".gpumem-" in one or re.search(r"\.gk\d+$", one.strip()), one


def test_hostile_text_stays_text():
    text = card(hostile(), PICTURE)
    assert "<img src=x" not in text
    reader = Reader(without_style(text))
    assert reader.text.count(HOSTILE.partition("`")[0]) > 25
    assert sum(tag == "img" for tag, _ in reader.elements) == 1
    image = next(attributes for tag, attributes in reader.elements if tag == "img")
    assert image["alt"] == explain.alt_text(hostile())
    # Also where a pointer shows it, it is an attribute's text.
    assert "<script" not in text
    assert "onerror=alert(1)>" not in text


def test_it_says_what_the_picture_says():
    report = samples.colab()
    reader = Reader(without_style(card(report, PICTURE)))
    words = " ".join(reader.text.split())
    story = story_of(report)
    for sentence in (
        story.answer,
        story.obstacle,
        *story.others,
        *story.folded,
        explain.headline(report),
        explain.evidence(report),
    ):
        assert " ".join(sentence.replace("`", "").split()) in words
    # The peak's categories, what a row allocated, what nvidia-smi says of it, and what moved.
    for figure in ("optimizer state 4,784", "14,439", "5,158", "16,053", "optimizer state 4,784, cached 1,508"):
        assert figure in words
    assert "iteration 1 " in words
    assert "optimizer.step()" in words
    image = next(attributes for tag, attributes in reader.elements if tag == "img")
    assert image["alt"].startswith("Stacked bars of GPU memory by category, after each of 11 statements.")
    assert any(attributes.get("role") == "group" and attributes["aria-label"] for _, attributes in reader.elements)


def test_every_row_has_its_figures_and_bars_that_add_up():
    report = samples.colab()
    text = card(report, None)
    top = max(row.peak_allocated for row in report.checkpoints)
    bars = re.findall(r"</(?:code|em)> <span>(.*?)</span> <b>([\d,<]+)</b>", text)
    shown = {size: sum(map(float, re.findall(r"width:([\d.e-]+)%\" title", bar))) for bar, size in bars}
    for row in report.checkpoints:
        allocated = sum(row.categories[name] or 0 for name in ALLOCATED_CATEGORIES)
        assert allocated == row.allocated
        if not allocated:
            continue
        assert shown[f"{row.allocated / (1 << 20):,.0f}"] == pytest.approx(100 * row.allocated / top, abs=0.3)


def test_the_still_picture_gives_way_only_where_style_sheets_work():
    """Without the sheet: the picture, and what opens folded up under it."""
    elements = Reader(without_style(card(samples.colab(), PICTURE))).elements
    image = next(attributes for tag, attributes in elements if tag == "img")
    assert "display" not in image["style"]
    (live,) = [attributes for tag, attributes in elements if attributes.get("class") == "gpumem-live"]
    assert "open" not in live
    assert ".gpumem-live::details-content { content-visibility: visible" in style()


def test_rows_are_open_only_on_the_way_to_the_failure_or_the_peak():
    def opened(text):
        return [
            attributes.get("class")
            for tag, attributes in Reader(without_style(text)).elements
            if tag == "details" and "open" in attributes
        ]

    assert opened(card(samples.colab(), PICTURE)) == ["gpumem-row"]
    assert opened(card(samples.colab(), None)) == ["gpumem-live", "gpumem-row"]
    assert opened(card(samples.colab(), PICTURE, table=False)) == []
    text = card(samples.colab(), PICTURE)
    way = text[text.index('<details class="gpumem-row" open>') :]
    assert way.index("gpumem-failed") < way.index("<em>after</em>")


def test_what_stands_between_backticks_is_code():
    report = replace(samples.colab(), remarks=("`del <model>` frees it; a ` alone is a ` no more.",))
    shown = card(report, PICTURE)
    assert "<code>del &lt;model&gt;</code> frees it" in shown
    assert "`" not in Reader(card(replace(report, remarks=("`x` and `y`",)), PICTURE)).text


def test_parts_go_by_their_names():
    def with_code(row):
        own = "loss.backward()" if row.kind == "part" else row.statement
        return replace(row, statement=own, parts=tuple(with_code(part) for part in row.parts))

    report = samples.trainer()
    coded = replace(report, checkpoints=tuple(with_code(row) for row in report.checkpoints))
    assert coded != report
    assert Reader(card(coded, PICTURE)).text == Reader(card(report, PICTURE)).text


def test_statements_keep_their_lines():
    text = Reader(card(samples.colab(), PICTURE)).text
    assert "loss = my_loss(\n    output,\n    output_array,\n)" in text


def test_a_very_long_report_is_cut_and_says_so():
    report = samples.two_devices()
    first = report.checkpoints[1]
    grown = [
        replace(
            first, line=number, allocated=first.allocated + number, peak_allocated=first.allocated + number * 9 << 20
        )
        for number in range(1, MOST_LINES + 21)
    ]
    report = replace(report, checkpoints=tuple(grown), devices=())
    text = card(report, PICTURE)
    assert "20 more rows in report.to_dict()." in Reader(text).text
    assert text.count("first = first.to('cuda:0')") < MOST_LINES + 50
    assert len(text) < 200_000


@pytest.fixture(scope="module")
def thousand():
    """A report of 1,000 iterations with phases, and one of 60 that keep something."""
    training = (
        "model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 8)).cuda()\n"
        "optimizer = torch.optim.Adam(model.parameters())\n"
        "for step in range(1000):\n"
        "    x = torch.randn(512, 64, device='cuda')\n"
        "    loss = model(x).sum()\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    leaking = "kept = []\nfor step in range(60):\n    kept.append(mib(2))\n"
    with running_notebook() as book:
        yield book.measured(training), book.measured(leaking)


def test_a_thousand_iterations_stay_small(thousand):
    training, _ = thousand
    text = card(training, None)
    assert len(text) < 120_000
    words = Reader(text).text
    assert re.search(r"iterations \d+-1,?000: (alike|as \d+)", words)
    assert len(training._repr_mimebundle_(include={"text/html"})[0]["text/html"]) < 200_000


def test_a_leak_is_seen_in_the_strip(thousand):
    _, leaking = thousand
    text = card(leaking, None)
    strip = text[text.index('class="gpumem-course') :]
    lows = [float(low) for low in re.findall(r"--l:([\d.]+)%", strip[: strip.index("</section>")])]
    assert len(lows) > 50
    assert lows == sorted(lows)
    assert lows[-1] == 100
    assert "Allocated through 60 iterations: " in text


# The bundle


@pytest.mark.usefixtures("notebook")
def test_one_bundle_with_text_picture_and_page():
    report = samples.two_devices()
    before = report.to_json()
    data, metadata = report._repr_mimebundle_()
    assert set(data) == {"text/plain", "text/html", "image/png"}
    assert data["text/plain"] == str(report)
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert metadata["image/png"]["alt"] == explain.alt_text(report)
    assert metadata["image/png"]["width"] == display.CSS_WIDTH
    assert len(re.findall("data:image/png;base64,iVBOR", data["text/html"])) == 2
    assert report.to_json() == before
    assert report._repr_mimebundle_() == (data, metadata)


def test_only_what_is_asked_for_is_made(monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a picture was drawn")

    monkeypatch.setattr(display, "picture", fail)
    data, metadata = samples.colab()._repr_mimebundle_(include={"text/plain"})
    assert (set(data), metadata) == ({"text/plain"}, {})
    data, _ = samples.colab()._repr_mimebundle_(exclude={"text/html", "image/png"})
    assert set(data) == {"text/plain"}
    # IPython in a terminal shows nothing but the text.
    shell = SimpleNamespace(display_formatter=SimpleNamespace(active_types=["text/plain"]))
    face = SimpleNamespace(initialized=lambda: True, instance=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython.core.interactiveshell", SimpleNamespace(InteractiveShell=face))
    data, _ = samples.colab()._repr_mimebundle_()
    assert set(data) == {"text/plain"}


@pytest.mark.usefixtures("notebook")
def test_views_are_only_their_part():
    report = samples.colab()
    table, _ = report.view("table")._repr_mimebundle_()
    assert set(table) == {"text/plain", "text/html"}
    assert "<img" not in table["text/html"]
    assert '<details class="gpumem-live" open>' in table["text/html"]
    assert table["text/plain"] == str(report.view("table"))
    plot, _ = report.view("plot")._repr_mimebundle_()
    assert set(plot) == {"text/plain", "text/html", "image/png"}
    assert "<img" in plot["text/html"]
    assert "<table" not in plot["text/html"]


@pytest.mark.usefixtures("notebook")
def test_a_picture_that_cannot_be_drawn_costs_only_the_picture(monkeypatch):
    from gpumem_magic.views import figure

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no font")

    monkeypatch.setattr(figure, "png", fail)
    with pytest.warns(UserWarning, match="could not draw the picture: RuntimeError: no font"):
        data, _ = samples.colab().view("plot")._repr_mimebundle_()
    assert set(data) == {"text/plain", "text/html"}
    assert '<details class="gpumem-live" open>' in data["text/html"]


@pytest.mark.usefixtures("notebook")
def test_ipython_takes_the_bundle():
    formatters = pytest.importorskip("IPython.core.formatters")
    data, metadata = formatters.DisplayFormatter().mimebundle_formatter(samples.small())
    assert set(data) == {"text/plain", "text/html", "image/png"}
    assert set(metadata) == {"image/png"}


@pytest.mark.usefixtures("notebook")
def test_a_program_that_logs_everything_reads_nothing_of_our_pictures(caplog):
    caplog.set_level(logging.DEBUG)
    level = logging.getLogger("matplotlib").level
    samples.colab()._repr_mimebundle_()
    samples.colab().diff(samples.small())._repr_mimebundle_()
    assert not [record for record in caplog.records if record.name.startswith(("matplotlib", "PIL"))]
    assert logging.getLogger("matplotlib").level == level
