"""The first notebook in a real JupyterLab and a real browser: reports open by mouse and keyboard, in light and dark themes.

Where the notebook is not trusted, still pictures are in their place.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest

pytest.importorskip("playwright", reason="the browser tests need playwright")
pytest.importorskip("jupyterlab", reason="the browser tests need jupyterlab")

from notebook_browser import Notebook, browsing, check_accessible, chromium, serving

BROWSER = chromium()
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed: the browser tests did not run")
NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "01_first_cell.ipynb"
PICTURES = """() => [...document.querySelectorAll('.jp-OutputArea img')]
    .map(image => ({width: image.naturalWidth, shown: image.getBoundingClientRect().width, words: image.alt}))"""


REPORT = ".gpumem-report"
LOOK = """() => {
  const root = document.querySelector('.gpumem-report');
  const seen = (one) => one !== null && one.getBoundingClientRect().height > 0;
  const quiet = root.querySelector('.gpumem-quiet'), paper = getComputedStyle(root).backgroundColor;
  return {
    paper, ink: getComputedStyle(root).color, quiet: getComputedStyle(quiet).color,
    rows: [...root.querySelectorAll('.gpumem-rows .gpumem-line')].filter(seen).length,
    bar: [...root.querySelectorAll('.gpumem-bar > i')].reduce((sum, one) => sum + one.getBoundingClientRect().width, 0),
    room: root.querySelector('.gpumem-bar').getBoundingClientRect().width,
    height: root.getBoundingClientRect().height, wide: root.scrollWidth <= root.clientWidth + 1,
    sides: [...root.querySelectorAll('td')].filter((one) => getComputedStyle(one).textAlign !==
      (one.getAttribute('align') || 'left')).length,
    active: document.activeElement.tagName, open: root.querySelectorAll('.gpumem-row[open]').length,
  };
}"""


def pictures(page: Any, count: int, *, in_sight: bool) -> list[dict[str, Any]]:
    """The pictures in the outputs, once there are `count` of them, loaded, and all of them in sight or none."""
    page.wait_for_function(
        f"() => {{ const found = ({PICTURES})(); return found.length >= {count} && found.every("
        f"one => one.width > 0 && (one.shown > 400) === {str(in_sight).lower()}); }}"
    )
    found: list[dict[str, Any]] = page.evaluate(PICTURES)
    return found


def luminance(colour: str) -> tuple[float, float]:
    """Of an sRGB colour, and its opacity."""
    parts = [float(part) for part in colour.split("(")[1].rstrip(")").split(",")]
    linear = [part / 255 / 12.92 if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4 for part in parts[:3]]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2], parts[3] if len(parts) > 3 else 1.0


def blended(colour: str, paper: str) -> str:
    """What a colour with some opacity looks like on paper."""
    share = luminance(colour)[1]
    parts = [[float(part) for part in one.split("(")[1].rstrip(")").split(",")[:3]] for one in (colour, paper)]
    return f"rgb({','.join(str(share * one + (1 - share) * other) for one, other in zip(*parts, strict=True))})"


def contrast(colour: str, paper: str) -> float:
    low, high = sorted((luminance(blended(colour, paper))[0], luminance(paper)[0]))
    return (high + 0.05) / (low + 0.05)


def shoot(page: Any, name: str) -> None:
    """Pictures for whoever looks at them, where the environment names a folder."""
    folder = os.environ.get("GPUMEM_SCREENSHOTS")
    if folder:
        page.locator(REPORT).first.screenshot(path=str(Path(folder) / f"report-{name}.png"))


def test_the_first_notebook_runs_and_shows_its_pictures(tmp_path: Path) -> None:
    folder, own = tmp_path / "notebooks", tmp_path / "own"
    folder.mkdir()
    own.mkdir()
    shutil.copy(NOTEBOOK, folder / "first.ipynb")
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    code = [number for number, cell in enumerate(cells) if cell.cell_type == "code"]
    measured = [number for number in code if cells[number].source.startswith("%%gpumem")]
    assert BROWSER is not None
    with serving("lab", folder, own) as server, browsing(BROWSER, tmp_path / "profile") as (context, strays):
        notebook = Notebook(context.new_page(), server, strays, folder)
        notebook.open("first.ipynb")
        last = measured[-1]
        for number in (number for number in code if number < last):
            notebook.run(number)
            notebook.wait_for(number)
        # The last measured cell runs out of memory, which is its purpose: the report first, an offer, then PyTorch's error, once.
        notebook.run(last)
        with pytest.raises(AssertionError, match="CUDA out of memory"):
            notebook.wait_for(last)
        kinds = [output["output_type"] for output in notebook.outputs(last)]
        assert kinds == ["display_data", "stream", "error"]
        assert "%%gpumem --advise" in notebook.outputs(last)[1]["text"]
        page = notebook.page
        page.wait_for_function(f"() => document.querySelectorAll('{REPORT}').length === {len(measured)}")
        # Style sheets work here: the report that opens stands in the still picture's place.
        assert [one["shown"] for one in pictures(page, len(measured), in_sight=False)] == [0] * len(measured)
        look = page.evaluate(LOOK)
        assert look["rows"] > 3
        assert abs(look["bar"] - look["room"]) < 2
        assert look["wide"]
        # Columns of words to the left, of figures to the right, whatever the notebook does with tables.
        assert look["sides"] == 0
        shoot(page, "light")
        for colour in (look["ink"], look["quiet"]):
            assert contrast(colour, look["paper"]) >= 4.5
        check_accessible(page, REPORT)

        # The keyboard opens a row and closes it, and the notebook does not begin to edit the cell.
        row = page.locator(f"{REPORT} .gpumem-row:not([open]) > summary:visible").first
        row.focus()
        for key, more in (("Enter", 1), ("Space", 0), ("Space", 1), ("Enter", 0)):
            page.keyboard.press(key)
            page.wait_for_function(f"() => ({LOOK})().open === {look['open'] + more}")
            assert page.evaluate("() => document.activeElement.tagName") == "SUMMARY"
        row.click()
        page.wait_for_function(f"() => ({LOOK})().open === {look['open'] + 1}")
        assert page.evaluate(LOOK)["rows"] >= look["rows"]
        # Figures where the pointer rests.
        page.locator(f"{REPORT} .gpumem-course > i").first.hover()
        page.wait_for_function(
            f"() => getComputedStyle(document.querySelector('{REPORT} .gpumem-course > i'), '::after').content.includes('MiB')"
        )

        notebook.turn_dark()
        dark = page.evaluate(LOOK)
        assert dark["paper"] != look["paper"]
        for colour in (dark["ink"], dark["quiet"]):
            assert contrast(colour, dark["paper"]) >= 4.5
        check_accessible(page, REPORT)
        shoot(page, "dark")
        page.set_viewport_size({"width": 560, "height": 900})
        page.wait_for_function(f"() => document.querySelector('{REPORT}').clientWidth < 520")
        page.wait_for_function(f"() => ({LOOK})().wide")
        shoot(page, "narrow")
        page.set_viewport_size({"width": 1100, "height": 1000})
        (shown,) = [output for output in notebook.outputs(measured[0]) if output["output_type"] == "display_data"]
        assert {"text/plain", "text/html", "image/png"} <= set(shown["data"])
        assert "<script" not in shown["data"]["text/html"]
        notebook.save()
        assert not notebook.errors
        # Somebody else's notebook is not trusted: no style sheet, so the pictures are there.
        theirs = nbformat.read(folder / "first.ipynb", as_version=4)
        theirs.cells.append(nbformat.v4.new_markdown_cell("changed"))
        for cell in theirs.cells:
            cell.metadata.pop("trusted", None)
        nbformat.write(theirs, folder / "theirs.ipynb")
        again = Notebook(context.new_page(), server, strays, folder)
        again.open("theirs.ipynb")
        found = pictures(again.page, len(measured), in_sight=True)
        assert len(found) == len(measured)
        for picture in found:
            assert "GPU memory" in picture["words"] or "MiB" in picture["words"]
        assert again.page.locator("details.gpumem-live[open]").count() == 0
        assert again.page.locator(f"{REPORT} .gpumem-rows").first.is_hidden()
        shoot(again.page, "not-trusted")
        assert not again.errors
        assert not strays
