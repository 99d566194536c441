"""Every notebook runs from top to bottom without a GPU, and the outputs that are stored in it are what the code makes today."""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import warm

pytest.importorskip("nbclient", reason="running notebooks needs nbclient")
pytest.importorskip("ipykernel", reason="running notebooks needs ipykernel")

import nbformat
from project_scripts import load

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
HOME = re.compile(r"(?<![\w.])/(?:home|root|Users|work|tmp|opt|mnt)/[\w.]")
# Binder's smallest machines have 2 GiB.
MOST_KIB = 1.5 * 2**20
# Not `getrusage`, whose figure is inherited from the process that started the kernel.
HIGHEST = """
import pathlib
status = pathlib.Path("/proc/self/status")
lines = status.read_text().splitlines() if status.exists() else []
print(next((line.split()[1] for line in lines if line.startswith("VmHWM")), 0))
"""


def refresh() -> Any:
    return load(FOLDER / "refresh.py")


def difference(then: list[str], now: list[str]) -> str:
    """The first lines that are not the same."""
    changes = difflib.unified_diff("\n".join(then).splitlines(), "\n".join(now).splitlines(), lineterm="", n=0)
    return " / ".join(line[:200] for line in list(changes)[3:9])


def test_there_are_notebooks() -> None:
    assert {"01_first_cell.ipynb", "02_colab_investigation.ipynb"} <= {path.name for path in NOTEBOOKS}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_it_runs_and_its_stored_outputs_are_todays(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    made = refresh()
    fresh = made.execute(path, afterwards=HIGHEST, python=warm.executable())
    assert int(fresh.metadata["afterwards"]) < MOST_KIB
    stored = nbformat.read(path, as_version=4)
    if not any(cell.get("outputs") for cell in stored.cells):
        pytest.skip(f"{path.name} ran; it has no stored outputs to compare with")
    code = [cell.source.partition("\n")[0] for cell in stored.cells if cell.cell_type == "code"]
    stale = [
        f"cell {number} ({first}): {difference(then, now)}"
        for number, (first, then, now) in enumerate(zip(code, made.told(stored), made.told(fresh), strict=True))
        if then != now
    ]
    assert not stale, f"stale outputs, `python notebooks/refresh.py {path.name}` stores today's: {', '.join(stale)}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_what_is_stored_names_no_computer_and_loads_nothing(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            text = re.sub(r"base64,[A-Za-z0-9+/=\s]+", "", json.dumps(output))
            assert not HOME.search(text), HOME.search(text)
            if output.output_type in ("display_data", "execute_result"):
                html = "".join(output.data.get("text/html", ""))
                # A timeline's page is in a frame without rights of the notebook; GitHub leaves it out and shows the picture.
                frames = re.findall(r"<iframe[^>]*", html)
                assert all('sandbox="allow-scripts"' in frame and "srcdoc=" in frame for frame in frames)
                assert not frames or "image/png" in output.data
                html = re.sub(r'srcdoc="[^"]*"', "", html)
                assert not re.search(r"<script|<link|src=\"http", html)
    if any(cell.get("outputs") for cell in notebook.cells):
        counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
        assert counts == list(range(1, len(counts) + 1))


def test_the_documentation_opens_with_the_first_notebooks_picture() -> None:
    made = refresh()
    stored = nbformat.read(FOLDER / "01_first_cell.ipynb", as_version=4)
    assert made.FIRST_PICTURE.read_bytes() == made.first_picture(stored)
    assert f"{{image}} {made.FIRST_PICTURE.name}\n" in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")


def test_binders_environment_has_what_the_package_and_the_notebooks_need() -> None:
    """The names are conda-forge's; nothing here asks conda whether it can resolve them."""
    names = {"torch": "pytorch-cpu", "matplotlib": "matplotlib-base"}
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.search(r"^dependencies = \[\n(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    assert listed is not None
    needed = re.findall(r'"([a-z-]+)([^"]*)"', listed[1])
    assert ("torch", ">=2.9") in needed
    needed += re.findall(r'^    "(transformers|jupyterlab)([^"]*)"', project, re.MULTILINE)
    lines = (ROOT / "binder" / "environment.yml").read_text(encoding="utf-8").splitlines()
    for name, bounds in needed:
        assert f"  - {names.get(name, name)}{bounds}" in lines
    assert "--no-deps" in (ROOT / "binder" / "postBuild").read_text(encoding="utf-8")
    # What the notebooks import, by the names under which it is installed; numpy comes with matplotlib.
    imported = {
        name
        for path in NOTEBOOKS
        for cell in nbformat.read(path, as_version=4).cells
        if cell.cell_type == "code"
        for name in re.findall(r"^(?:from|import) (\w+)", cell.source, re.MULTILINE)
    }
    known = {"torch", "transformers", "matplotlib", "numpy", "pynvml", "IPython", "gpumem_magic"}
    assert imported - set(sys.stdlib_module_names) <= known


QUESTION = re.compile(r"<details>\s*<summary>")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_it_asks_its_reader_and_shows_its_proofs(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    words = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    assert len(QUESTION.findall(words)) >= 3
    assert words.count("<details") == words.count("</details>")
    asserted = [
        line for cell in cells if cell.cell_type == "code" for line in re.findall(r"^ *assert ", cell.source, re.M)
    ]
    assert len(asserted) >= 2


def test_a_stale_output_is_seen() -> None:
    made = refresh()
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("print(1)")])
    notebook.cells[0].outputs = [nbformat.v4.new_output("stream", name="stdout", text="1\n")]
    before = made.told(notebook)
    notebook.cells[0].outputs[0].text = "2\n"
    assert made.told(notebook) != before
    notebook.cells[0].outputs = [nbformat.v4.new_output("error", ename="E", evalue="out of memory", traceback=["x"])]
    failed = made.told(notebook)
    notebook.cells[0].outputs[0].evalue = "out of luck"
    assert made.told(notebook) != failed


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("File /usr/lib/python3/dist-packages/torch/x.py:3", "File torch/x.py:3"),
        ("/usr/lib/python3.11/asyncio/events.py:80", "asyncio/events.py:80"),
        ("at 0x7f00deadbeef", "at 0x…"),
        (f"{ROOT.resolve()}/gpumem_magic/units.py", "gpumem_magic/units.py"),
        ("/tmp/ipykernel_12/345.py, line 3", "the cell, line 3"),
        ("3,769 MiB of 16,160", "3,769 MiB of 16,160"),
    ],
)
def test_places_are_taken_out(text: str, left: str) -> None:
    assert refresh()._without_places(text) == left
