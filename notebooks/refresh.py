"""Runs the notebooks of this folder and stores their outputs: `python notebooks/refresh.py [NAME ...]`.

What is stored names no path of the computer and no time. `tests/test_notebooks.py` runs them the same way and says where what
is stored is not what the code makes any more.
"""

from __future__ import annotations

import base64
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
SECONDS = 300
# The documentation opens with it.
FIRST_PICTURE = FOLDER.parent / "docs" / "first_cell.png"
_WIDGETS = "application/vnd.jupyter.widget-view+json"
_PICTURE = re.compile(r"(base64,[A-Za-z0-9+/=\s]+)")
# Only where a path may begin: a picture in base64 is one long word.
_START = r"(?<![^\s'\"<>:;])"
_PLACES = [
    (re.compile(_START + r"[^\s'\"<>:;]*[/\\](?:site|dist)-packages[/\\]"), ""),
    (re.compile(_START + r"[^\s'\"<>:;]*[/\\]lib[/\\]python3\.\d+[/\\]"), ""),
    (re.compile(_START + r"[^\s'\"<>:;]*[/\\]ipykernel_\d+[/\\]\d+\.py"), "the cell"),
    (re.compile(re.escape(str(FOLDER.parent.resolve())) + r"[/\\]?"), ""),
    (re.compile(r"\b0x[0-9a-f]{6,}\b"), "0x…"),
    (re.compile(rf"\b{re.escape(socket.gethostname())}_(?=[A-Z][a-z][a-z]_\d\d_)"), "HOST_"),
    (re.compile(r"[A-Z][a-z][a-z](?:_\d\d){4}\b"), "MONTH_DAY_HOUR_MINUTE_SECOND"),
    (re.compile(r"\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\b"), "DATE TIME"),
]
# A new release of a library moves its lines; what is said of them stays.
_LINE_OF_A_FILE = re.compile(r"(?<=\.py):\d+")
# What C++ libraries write of their own accord, with the hour and the process.
_NOISE = re.compile(r"^(?:USDT:|(?:\[rank\d+\]:)?\[W\d{4} ).*\n*", re.MULTILINE)


def execute(path: Path, *, afterwards: str = "", python: str = sys.executable) -> Any:
    """The notebook with the outputs of a run from top to bottom in a new kernel, made fit to be stored.

    afterwards: code that is run in the same kernel behind the last cell; what it prints is left in the notebook's metadata
    under "afterwards". python: what runs the kernel.

    Text is as wide as where nobody has said how wide: not as this terminal. What other software writes to stderr is left out,
    but in cells tagged ``log``.
    Raises nbclient's CellExecutionError where a cell fails that is not tagged ``raises-exception``.
    """
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    notebook.metadata.pop("widgets", None)
    if afterwards:
        notebook.cells.append(nbformat.v4.new_code_cell(afterwards))
    manager = AsyncKernelManager(kernel_name="python3")
    manager.kernel_spec.argv[0] = python
    NotebookClient(
        notebook,
        km=manager,
        timeout=SECONDS,
        coalesce_streams=True,
        record_timing=False,
        resources={"metadata": {"path": str(path.parent)}},
    ).execute(
        cleanup_kc=True,
        env={name: value for name, value in os.environ.items() if name != "COLUMNS"},
    )
    if afterwards:
        notebook.metadata["afterwards"] = "".join(
            output.get("text", "") for output in notebook.cells.pop().outputs
        )
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            _clean(output)
        if "outputs" in cell:
            logs = "log" in cell.metadata.get("tags", ())
            cell.outputs = [output for output in cell.outputs if logs or not _is_of_others(output)]
    language = notebook.metadata.get("language_info", {})
    notebook.metadata["language_info"] = {
        "name": language.get("name", "python"),
        "pygments_lexer": "ipython3",
    }
    return notebook


def _clean(output: Any) -> None:
    if output.output_type == "error":
        # The last lines say what happened; the frames between are PyTorch's and name this computer's folders.
        output.traceback = [_without_places(line) for line in output.traceback[-1:]]
        output.evalue = _without_places(output.evalue)
    elif output.output_type == "stream":
        output.text = _NOISE.sub("", _without_places(output.text))
    else:
        for kind, value in output.data.items():
            if isinstance(value, str) and kind.startswith("text/"):
                output.data[kind] = _without_places(value)


def _is_of_others(output: Any) -> bool:
    """Whether it is an empty text, or a warning of other software; this package's name itself."""
    return output.get("text") == "" or (
        output.get("name") == "stderr" and "gpumem" not in output.text
    )


def _without_places(text: str) -> str:
    # A picture is one word of many thousand letters, in which a search for folders would take minutes.
    parts = _PICTURE.split(text)
    for number in range(0, len(parts), 2):
        for pattern, instead in _PLACES:
            parts[number] = pattern.sub(instead, parts[number])
    return "".join(parts)


def told(notebook: Any) -> list[list[str]]:
    """What the outputs of each code cell tell a reader, less what differs from run to run and from release to release
    of a library (pictures' bytes, widgets' numbers, numbers of lines in files)."""
    return [
        ["varies"]
        if "varies" in cell.metadata.get("tags", ())
        else [_told(output) for output in cell.get("outputs", [])]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def _told(output: Any) -> str:
    if output.output_type == "stream":
        return f"{output.name}: {_LINE_OF_A_FILE.sub('', output.text)}"
    if output.output_type == "error":
        return f"error: {output.ename}: {output.evalue}"
    kinds = sorted(output.data)
    if _WIDGETS in kinds:
        return "widget"
    words = [str(output.data[kind]) for kind in ("text/plain", "text/html") if kind in kinds]
    text = _LINE_OF_A_FILE.sub("", _PICTURE.sub("base64,…", "\n".join(words)))
    return f"{', '.join(kinds)}: {re.sub(r'width:[0-9.]+px|height:[0-9.]+px|data-place=.[0-9a-f]+.', '', text)}"


def first_picture(notebook: Any) -> bytes:
    """The first picture among a notebook's outputs, as PNG."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pictures = (
        output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})
    )
    return base64.b64decode(next(pictures))


def main(names: list[str]) -> int:
    for path in [FOLDER / name for name in names] or sorted(FOLDER.glob("*.ipynb")):
        notebook = execute(path)
        nbformat.write(notebook, path)
        if path.stem == "01_first_cell":
            FIRST_PICTURE.write_bytes(first_picture(notebook))
        print(f"{path.name}: {path.stat().st_size / 1024:,.0f} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
