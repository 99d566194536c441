"""Notebook 02 in a real JupyterLab and a real browser; and every notebook by GitHub's rules, which leave no script and no style.

The browser's test is skipped where Chromium, Playwright or JupyterLab is missing. Nothing here asserts a time.
"""

from __future__ import annotations

import os
import shutil
from html import escape
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nbformat", reason="reading notebooks needs nbformat")

import nbformat
from notebook_browser import Notebook, browsing, chromium, serving

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
CAN_BROWSE = all(find_spec(name) is not None for name in ("playwright", "jupyterlab", "anywidget", "ipykernel"))
STEPPER = ".gpumem-stepper"
PICTURES = """() => [...document.querySelectorAll('.jp-OutputArea img')]
    .map((image) => ({
      width: image.naturalWidth, shown: image.getBoundingClientRect().width, words: image.alt,
      gives_way: image.closest('.gpumem-still') !== null,
    }))"""
FACTS = """() => {
  const root = document.querySelector('.gpumem-stepper'), current = root.querySelector('[aria-current]');
  const figure = (name) => root.querySelector(`[data-figure="${name}"]`)?.textContent ?? null;
  return {
    step: Number(root.dataset.step), kind: root.dataset.kind, title: root.querySelector('strong').textContent,
    line: current ? Number(current.dataset.line) : null, words: root.querySelector('.gpumem-words').textContent,
    smi: figure('nvidia-smi'), published: figure('published'),
    bar: [...root.querySelectorAll('.gpumem-bar rect')].map((one) => Math.round(one.getBoundingClientRect().width)),
    strip: [...root.querySelectorAll('.gpumem-strip rect[data-bytes]')]
      .map((one) => [one.dataset.kind, Number(one.dataset.bytes)]),
  };
}"""


def look(page: Any, step: int) -> dict[str, Any]:
    """What the stepper shows, once it shows `step`."""
    page.wait_for_function(f"() => document.querySelector('{STEPPER}').dataset.step === '{step}'")
    found: dict[str, Any] = page.evaluate(FACTS)
    return found


def press(page: Any, key: str, step: int) -> dict[str, Any]:
    # With the focus there, wherever the page has put it.
    page.locator(f"{STEPPER} input").press(key)
    return look(page, step)


def shoot(page: Any, name: str, selector: str = STEPPER) -> None:
    """Pictures for whoever looks at them, where the environment names a folder."""
    folder = os.environ.get("GPUMEM_SCREENSHOTS")
    if folder:
        page.locator(selector).first.screenshot(path=str(Path(folder) / f"notebook-02-{name}.png"))


