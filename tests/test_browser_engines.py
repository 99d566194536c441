"""A cluster of four engines of ipyparallel, seen from JupyterLab in a headless Chromium: one report, and their devices live."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from notebook_browser import Notebook, browsing, check_accessible, chromium, eventually, serving, write_notebook

if any(find_spec(name) is None for name in ("playwright", "nbformat", "jupyterlab", "anywidget", "ipyparallel")):
    pytest.skip("playwright, jupyterlab, anywidget and ipyparallel are needed", allow_module_level=True)
BROWSER = chromium()
if BROWSER is None:
    pytest.skip("no Chromium is installed", allow_module_level=True)

START, LAST, WATCH, DEVICE, TRAIN, FAIL, STOP, END = range(8)
CELLS = [
    "%load_ext gpumem_magic\nimport ipyparallel\n"
    "cluster = ipyparallel.Cluster(n=4, controller_ip='127.0.0.1', log_level=40)\n"
    "client = cluster.start_and_connect_sync(activate=True)\n"
    "client[:].scatter('mine', range(4), flatten=True, block=True)",
    # The last engine is the first with a device.
    "%%px --block --targets 3\n%load_ext gpumem_magic\n%gpumem_device T4",
    "%gpumem_watch --engines all",
    "%%px --block\n%load_ext gpumem_magic\n%gpumem_device T4",
    # Trains until the test says that it has seen enough; the browser needs the cores, too.
    """%%gpumem --engines all
import time, torch
from pathlib import Path
model = torch.nn.Linear(1024, 1024 * (mine + 1), bias=False).cuda()
optimizer = torch.optim.Adam(model.parameters())
for step in range(100_000):
    model(torch.randn(64, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.05)
    if Path("enough").exists():
        break
""",
    "%%gpumem --engines [0,3]\nif mine == 3:\n    torch.empty(1 << 40, device='cuda')",
    "%gpumem_watch stop",
    "cluster.stop_cluster_sync()",
]
REPORT, CHART = ".gpumem-report", ".gpumem-watch"


def shoot(shown: Any, name: str) -> None:
    """Pictures for whoever looks at them, where the environment names a folder."""
    folder = os.environ.get("GPUMEM_SCREENSHOTS")
    if folder:
        shown.screenshot(path=str(Path(folder) / f"engines-{name}.png"))


def test_four_engines_have_one_report_and_one_chart(tmp_path: Path) -> None:
    folder, own = tmp_path / "notebooks", tmp_path / "own"
    folder.mkdir()
    own.mkdir()
    write_notebook(folder / "engines.ipynb", CELLS)
    assert BROWSER is not None
    with serving("lab", folder, own) as server, browsing(BROWSER, tmp_path / "profile") as (context, strays):
        notebook = Notebook(context.new_page(), server, strays, folder)
        page = notebook.page
        notebook.open("engines.ipynb")
        try:
            for cell in (START, LAST, WATCH):
                notebook.run(cell)
                notebook.wait_for(cell)
            page.wait_for_function(
                f"() => document.querySelector('{CHART} .gpumem-line')?.innerText.startsWith('engine 3 ')"
            )
            # The engines' devices are drawn while they and the notebook's kernel are busy.
            notebook.run(TRAIN)
            page.wait_for_function(f"() => +document.querySelector('{CHART}')?.dataset.samples >= 5")
            page.wait_for_selector(f"{CHART} [data-layer=optimizer_state]")
            shoot(page.locator(CHART).first, "busy")
            assert notebook.is_busy(TRAIN)
            page.wait_for_function(f"() => document.querySelectorAll('{CHART} .gpumem-canvas').length === 4")

            def ordered() -> None:
                lines = page.locator(f"{CHART} .gpumem-line").all_inner_texts()
                assert [line.split()[:2] for line in lines] == [["engine", str(number)] for number in range(4)]

            eventually(page, ordered)
            (folder / "enough").touch()
            notebook.wait_for(TRAIN)
            said = page.locator(REPORT).first.inner_text()
            shoot(page.locator(REPORT).first, "report")
            assert "Rank 3 peaks highest" in said
            check_accessible(page, REPORT)
            # The error is ipyparallel's, below the report of both.
            notebook.run(FAIL)
            with pytest.raises(AssertionError, match="1 errors"):
                notebook.wait_for(FAIL)
            assert "CUDA out of memory" in str(notebook.outputs(FAIL))
            shoot(page.locator(REPORT).nth(1), "failed")
            assert "Rank 1 ran out of memory" in page.locator(REPORT).nth(1).inner_text()
            notebook.run(STOP)
            notebook.wait_for(STOP)
            page.locator(CHART).wait_for(state="detached")
            page.mouse.wheel(0, 5000)
            shoot(page, "stopped")
        finally:
            (folder / "enough").touch()
            notebook.run(END)
            notebook.wait_for(END)
        assert strays == []
        assert notebook.errors == []
