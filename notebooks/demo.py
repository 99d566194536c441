"""Runs the code cells of `01_first_cell.ipynb` in a terminal IPython, up to the first report, and prints that."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from IPython.core.interactiveshell import InteractiveShell


def main() -> int:
    notebook = json.loads(
        (Path(__file__).parent / "01_first_cell.ipynb").read_text(encoding="utf-8")
    )
    shell = InteractiveShell.instance()
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        source = "".join(cell["source"])
        if not shell.run_cell(source).success:
            return 1
        if source.startswith("%%gpumem"):
            return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
