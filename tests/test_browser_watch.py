"""The watch in JupyterLab and in Notebook 7, in a headless Chromium: what a reader sees, down to the pixels.

Skipped where Chromium, Playwright or the notebook server is missing. Nothing here asserts a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from notebook_browser import Notebook, browsing, check_accessible, chromium, eventually, serving, write_notebook

from gpumem_magic.widgets.columns import LAYER_COLOURS, LAYERS

if any(
    find_spec(name) is None for name in ("playwright", "nbformat", "jupyterlab", "notebook", "anywidget", "ipykernel")
):
    pytest.skip("playwright, jupyterlab, notebook, anywidget and ipykernel are needed", allow_module_level=True)
CHROMIUM = chromium()
if CHROMIUM is None:
    pytest.skip("no Chromium is installed", allow_module_level=True)

START, TRAIN, REPORT, AGAIN, STOP = range(5)
CELLS = [
    "%load_ext gpumem_magic\n%gpumem_device T4\nimport os, time, torch\nfrom pathlib import Path\n%gpumem_watch",
    # Trains until the test says that it has seen enough; the browser needs the cores, too.
    """%%gpumem -q -o report
model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(6)]).cuda()
optimizer = torch.optim.Adam(model.parameters())
while not Path("enough").exists():
    batch = torch.randn(16384, 4096, device="cuda")
    loss = model(batch).square().mean()
    time.sleep(0.05)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
