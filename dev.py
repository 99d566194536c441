#!/usr/bin/env python3
"""All set-up in one file: makes `.venv`, installs the project and what its tests need, and runs one of two things.

    python3 dev.py demo    `gpumem demo`: a short program measured on a virtual GPU; then runs the first notebook as a page
    python3 dev.py test    runs the tests in three processes, and names the ten slowest (more arguments go to pytest: those given
                           there count, so `-n 0` runs them in one)

    python3 dev.py test --torch 2.9.1    the same on another PyTorch, in an environment of its own (`.venv/torch-2.9.1`)

Needs Python 3.10 or newer and nothing else. The browser tests use Chromium where it is installed, and say so where it is not.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ENVIRONMENT = HERE / ".venv"
# Colab's IPython, beside the current one: tests/test_oldest_ipython.py runs the magics' tests on it.
OLDEST = "ipython==7.34.0"
# Three processes for CI's two cores: one waits for a browser or for processes of its own now and then.
IN_PARALLEL = ("-n", "3", "--dist", "worksteal", "--durations", "10")


def python_of(environment: Path) -> Path:
    return environment / ("Scripts" if os.name == "nt" else "bin") / "python"


def set_up(torch: str | None = None) -> Path:
    """Makes the environment, unless it is there and was made for these very packages; returns its Python.

    torch: a version in place of the one that development pins, in an environment of its own.
    """
    environment = ENVIRONMENT if torch is None else ENVIRONMENT / f"torch-{torch}"
    python = python_of(environment)
    project = (HERE / "pyproject.toml").read_text(encoding="utf-8")
    made_from = f"{project}{OLDEST}" if torch is None else f"{project}{OLDEST}{torch}"
    wanted = hashlib.sha256(made_from.encode()).hexdigest()
    stamp = environment / "made-from"
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"Setting up {environment.relative_to(HERE)} (some minutes the first time) ...", flush=True)
    if not python.exists():
        venv.create(environment, with_pip=True)
    packages = [f"{HERE}[dev]"] if torch is None else [str(HERE), *development_packages(project, torch)]
    install(python, "--upgrade", "pip")
    install(python, "--editable", *packages)
    oldest = environment / "oldest-ipython"
    shutil.rmtree(oldest, ignore_errors=True)
    install(python, "--target", str(oldest), OLDEST)
    stamp.write_text(wanted)
    return python


def install(python: Path, *arguments: str) -> None:
    """pip, with a line for each package that it fetches or installs; all that it said where it fails.

    Raises CalledProcessError.
    """
    command = [str(python), "-m", "pip", "install", "--progress-bar", "off", "--disable-pip-version-check", *arguments]
    said = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            said.append(line)
            step = progress(line)
            if step:
                print(f"  {step}", flush=True)
    if pip.returncode:
        print("".join(said[-20:]), file=sys.stderr)
        raise subprocess.CalledProcessError(pip.returncode, command)


def progress(line: str) -> str:
    """What a line of pip's means for somebody who waits; empty where it means nothing new."""
    words = line.split()
    if words[:1] == ["Collecting"]:
        return f"fetching {words[1]}"
    if words[:3] == ["Installing", "collected", "packages:"]:
        return f"installing {len(words) - 3} packages"
    return ""


def development_packages(project: str, torch: str) -> list[str]:
    """The packages of pyproject.toml's `dev`, with this version of torch. Read as text: Python 3.10 has no `tomllib`."""
    listed = re.search(r"^dev = \[$(.*?)^\]$", project, re.DOTALL | re.MULTILINE)
    if listed is None:
        raise ValueError("pyproject.toml has no list of development packages")
    packages = re.findall(r'^ *"([^"]+)",$', listed[1], re.MULTILINE)
    return [f"torch=={torch}" if package.startswith("torch==") else package for package in packages]


def without_torch(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The version of ``--torch VERSION`` or ``--torch=VERSION`` (None without it), and the other arguments."""
    rest = []
    version = None
    remaining = iter(arguments)
    for argument in remaining:
        name, equals, value = argument.partition("=")
        if name != "--torch":
            rest.append(argument)
            continue
        version = value if equals else next(remaining, "")
        if not re.fullmatch(r"\d+\.\d+(\.\d+)?([a-z]+\d+)?(\+\w+)?", version):
            raise ValueError(f"--torch needs a version, as in --torch 2.9.1; this is {version!r}")
    return version, rest


def demo() -> int:
    python = set_up()
    build = HERE / "build"
    build.mkdir(exist_ok=True)
    # It begins anew, also where the program was changed: `gpumem demo` itself would not replace that.
    shutil.rmtree(build / "demo", ignore_errors=True)
    shown = subprocess.run([python, "-m", "gpumem_magic.cli", "demo", "build/demo"], cwd=HERE, check=False).returncode
    notebook, page = HERE / "notebooks" / "01_first_cell.ipynb", build / "01_first_cell.html"
    print("\nNow the first notebook, as a page (about half a minute) ...", flush=True)
    command = [python, "-m", "nbconvert", "--log-level=ERROR", "--execute", "--to", "html", notebook, "--output", page]
    # The kernel warns of being overheard otherwise.
    command += ["--KernelManager.transport_encryption=auto"]
    # What the kernel's debugger says of Python's own modules is of no use to anybody here.
    subprocess.run(command, env={**os.environ, "PYDEVD_DISABLE_FILE_VALIDATION": "1"}, check=True)
    print(f"The first notebook, with its pictures: {page}")
    print(f"To try it yourself: {python} -m jupyter lab {notebook}")
    return shown


def test(arguments: list[str]) -> int:
    torch, rest = without_torch(arguments)
    python = set_up(torch)
    # Some hundred processes import the package, which need not be compiled in each of them.
    subprocess.run([python, "-m", "compileall", "-q", "gpumem_magic"], cwd=HERE, check=True)
    return subprocess.run([python, "-m", "pytest", *IN_PARALLEL, *rest], cwd=HERE, check=False).returncode


def main(arguments: list[str]) -> int:
    if sys.version_info < (3, 10):
        print("gpumem_magic needs Python 3.10 or newer; this is", sys.version.split()[0], file=sys.stderr)
        return 2
    if not arguments or arguments[0] not in ("demo", "test"):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        return demo() if arguments[0] == "demo" else test(arguments[1:])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        print(f"this step failed: {' '.join(str(part) for part in error.cmd)}", file=sys.stderr)
        return error.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
