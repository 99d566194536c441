"""The bar of a long measured cell in a real JupyterLab: there while the cell runs, and afterwards as if it had never been."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="the browser tests need playwright")
pytest.importorskip("jupyterlab", reason="the browser tests need jupyterlab")
pytest.importorskip("anywidget", reason="the bar needs anywidget")

from notebook_browser import Notebook, browsing, chromium, eventually, serving, write_notebook

BROWSER = chromium()
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed: the browser tests did not run")
START, LONG = range(2)
# It ends when the test has seen the bar.
CELLS = [
    "%load_ext gpumem_magic\n%gpumem_device T4\nimport os, time, torch",
    """%%gpumem
kept = []
print("begins")
while not os.path.exists("seen"):
    kept.append(torch.empty(1 << 20, device="cuda"))
    time.sleep(0.2)
print("ends")
""",
]
BAR = ".gpumem-progress"


def test_the_bar_is_there_while_the_cell_runs_and_leaves_no_trace(tmp_path: Path) -> None:
    folder, own = tmp_path / "notebooks", tmp_path / "own"
    folder.mkdir()
    own.mkdir()
    write_notebook(folder / "long.ipynb", CELLS)
    assert BROWSER is not None
    with serving("lab", folder, own) as server, browsing(BROWSER, tmp_path / "profile") as (context, strays):
        notebook = Notebook(context.new_page(), server, strays, folder)
        page = notebook.page
        notebook.open("long.ipynb")
        notebook.run(START)
        notebook.wait_for(START)
        before = notebook.comms()
        notebook.run(LONG)
        page.wait_for_function(f"() => document.querySelector('{BAR}')?.innerText.includes('MiB allocated')")
        assert notebook.is_busy(LONG)
        # It goes on, and it is no output.
        first = page.inner_text(BAR)
        page.wait_for_function(f"(first) => document.querySelector('{BAR}').innerText !== first", arg=first)

        def begins() -> None:
            assert [output["output_type"] for output in notebook.outputs(LONG)] == ["stream"]

        eventually(page, begins)
        if screens := os.environ.get("GPUMEM_SCREENSHOTS"):
            page.screenshot(path=str(Path(screens) / "progress.png"))
        (folder / "seen").touch()
        assert notebook.wait_for(LONG) == "begins\nends\n"
        page.wait_for_function(f"() => document.querySelector('{BAR}') === null")
        assert [output["output_type"] for output in notebook.outputs(LONG)] == ["stream", "display_data"]

        def gone() -> None:
            assert notebook.comms() == before

        eventually(page, gone)
        notebook.save()
        stored = json.loads((folder / "long.ipynb").read_text("utf-8"))
        assert "widgets" not in stored["metadata"]
        assert "gpumem-progress" not in json.dumps(stored)
        assert not notebook.errors
        assert not strays