""",
    "import json\nprint(json.dumps(report.checkpoints[-1].categories))",
    "%gpumem_watch\n%gpumem_watch mark second",
    "%gpumem_watch stop\nimport threading, gpumem_magic\n"
    "print(sum(thread.name == 'gpumem-watch' for thread in threading.enumerate()), gpumem_magic.last_watch().devices[0].taken)",
]
WATCH = ".gpumem-watch"

# Runs of one colour in the column of pixels through the middle of the bar, bottom to top: [[r, g, b], height in CSS pixels].
BAR = """() => {
  const canvas = document.querySelector('.gpumem-canvas'), ratio = window.devicePixelRatio || 1, data = canvas.dataset;
  const x = Math.round(data.barX * ratio), top = Math.round(data.upper * ratio), height = Math.round(data.plot * ratio);
  const pixels = canvas.getContext('2d').getImageData(x, top, 1, height).data, found = [];
  for (let i = height - 1; i >= 0; i--) {
    const colour = [...pixels.slice(4 * i, 4 * i + 4)], last = found[found.length - 1];
    if (last && last[0].join() === colour.join()) last[1] += 1 / ratio; else found.push([colour, 1 / ratio]);
  }
  return { runs: found.filter(([colour]) => colour[3] === 255).map(([colour, size]) => [colour.slice(0, 3), size]),
           perPixel: data.top / data.plot };
}"""
COLOURS_IN_PLOT = """() => {
  const canvas = document.querySelector('.gpumem-canvas'), ratio = window.devicePixelRatio || 1;
  const width = Math.round((canvas.dataset.barX - 25) * ratio);
  const data = canvas.getContext('2d').getImageData(0, 0, width, canvas.height).data, found = {};
  for (let i = 0; i < data.length; i += 4) {
    if (data[i + 3] === 255) { const key = [data[i], data[i + 1], data[i + 2]].join(); found[key] = (found[key] ?? 0) + 1; }
  }
  return found;
}"""


def rgb(layer: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(LAYER_COLOURS[layer][1:]))


def area(page: Any, layer: str) -> int:
    return int(page.evaluate(COLOURS_IN_PLOT).get(",".join(map(str, rgb(layer))), 0))


def state(page: Any, name: str) -> str:
    return str(page.locator(WATCH).first.get_attribute(f"data-{name}"))


def wait_samples(page: Any, more: int) -> int:
    """Waits until the page has so many more samples, and returns how many it has."""
    page.wait_for_function(f"() => document.querySelector('{WATCH}')?.dataset.samples !== undefined")
    goal = int(state(page, "samples")) + more
    page.wait_for_function(f"() => +document.querySelector('{WATCH}')?.dataset.samples >= {goal}")
    return goal


def wait_state(page: Any, wanted: str) -> None:
    page.wait_for_function(f"() => document.querySelector('{WATCH}')?.dataset.state === '{wanted}'")


@pytest.fixture(params=["lab", "notebook"])
def app(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def open_notebook(app: str, tmp_path: Path) -> Iterator[Callable[[list[str]], Notebook]]:
    """Writes a notebook with these cells, and opens it."""
    folder, own = tmp_path / "notebooks", tmp_path / "own"
    folder.mkdir()
    own.mkdir()
    with ExitStack() as stack:

        def opened(cells: list[str]) -> Notebook:
            write_notebook(folder / "watch.ipynb", cells)
            server = stack.enter_context(serving(app, folder, own))
            context, strays = stack.enter_context(browsing(CHROMIUM or "", tmp_path / "profile"))
            notebook = Notebook(context.new_page(), server, strays, folder)
            # Ends a cell that waits for them, also where a test failed.
            stack.callback((folder / "enough").touch)
            stack.callback((folder / "drawn").touch)
            notebook.open("watch.ipynb")
            return notebook

        yield opened


def test_the_watch_lives_while_the_cell_runs_and_leaves_its_picture(
    open_notebook: Callable[[list[str]], Notebook], tmp_path: Path
) -> None:
    notebook = open_notebook(CELLS)
    page = notebook.page
    notebook.run(START)
    notebook.wait_for(START)
    page.locator(WATCH).wait_for()

    # It grows while the cell holds the kernel: samples, and paint.
    notebook.run(TRAIN)
    page.wait_for_function(f"() => +document.querySelector('{WATCH}')?.dataset.samples >= 5")
    page.wait_for_selector("[data-layer=optimizer_state]")
    before = wait_samples(page, 5)
    wait_samples(page, 10)
    assert notebook.is_busy(TRAIN)
    assert int(state(page, "samples")) >= before + 10

    def painted() -> None:
        for layer in ("parameters", "gradients", "optimizer_state", "context"):
            assert area(page, layer) > 50, layer
        assert int(state(page, "marks")) > 0

    eventually(page, painted)

    # Buttons are answered by the busy kernel (ipykernel 7 and later have subshells), and by the page in any case.
    page.click(".gpumem-mark")
    page.click(".gpumem-pause")
    wait_state(page, "paused")
    page.wait_for_function("() => document.querySelector('.gpumem-pause').innerText === 'Resume'")
    page.click(".gpumem-pause")
    wait_state(page, "running")
    wait_samples(page, 3)
    assert notebook.is_busy(TRAIN)

    # After the cell, the bar is the report's last row: in figures, and in pixels.
    (notebook.folder / "enough").touch()
    notebook.wait_for(TRAIN)
    notebook.run(REPORT)
    categories = {name: size for name, size in json.loads(notebook.wait_for(REPORT)).items() if size}
    page.wait_for_function(
        "(wanted) => { const shown = {}; for (const row of document.querySelectorAll('.gpumem-table tr[data-layer]'))"
        " { const size = +row.querySelector('td').dataset.bytes; if (size) shown[row.dataset.layer] = size; }"
        " return Object.keys(shown).length === Object.keys(wanted).length"
        "  && Object.entries(wanted).every(([name, size]) => shown[name] === size); }",
        arg=categories,
    )

    def drawn() -> None:
        bar = page.evaluate(BAR)
        heights: dict[tuple[int, ...], float] = {}
        for colour, height in bar["runs"]:
            heights[tuple(colour)] = heights.get(tuple(colour), 0) + height
        for layer in LAYERS:
            expected = categories.get(layer, 0) / bar["perPixel"]
            if expected >= 3:
                # A pixel at each end is a mixture of two colours.
                assert heights.get(rgb(layer), 0) == pytest.approx(expected, abs=2.1), layer
        assert not page.locator("[data-layer=not_yet_known]:not(.gpumem-none)").count()
        assert area(page, "activations") > 0

    eventually(page, drawn)

    check_accessible(page, WATCH)

    # The keyboard goes through the samples, and says where it is.
    canvas = page.locator(".gpumem-canvas")
    last = canvas.get_attribute("aria-valuetext")
    canvas.press("Home")
    page.wait_for_function("() => document.querySelector('.gpumem-canvas').getAttribute('aria-valuenow') === '0'")
    assert canvas.get_attribute("aria-valuetext") != last
    first = canvas.get_attribute("aria-valuetext").partition(":")[0]
    page.wait_for_function(
        "(first) => document.querySelector('.gpumem-table caption').innerText.startsWith(`at ${first}`)", arg=first
    )
    canvas.press("Escape")
    page.wait_for_function("() => document.querySelector('.gpumem-table caption').innerText === 'now'")

    # The page is loaded anew, and was not saved since: the chart comes back with what it had, in the page's own output.
    notebook.save()
    taken = int(state(page, "samples"))
    notebook.open("watch.ipynb")
    page.wait_for_function(f"(taken) => +(document.querySelector('{WATCH}')?.dataset.samples ?? 0) >= taken", arg=taken)
    page.locator(".gpumem-still").wait_for(state="hidden")
    # The picture that a page without this kernel shows is of the last cell's end.
    stored = json.loads((notebook.folder / "watch.ipynb").read_text("utf-8"))["cells"][START]["outputs"][-1]["data"]
    assert set(stored) == {"text/html", "text/plain"}
    assert "data:image/svg+xml;base64," in "".join(stored["text/html"])

    # Another watch ends the first, which leaves its picture.
    notebook.run(AGAIN)
    notebook.wait_for(AGAIN)
    page.wait_for_function(f"() => document.querySelectorAll('{WATCH}').length === 1")

    def a_widget_and_its_layout() -> None:
        assert notebook.comms() == 2

    eventually(page, a_widget_and_its_layout)
    notebook.run(STOP)
    threads, taken = notebook.wait_for(STOP).split()
    assert threads == "0"
    assert int(taken) > 0
    page.wait_for_function(f"() => document.querySelectorAll('{WATCH}').length === 0")

    def no_comm_is_left() -> None:
        assert notebook.comms() == 0

    eventually(page, no_comm_is_left)
    pictures = (
        "() => [...document.querySelectorAll('.jp-OutputArea img')].filter((image) => image.naturalWidth > 500).length"
    )
    # The new page could not place the first one's, so that the cell that ended it has it too.
    page.wait_for_function(f"() => ({pictures})() === 3")
    for cell, count in ((START, 1), (AGAIN, 2)):
        shown = [output["data"] for output in notebook.outputs(cell) if output["output_type"] == "display_data"]
        assert [set(one) for one in shown] == [{"text/html", "text/plain"}] * count

    # Reopened: the pictures, without a kernel that knows of them. Exported: the same.
    notebook.save()
    notebook.open("watch.ipynb")
    page.wait_for_function(f"() => ({pictures})() === 3")
    assert "Error displaying widget" not in page.inner_text("body")
    assert notebook.strays == []
    assert notebook.errors == []
    check_export(notebook.folder / "watch.ipynb", tmp_path)


def check_export(path: Path, folder: Path) -> None:
    nbconvert = pytest.importorskip("nbconvert", reason="the export needs nbconvert")
    page, _ = nbconvert.HTMLExporter(template_name="basic").from_filename(str(path))
    (folder / "watch.html").write_text(page)
    assert page.count("data:image/png;base64,") == 2
    assert page.count("data:image/svg+xml;base64,") == 1
    assert "GPU memory, watched" in page
    assert "application/vnd.jupyter.widget-view+json" not in page


OTHERS = [
    # To begin with, virtual devices are drawn as GPUs are: once they hold something.
    """%load_ext gpumem_magic