@pytest.mark.skipif(not CAN_BROWSE, reason="playwright, jupyterlab, anywidget and ipykernel are needed")
def test_the_investigation_runs_and_its_stepper_answers(tmp_path: Path) -> None:
    executable = chromium()
    if executable is None:
        pytest.skip("no Chromium is installed")
    folder, own = tmp_path / "notebooks", tmp_path / "own"
    folder.mkdir()
    own.mkdir()
    stored = nbformat.read(FOLDER / "02_colab_investigation.ipynb", as_version=4)
    # What is seen afterwards was made here.
    for cell in stored.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    nbformat.write(stored, folder / "investigation.ipynb")
    shutil.copy(FOLDER / "colab_model.py", folder)
    code = [number for number, cell in enumerate(stored.cells) if cell.cell_type == "code"]
    (fails,) = [number for number in code if stored.cells[number].source.startswith("%%gpumem -o report")]
    (stepping,) = [number for number in code if "gpumem_magic.investigate(" in stored.cells[number].source]
    with serving("lab", folder, own) as server, browsing(executable, tmp_path / "profile") as (context, strays):
        notebook = Notebook(context.new_page(), server, strays, folder)
        page = notebook.page
        notebook.open("investigation.ipynb")
        for number in (number for number in code if number <= stepping):
            notebook.run(number)
            if number != fails:
                notebook.wait_for(number)
                continue
            # The author's error, once, behind the report.
            with pytest.raises(AssertionError, match=r"CUDA out of memory\. Tried to allocate 2\.32 GiB"):
                notebook.wait_for(number)
            kinds = [output["output_type"] for output in notebook.outputs(number)]
            assert kinds.count("error") == kinds.count("display_data") == 1
        page.wait_for_selector(f"{STEPPER}[data-kind=error]")  # where it begins
        last = int(page.get_attribute(f"{STEPPER} input", "max"))
        # 18 readings of nvidia-smi, each with a statement at least before the next.
        assert last >= 2 * 18
        page.locator(f"{STEPPER} input").fill("0")
        start = look(page, 0)
        # 2 MiB of 16 GiB: what an unused card shows.
        assert sum(start["bar"]) <= 1

        # Keys: from the start to the end, and back to the failing line.
        page.locator(f"{STEPPER} input").press("ArrowRight")
        page.wait_for_function(f"() => document.querySelector('{STEPPER}').dataset.step !== '0'")
        assert page.evaluate(FACTS)["title"] != start["title"]
        assert press(page, "End", last)["kind"] == "after"
        step, failed = last, look(page, last)
        while failed["kind"] != "error":
            step -= 1
            page.locator(f"{STEPPER} input").fill(str(step))
            failed = look(page, step)
        assert "optimizer.step()" in failed["title"]
        assert failed["words"].startswith(f"Out of memory at line {failed['line']}: 2,372 MiB wanted.")
        assert sum(failed["bar"]) > 0
        free = [size for kind, size in failed["strip"] if kind == "free"]
        # Enough is free in all; no piece of it is large enough.
        assert sum(free) > 2372 * 2**20 > max(free)
        shoot(page, "failing")

        # Slider: nvidia-smi's figure beside the published one, and other words, bars and segments at each of three places.
        shown = []
        for wanted in ("model = model.to(device)", "output = model(input, comb)", "optimizer.step()"):
            titles: dict[str, Any] = {}
            for number in range(1, step):
                page.locator(f"{STEPPER} input").fill(str(number))
                titles = look(page, number)
                if wanted in titles["title"]:
                    break
            assert wanted in titles["title"]
            shown.append(titles)
        assert len({one["smi"] for one in shown}) == len({one["words"] for one in shown}) == 3
        assert len({tuple(one["bar"]) for one in shown}) == 3
        assert [len(one["strip"]) for one in shown] != [len(shown[0]["strip"])] * 3
        shoot(page, "first-step")
        number = shown[0]["step"]
        reading = shown[0]
        while reading["published"] in (None, "–"):
            number += 1
            page.locator(f"{STEPPER} input").fill(str(number))
            reading = look(page, number)
        assert reading["published"].startswith("3,769 MiB")
        shoot(page, "published")
        assert not notebook.errors

        # Saved and opened again: the report, and the picture of all checkpoints.
        notebook.save()
        again = Notebook(context.new_page(), server, strays, folder)
        again.open("investigation.ipynb")
        # The reader's own notebook is trusted: there the report opens in its picture's place, a moment after the picture came.
        again.page.wait_for_function(
            f"() => {{ const all = ({PICTURES})(); return all.length >= 2 && all.every("
            "(one) => one.width > 1000 && (one.shown === 0) === one.gives_way); }"
        )
        pictures = again.page.evaluate(PICTURES)
        assert all(picture["shown"] > 400 for picture in pictures if not picture["gives_way"])
        again.page.locator(".gpumem-report .gpumem-rows").first.wait_for()
        assert "Stacked bars of GPU memory" in pictures[0]["words"]
        assert "2,372 MiB wanted" in pictures[-1]["words"]
        again.page.locator(STEPPER).wait_for()
        shoot(again.page, "reopened")
        assert not again.errors
        assert not strays


# ---- GitHub


_GONE_WITH_CONTENT = (
    "script",
    "style",
    "iframe",
    "object",
    "embed",
    "template",
    "noscript",
    "svg",
    "canvas",
    "form",
    "button",
)
_WITHOUT_END = ("br", "hr", "img", "wbr", "col", "input", "link", "meta", "source")
# What GitHub leaves of HTML in a notebook, as far as these have it.
_LISTED = """
a abbr b blockquote body br caption code col colgroup dd del details div dl dt em figcaption figure h1 h2 h3 h4 h5 h6 hr i img ins
kbd li main mark ol p pre q s samp small span strong sub summary sup table tbody td tfoot th thead tr tt u ul var
"""
_TAGS = frozenset(_LISTED.split())
_ATTRIBUTES = frozenset(
    ("alt", "align", "colspan", "height", "href", "id", "open", "rowspan", "scope", "src", "title", "valign", "width")
)


