"""The report as HTML, and the bundle that a notebook gets."""

from __future__ import annotations

import base64
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import report_samples as samples

from gpumem_magic.report.model import ReportError
from gpumem_magic.views import display, explain
from gpumem_magic.views.html import MAX_TABLE_ROWS, Picture, card

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
    rows = tuple(
        replace(row, statement=HOSTILE, label=HOSTILE, parts=(replace(row, kind="part", label=HOSTILE),) * 2)
        for row in report.checkpoints
    )
    return replace(
        report,
        checkpoints=rows,
        device=replace(report.device, name=HOSTILE),
        peak=replace(report.peak, where=HOSTILE),
        error=ReportError(HOSTILE, HOSTILE, 3),
        remarks=(HOSTILE,),
        evidence={HOSTILE: 5},
        stand_ins=(replace(report.stand_ins[0], line=HOSTILE),),
    )


@pytest.mark.parametrize("make", [samples.colab, samples.trainer, samples.two_devices, samples.small, hostile])
def test_it_is_whole_and_holds_no_script_style_sheet_or_link(make):
    report = make()
    for text in (card(report, PICTURE), card(report, None), card(report, PICTURE, table=False)):
        reader = Reader(text)
        names = {tag for tag, _ in reader.elements}
        assert names <= {"html", "head", "meta", "title", "body", "div", "p", "strong", "img", "details", "summary", "hr",
                         "table", "thead", "tbody", "tr", "th", "td", "code"}  # fmt: skip
        for _, attributes in reader.elements:
            assert not any(name.startswith("on") for name in attributes)
            assert not set(attributes) & {"href", "srcset", "class", "id"}
            assert "url(" not in (attributes.get("style") or "")
            if "src" in attributes:
                assert attributes["src"] == "data:image/png;base64," + base64.b64encode(b"\x89PNG").decode()


def test_hostile_text_stays_text():
    text = card(hostile(), PICTURE)
    assert "<img src=x" not in text
    reader = Reader(text)
    assert reader.text.count(HOSTILE) > 25
    assert sum(tag == "img" for tag, _ in reader.elements) == 1
    image = next(attributes for tag, attributes in reader.elements if tag == "img")
    assert image["alt"] == explain.alt_text(hostile())


def test_it_says_what_the_picture_says():
    report = samples.colab()
    reader = Reader(card(report, PICTURE))
    words = " ".join(reader.text.split())
    for sentence in (
        explain.headline(report),
        explain.verdict(report),
        *explain.remarks(report),
        explain.evidence(report),
    ):
        assert " ".join(sentence.replace("`", "").split()) in words
    for figure in ("16,053", "+6,292", "14,439", "4,784", "optimizer state 4,784, cached 1,508", "1: optimizer.step()"):
        assert figure in words
    image = next(attributes for tag, attributes in reader.elements if tag == "img")
    assert image["alt"].startswith("Stacked bars of GPU memory by category, after each of 11 statements.")
    assert any(attributes.get("role") == "group" and attributes["aria-label"] for _, attributes in reader.elements)


def test_the_card_brings_its_own_colours_for_dark_pages():
    style = Reader(card(samples.colab(), PICTURE)).elements[0][1]["style"]
    assert "background:#FFFFFF" in style
    assert "color:#222222" in style
    rows = [attributes for tag, attributes in Reader(card(samples.colab(), PICTURE)).elements if tag == "tr"]
    assert all("background:#FFFFFF" in row["style"] and "color:#222222" in row["style"] for row in rows)


def test_the_table_is_folded_up_under_a_picture_and_open_without_one():
    def opened(text):
        return ["open" in attributes for tag, attributes in Reader(text).elements if tag == "details"]

    assert opened(card(samples.colab(), PICTURE)) == [False]
    assert opened(card(samples.colab(), None)) == [True]
    assert opened(card(samples.colab(), PICTURE, table=False)) == []
    assert opened(card(samples.two_devices(), PICTURE, others=[PICTURE])) == [False, False]


def test_what_stands_between_backticks_is_code():
    report = replace(samples.colab(), remarks=("`del <model>` frees it; a ` alone is a ` no more.",))
    shown = card(report, PICTURE)
    assert re.search(r"<code style=[^>]*>del &lt;model&gt;</code> frees it", shown)
    assert "`" not in Reader(card(replace(report, remarks=("`x` and `y`",)), PICTURE)).text


def test_parts_go_by_their_names():
    def with_code(row):
        own = "loss.backward()" if row.kind == "part" else row.statement
        return replace(row, statement=own, parts=tuple(with_code(part) for part in row.parts))

    report = samples.trainer()
    coded = replace(report, checkpoints=tuple(with_code(row) for row in report.checkpoints))
    assert coded != report
    assert Reader(card(coded, PICTURE)).text == Reader(card(report, PICTURE)).text


def test_parts_keep_their_indent_and_statements_their_lines():
    text = Reader(card(samples.trainer(), PICTURE)).text
    assert "\u00a0" * 8 + "optimizer step" in text
    assert "1: loss = my_loss(\n    output,\n    output_array,\n)" in Reader(card(samples.colab(), PICTURE)).text


def test_a_very_long_report_is_cut_and_says_so():
    report = samples.two_devices()
    report = replace(report, checkpoints=(report.checkpoints[1],) * (MAX_TABLE_ROWS + 20), devices=())
    text = Reader(card(report, PICTURE)).text
    assert "The saved report (save, to_dict) has 21 more rows." in text
    assert text.count("first = first.to('cuda:0')") < 2 * MAX_TABLE_ROWS + 5


@pytest.mark.usefixtures("notebook")
def test_thirty_rows_stay_small():
    report = samples.colab()
    report = replace(report, checkpoints=(report.checkpoints[:-2] * 3)[:29])
    data, _ = report._repr_mimebundle_()
    assert len(data["text/html"]) < 150_000


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
    assert "<details open" in table["text/html"]
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
    assert "<details open" in data["text/html"]


@pytest.mark.usefixtures("notebook")
def test_ipython_takes_the_bundle():
    formatters = pytest.importorskip("IPython.core.formatters")
    data, metadata = formatters.DisplayFormatter().mimebundle_formatter(samples.small())
    assert set(data) == {"text/plain", "text/html", "image/png"}
    assert set(metadata) == {"image/png"}
