#!/usr/bin/env python3
"""All set-up in one file: makes `.venv`, installs the project and what its tests need, and runs one of two things.

    python3 dev.py demo    measures a training cell on a virtual GPU, prints the report and writes the notebook's page
    python3 dev.py test    runs the tests (more arguments go to pytest)

Needs Python 3.10 or newer and nothing else. The browser tests use Chromium where it is installed, and say so where it is not.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ENVIRONMENT = HERE / ".venv"
PYTHON = ENVIRONMENT / ("Scripts" if os.name == "nt" else "bin") / "python"
# Colab's IPython, beside the current one: tests/test_oldest_ipython.py runs the magics' tests on it.
OLDEST_IPYTHON = ENVIRONMENT / "oldest-ipython"
OLDEST = "ipython==7.34.0"


def set_up() -> None:
    """Makes the environment, unless it is there and was made for these very packages."""
    made_from = (HERE / "pyproject.toml").read_bytes() + OLDEST.encode()
    wanted = hashlib.sha256(made_from).hexdigest()
    stamp = ENVIRONMENT / "made-from"
    if PYTHON.exists() and stamp.exists() and stamp.read_text() == wanted:
        return
    print("Setting up .venv (some minutes the first time) ...", flush=True)
    if not PYTHON.exists():
        venv.create(ENVIRONMENT, with_pip=True)
    subprocess.run([PYTHON, "-m", "pip", "install", "--quiet", "--upgrade", "pip"], check=True)
    subprocess.run([PYTHON, "-m", "pip", "install", "--quiet", "--editable", f"{HERE}[dev]"], check=True)
    shutil.rmtree(OLDEST_IPYTHON, ignore_errors=True)
    subprocess.run([PYTHON, "-m", "pip", "install", "--quiet", "--target", OLDEST_IPYTHON, OLDEST], check=True)
    stamp.write_text(wanted)


def demo() -> int:
    page = HERE / "build" / "01_first_cell.html"
    page.parent.mkdir(exist_ok=True)
    notebook = HERE / "notebooks" / "01_first_cell.ipynb"
    shown = subprocess.run([PYTHON, HERE / "notebooks" / "demo.py"], check=False).returncode
    subprocess.run(
        [PYTHON, "-m", "nbconvert", "--log-level=ERROR", "--execute", "--to", "html", notebook, "--output", page],
        check=True,
    )
    print(f"\nThe same in a notebook, with its pictures: {page}")
    print(f"To try it yourself: {PYTHON} -m jupyter lab {notebook}")
    return shown


def test(arguments: list[str]) -> int:
    return subprocess.run([PYTHON, "-m", "pytest", *arguments], cwd=HERE, check=False).returncode


def main(arguments: list[str]) -> int:
    if sys.version_info < (3, 10):
        print("gpumem_magic needs Python 3.10 or newer; this is", sys.version.split()[0], file=sys.stderr)
        return 2
    if not arguments or arguments[0] not in ("demo", "test"):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        set_up()
        return demo() if arguments[0] == "demo" else test(arguments[1:])
    except subprocess.CalledProcessError as error:
        print(f"this step failed: {' '.join(str(part) for part in error.cmd)}", file=sys.stderr)
        return error.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