class GitHub(HTMLParser):
    """Keeps what GitHub shows: text, and tags of a short list without classes, styles, roles and handlers."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.page: list[str] = []
        self.images: list[dict[str, str]] = []
        self.count: dict[str, int] = {}
        self._inside_gone: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _GONE_WITH_CONTENT:
            self._inside_gone.append(tag)
        if self._inside_gone or tag not in _TAGS:
            return
        kept = {name: value or "" for name, value in attrs if name in _ATTRIBUTES}
        for name in ("href", "src"):
            if kept.get(name, "").strip().lower().startswith(("javascript:", "vbscript:", "data:text")):
                del kept[name]
        self.count[tag] = self.count.get(tag, 0) + 1
        if tag == "img":
            self.images.append(kept)
        words = "".join(f' {name}="{escape(value)}"' for name, value in kept.items())
        self.page.append(f"<{tag}{words}>")

    def handle_endtag(self, tag: str) -> None:
        if self._inside_gone and tag == self._inside_gone[-1]:
            self._inside_gone.pop()
        elif not self._inside_gone and tag in _TAGS and tag not in _WITHOUT_END:
            self.page.append(f"</{tag}>")

    def handle_data(self, data: str) -> None:
        if not self._inside_gone:
            self.page.append(escape(data, quote=False))


def by_githubs_rules(page: str) -> GitHub:
    reader = GitHub()
    reader.feed(page)
    reader.close()
    return reader


def test_the_rules_leave_no_script_no_style_and_no_handler() -> None:
    hostile = (
        '<div style="color:red" onclick="a()" class="x"><script>bad()</script><style>p{}</style><iframe srcdoc="<p>bad</p>">bad'
        '</iframe><img src="data:image/png;base64,AA" alt="a &quot;b&quot;" onerror="bad()"><a href="javascript:bad()">word</a>'
        "<table><tr><td colspan=2>1 &lt; 2</td></tr></table><blink>stays</blink></div>"
    )
    assert "".join(by_githubs_rules(hostile).page) == (
        '<div><img src="data:image/png;base64,AA" alt="a &quot;b&quot;"><a>word</a>'
        '<table><tr><td colspan="2">1 &lt; 2</td></tr></table>stays</div>'
    )


def is_shown(output: Any) -> bool:
    return output.output_type in ("display_data", "execute_result")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_by_githubs_rules_pictures_and_tables_are_still_there(path: Path) -> None:
    nbconvert = pytest.importorskip("nbconvert", reason="the page needs nbconvert")
    page, _ = nbconvert.HTMLExporter(template_name="basic").from_filename(str(path))
    shown = by_githubs_rules(page)
    text = "".join(shown.page)
    stored = nbformat.read(path, as_version=4)
    outputs = [
        output for cell in stored.cells if cell.cell_type == "code" for output in cell.outputs if is_shown(output)
    ]
    pages = [part for output in outputs if (part := "".join(output.data.get("text/html", "")))]
    assert pages
    # Trials give tables and pictures of their own.
    magics = [cell.source.partition("\n")[0] for cell in stored.cells if cell.source.startswith("%%gpumem")]
    measures = any("--fit" not in magic for magic in magics)
    assert measures == any("GPU memory report" in part for part in pages)
    # What each output shows of itself, whatever else the page has.
    for part in pages:
        left = by_githubs_rules(part)
        assert left.count.get("img", 0) == part.count("<img")
        assert left.count.get("table", 0) == part.count("<table")
        assert left.images or left.count.get("table")
    # And what the page shows of them all, with the pictures that have no page around them.
    drawn = [image for image in shown.images if image["src"].startswith("data:image/png;base64,")]
    bare = [output for output in outputs if "image/png" in output.data and "text/html" not in output.data]
    assert len(drawn) >= sum(part.count("<img") for part in pages) + len(bare) > 0
    for image in drawn:
        assert len(image["alt"]) > 40, "a picture needs words"
        assert len(image["src"]) > 5_000
    assert shown.count.get("table", 0) >= sum(part.count("<table") for part in pages)
    for word in ("<script", "<style", "<iframe", " style=", " onclick="):
        assert word not in text
    write_for_a_look(path.stem, text)


def write_for_a_look(name: str, text: str) -> None:
    folder = os.environ.get("GPUMEM_SCREENSHOTS")
    if folder:
        page = f"<!doctype html><meta charset=utf-8><title>{escape(name)}</title>{text}"
        (Path(folder) / f"github-{name}.html").write_text(page, encoding="utf-8")