%gpumem_device 2xT4
import time, torch
from pathlib import Path
from gpumem_magic.virtual.machine import VirtualMachine
VirtualMachine.in_use = lambda machine: [
    one for one in machine.devices if one.counters().reserved or Path("drawn").exists()
]
%gpumem_watch""",
    "from IPython.display import display\nfrom gpumem_magic.widgets import watch\ndisplay(watch.running().front.widget)",
    # The second device is the first in use.
    """%%gpumem -q
kept = [torch.zeros(1 << 24, device="cuda:1")]
while not Path("drawn").exists():
    time.sleep(0.01)
kept.append(torch.zeros(1 << 24, device="cuda:0"))
turn = 0
while not Path("enough").exists():
    turn += 1
    other = torch.zeros(turn % 50 << 20, device="cuda:1")
    time.sleep(0.02)
""",
    "%gpumem_watch --static",
    "%gpumem_watch stop\nimport comm\nprint(len(comm.get_comm_manager().comms))",
]
VIEW_TWICE, BUSY, STATIC, END = range(1, 5)
INTERRUPT = "async () => { await window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.interrupt(); }"
RESTART = "async () => { await window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart(); }"


def test_two_views_an_interrupt_a_static_picture_and_a_restart(
    open_notebook: Callable[[list[str]], Notebook],
) -> None:
    notebook = open_notebook(OTHERS)
    page = notebook.page
    notebook.run(START)
    notebook.wait_for(START)
    notebook.run(VIEW_TWICE)
    notebook.wait_for(VIEW_TWICE)
    page.wait_for_function(f"() => document.querySelectorAll('{WATCH}').length === 2")

    # Two views of one widget go on together, each with a chart for each device, in the devices' order.
    notebook.run(BUSY)
    page.wait_for_function("() => document.querySelectorAll('.gpumem-canvas').length === 2")
    assert [line.split()[0] for line in page.locator(".gpumem-line").all_inner_texts()] == ["cuda:1"] * 2
    (notebook.folder / "drawn").touch()
    page.wait_for_function("() => document.querySelectorAll('.gpumem-canvas').length === 4")

    def ordered() -> None:
        lines = page.locator(".gpumem-line").all_inner_texts()
        assert [line.split()[0] for line in lines] == ["cuda:0", "cuda:1"] * 2
        assert all("allocated 64.0 MiB" in line for line in lines[::2])

    eventually(page, ordered)
    goal = wait_samples(page, 5)
    page.wait_for_function(
        f"() => [...document.querySelectorAll('{WATCH}')].every((view) => +view.dataset.samples >= {goal})"
    )
    assert notebook.is_busy(BUSY)

    def titled() -> None:
        titles = page.locator(WATCH).first.locator(".gpumem-table thead th").all_inner_texts()
        assert titles == ["cuda:0", "cuda:1"]

    eventually(page, titled)
    # A pause in one of them is seen in the other.
    page.locator(".gpumem-pause").first.click()
    page.wait_for_function(
        f"() => [...document.querySelectorAll('{WATCH}')].every((view) => view.dataset.state === 'paused')"
    )
    page.locator(".gpumem-pause").first.click()
    wait_state(page, "running")

    # The interrupt ends the cell, and not the watch.
    page.evaluate(INTERRUPT)
    page.wait_for_function("(n) => {" + IDLE + "}", arg=BUSY)
    assert "KeyboardInterrupt" in [output.get("ename") for output in notebook.outputs(BUSY)]
    wait_samples(page, 5)

    # A static picture takes its place, and is replaced while a cell runs. It needs no comm.
    notebook.run(STATIC)
    notebook.wait_for(STATIC)
    page.wait_for_function(f"() => document.querySelectorAll('{WATCH}').length === 0")
    notebook.run(BUSY)
    first = svg_of(notebook)
    for _ in range(2):
        page.wait_for_function("([n, before]) => {" + SVG + " return svg && svg !== before; }", arg=[STATIC, first])
        first = svg_of(notebook)
    assert notebook.is_busy(BUSY)
    assert "cuda:1" in first
    (notebook.folder / "enough").touch()
    notebook.wait_for(BUSY)
    notebook.run(END)
    assert notebook.wait_for(END).split() == ["0"]
    (shown,) = (output for output in notebook.outputs(STATIC) if output["output_type"] == "display_data")
    assert set(shown["data"]) == {"text/html", "text/plain"}

    # The page of a kernel that has gone says so; loaded anew it has the picture, and another run of the cell begins anew.
    notebook.run(START)
    page.locator(WATCH).wait_for()
    wait_samples(page, 2)
    notebook.save()
    page.evaluate(RESTART)
    wait_state(page, "stale")
    page.wait_for_function("() => document.querySelector('.gpumem-status').innerText.startsWith('stale')")
    notebook.open("watch.ipynb")
    page.locator(".gpumem-still img").first.wait_for()
    page.wait_for_function(f"() => document.querySelectorAll('{WATCH}').length === 0")
    assert "Error displaying widget" not in page.inner_text("body")
    notebook.run(START)
    page.wait_for_function(f"() => document.querySelector('{WATCH}')?.dataset.state === 'running'")
    wait_samples(page, 2)
    assert notebook.strays == []
    assert notebook.errors == []


IDLE = (
    "const model = window.jupyterapp.shell.currentWidget.content.widgets[n];"
    " return model.model.executionCount != null && !model.node.innerText.includes('[*]');"
)
SVG = (
    "const outputs = window.jupyterapp.shell.currentWidget.content.widgets[n].model.outputs.toJSON();"
    " const svg = outputs.map((output) => output.data?.['image/svg+xml']).flat().filter(Boolean).join('');"
)


def svg_of(notebook: Notebook) -> str:
    return str(notebook.page.evaluate("(n) => {" + SVG + " return svg; }", STATIC))
