"""``%gpumem_load`` in a real JupyterLab: the interactive timeline in its frame, the report, and a hostile file as one line."""

from __future__ import annotations

import pickle
import random
from pathlib import Path

import pytest
from hostile_snapshots import recording

pytest.importorskip("playwright", reason="the browser tests need playwright")
pytest.importorskip("jupyterlab", reason="the browser tests need jupyterlab")

from notebook_browser import Notebook, browsing, chromium, eventually, serving, write_notebook

BROWSER = chromium()
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed: the browser tests did not run")


def test_in_jupyterlab(tmp_path: Path) -> None:
    assert BROWSER is not None
    folder, own = tmp_path / "notebooks", tmp_path / "own"
    folder.mkdir()
    own.mkdir()
    (folder / "run.pickle").write_bytes(pickle.dumps(recording(random.Random(3), 90), 4))
    (folder / "broken.pickle").write_bytes(b"\x80\x04cos\nsystem\n.")
    write_notebook(
        folder / "load.ipynb",
        ["%load_ext gpumem_magic\n%gpumem_load run.pickle -o report", "print(report)", "%gpumem_load broken.pickle"],
    )
    with serving("lab", folder, own) as server, browsing(BROWSER, tmp_path / "profile") as (context, strays):
        notebook = Notebook(context.new_page(), server, strays, folder)
        notebook.open("load.ipynb")
        notebook.run(0)
        notebook.wait_for(0)
        frame = notebook.page.frame_locator("iframe[title^='GPU memory timeline']")
        frame.locator("#moment").wait_for()
        frame.locator("#over").press("End")
        drawn = frame.locator("#stack").evaluate("(canvas) => [canvas.width, canvas.height]")
        assert drawn[0] > 300
        assert drawn[1] > 200
        assert "allocated" in frame.locator("#moment").inner_text()
        notebook.page.locator(".jp-OutputArea img[alt^='<Timeline of']").wait_for(state="attached")
        # The frame follows the notebook's theme, and the reader's own choice after it.
        paper = "() => getComputedStyle(document.body).backgroundColor"
        light = frame.locator("body").evaluate(paper)
        notebook.turn_dark()

        def dark() -> None:
            assert frame.locator("#theme").inner_text() == "Light"
            assert frame.locator("body").evaluate(paper) != light

        eventually(notebook.page, dark)
        frame.locator("#theme").click()
        assert frame.locator("body").evaluate(paper) == light
        # Until the notebook's theme is another: a change of anything else in its page tells the same theme once more.
        frame.locator("body").evaluate(
            "() => { window.heard = new Promise((then) => window.addEventListener('message', then)); }"
        )
        notebook.page.evaluate("() => { document.body.dataset.other = 'changed'; }")
        frame.locator("body").evaluate("async () => { await window.heard; }")
        assert frame.locator("body").evaluate(paper) == light
        notebook.run(1)
        assert "Peak" in notebook.wait_for(1)
        notebook.run(2)
        assert "broken.pickle: it holds a global" in notebook.wait_for(2)
        assert notebook.errors == []
        assert strays == []
