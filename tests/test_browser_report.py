"""The first notebook in a real JupyterLab and a real browser: the pictures are there, also when it is opened again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest

pytest.importorskip("playwright", reason="the browser tests need playwright")
pytest.importorskip("jupyterlab", reason="the browser tests need jupyterlab")

from notebook_browser import Notebook, browsing, chromium, serving

BROWSER = chromium()
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed: the browser tests did not run")
NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "01_first_cell.ipynb"
PICTURES = """() => [...document.querySelectorAll('.jp-OutputArea img')]
    .map(image => ({width: image.naturalWidth, shown: image.getBoundingClientRect().width, words: image.alt}))"""


def pictures(page: Any, count: int) -> list[dict[str, Any]]:
    """The pictures in the outputs, once there are `count` of them, loaded."""
    page.wait_for_function(
        f"() => {{ const found = ({PICTURES})(); return found.length >= {count} && found.every(one => one.width > 0); }}"
    )
    found: list[dict[str, Any]] = page.evaluate(PICTURES)
    return found


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
        # The last measured cell runs out of memory, which is its purpose: the report first, then PyTorch's error, once.
        notebook.run(last)
        with pytest.raises(AssertionError, match="CUDA out of memory"):
            notebook.wait_for(last)
        kinds = [output["output_type"] for output in notebook.outputs(last)]
        assert kinds == ["display_data", "error"]
        found = pictures(notebook.page, len(measured))
        assert len(found) == len(measured) == 2
        for picture in found:
            assert picture["shown"] > 400
            assert "GPU memory" in picture["words"] or "MiB" in picture["words"]
        (shown,) = [output for output in notebook.outputs(measured[0]) if output["output_type"] == "display_data"]
        assert {"text/plain", "text/html", "image/png"} <= set(shown["data"])
        assert "<script" not in shown["data"]["text/html"]
        notebook.save()
        assert not notebook.errors
        again = Notebook(context.new_page(), server, strays, folder)
        again.open("first.ipynb")
        assert len(pictures(again.page, 2)) == 2
        assert not again.errors
        assert not strays
        context.pages[-2].screenshot(path=tmp_path / "screen.png")
