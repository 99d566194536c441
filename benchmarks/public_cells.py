"""Cells of public notebooks, which are innocent until somebody has looked: which causes are told of them?

    python benchmarks/public_cells.py DIR                 all notebooks of public_cells.txt
    python benchmarks/public_cells.py DIR --only TEXT     those with TEXT in their line; with --show, what is said too
    python benchmarks/public_cells.py DIR --json PATH     the table as data: repository, commit, file, cell, causes

DIR has a git repository at OWNER+NAME/repo for each line's OWNER/NAME; nothing of theirs is kept here. Each notebook runs in a
process of its own, in an empty folder, on a virtual T4 with values=auto. Each of its cells is measured, with at most eight
turns of each training loop; one counts if it ran to its end and had something on the device. A line that ends in "cuda" has
its tensors made there (also ``torch.LongTensor`` and its like), as if the notebook had been written for a GPU. Lines of the
shell and of magics are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# Before the installed packages; the tests have the list of causes that describe.
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests")]

LIST = HERE / "public_cells.txt"
_SECONDS = 60
# Of each loop of a training; later ones repeat.
_ITERATIONS = 8
_TYPES = re.compile(r"\btorch\.(?=(?:Long|Float|Int|Double|Bool|Byte)Tensor\()")
_COMMANDS = re.compile(r"(?m)^\s*[!%].*$")


def main() -> int:
    from test_innocent_cells import DESCRIBING

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--show", action="store_true", help="print what is blamed, and the cell")
    parser.add_argument("--json", type=Path, metavar="PATH")
    options = parser.parse_args()
    import torch  # noqa: F401

    import gpumem_magic.session.recording  # noqa: F401

    table: list[dict[str, Any]] = []
    for line in LIST.read_text("utf-8").splitlines():
        if line.startswith("#") or not line.strip() or options.only not in line:
            continue
        repository, commit, path, *rest = line.split(" ")
        cells = _cells(options.folder / repository.replace("/", "+") / "repo", commit, path)
        found = _in_a_child(cells, "cuda" in rest)
        blamed = [one for one in found if set(one["causes"]) - DESCRIBING]
        counted = [one for one in found if one["bytes"]]
        print(f"{len(counted):>3} of {len(cells):>3} cells  {len(blamed)} blamed  {repository} {path}", flush=True)
        for one in found:
            names = sorted(set(one["causes"]) - DESCRIBING)
            table.append({"repository": repository, "commit": commit, "file": path, **one})
            if names:
                print(f"    cell {one['cell']}: {', '.join(names)}")
                if options.show:
                    print("      " + "\n      ".join((*one["said"], *cells[one["cell"]].splitlines())))
    counted = [one for one in table if one["bytes"]]
    large = [one for one in counted if one["bytes"] >= 1 << 20]
    blamed = [one for one in table if set(one["causes"]) - DESCRIBING]
    print(f"{len(counted)} cells ({len(large)} with a MiB and more), {len(blamed)} with a cause that blames")
    if options.json:
        options.json.write_text(json.dumps(table, indent=0), "utf-8")
    return 0


def _cells(repository: Path, commit: str, path: str) -> list[str]:
    """The text of a notebook's code cells."""
    told = subprocess.run(["git", "-C", repository, "show", f"{commit}:{path}"], capture_output=True, check=True)
    cells = [one for one in json.loads(told.stdout)["cells"] if one["cell_type"] == "code"]
    return [_COMMANDS.sub("pass", "".join(one["source"])) for one in cells]


def _in_a_child(cells: list[str], on_cuda: bool) -> list[dict[str, Any]]:
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receiving)
        # Cells that were measured before the time is over count.
        signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
        signal.alarm(_SECONDS)
        try:
            with tempfile.TemporaryDirectory() as folder, os.fdopen(sending, "w") as pipe:
                os.chdir(folder)
                _run(cells, on_cuda, pipe)
        except BaseException as error:
            print(f"    {type(error).__name__}: {error}", file=sys.stderr)
        os._exit(0)
    os.close(sending)
    with os.fdopen(receiving) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return [json.loads(line) for line in text.splitlines()]


def _run(cells: list[str], on_cuda: bool, pipe: Any) -> None:
    import torch
    from IPython.core.interactiveshell import InteractiveShell

    import gpumem_magic

    os.environ["MPLBACKEND"] = "Agg"
    warnings.simplefilter("ignore")
    shell: Any = InteractiveShell.instance()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        shell.run_line_magic("load_ext", "gpumem_magic")
        shell.run_line_magic("gpumem_device", "T4,values=auto")
        if on_cuda:
            torch.set_default_device("cuda")
            cells = [_TYPES.sub("torch.cuda.", one) for one in cells]
        for number, cell in enumerate(cells):
            before = gpumem_magic.last_report()
            shell.run_cell(f"%%gpumem -q --max-iterations {_ITERATIONS}\n{cell}", store_history=True)
            report = gpumem_magic.last_report()
            if report is None or report is before or report.error is not None:
                continue
            pipe.write(
                json.dumps(
                    {
                        "cell": number,
                        "bytes": report.peak.allocated,
                        "causes": [one.name for one in report.causes],
                        "said": [f"{one.name}: {one.text} {one.remedy}" for one in report.causes],
                    }
                )
                + "\n"
            )
            pipe.flush()


if __name__ == "__main__":
    sys.exit(main())
