"""What README promises: the magics, flags, functions and commands of its tables are there; its picture is what the demo draws."""

from __future__ import annotations

import inspect
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import warm
from shell_fakes import clean_shell

import gpumem_magic
from gpumem_magic import cli
from gpumem_magic.commands import demo

_warm = pytest.fixture(autouse=True)(warm.in_place_of_python)

ROOT = Path(__file__).parents[1]
COMMANDS = json.loads((ROOT / "gpumem_magic" / "commands" / "commands.json").read_text("utf-8"))


def readme() -> str:
    path = ROOT / "README.md"
    if not path.is_file():
        pytest.skip("README.md is only in the repository")
    return path.read_text("utf-8")


def table(head: str) -> list[str]:
    """The first column of one of README's tables, each cell without its code's quotation marks."""
    block = readme().partition(f"| {head} | |\n")[2].partition("\n\n")[0]
    cells = [line.split(" | ")[0].removeprefix("| ") for line in block.splitlines()[1:]]
    assert len(cells) > 5
    return cells


def flags_of(arguments: list[Any]) -> set[str]:
    """All flags of a subcommand, as `commands.json` has them; several in a list exclude each other."""
    flat = [one for each in arguments for one in (each if isinstance(each, list) else [each])]
    return {name for one in flat for name in one["names"]}


def test_every_magic_and_flag_of_the_table_is_there() -> None:
    with clean_shell() as shell:
        shell.run_line_magic("load_ext", "gpumem_magic")
        magics = shell.magics_manager.magics
        for cell in table("in a notebook"):
            for kind, name in re.findall(r"(%%?)(gpumem\w*)", cell):
                assert name in magics["cell" if kind == "%%" else "line"], cell
            first = re.match(r"`%%?(gpumem\w*)", cell)
            parser = magics["line"][first[1] if first else "gpumem"].parser
            for flag in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", cell):
                assert flag in parser._option_string_actions, cell
        shown = {name for cell in table("in a notebook") for name in re.findall(r"%(gpumem\w*)", cell)}
        assert {name for name in magics["line"] if name.startswith("gpumem")} <= shown


def test_every_name_of_the_table_is_in_the_package() -> None:
    for cell in table("in Python"):
        for name in re.findall(r"gpumem_magic\.(\w+)", cell):
            assert hasattr(gpumem_magic, name), cell
    report = next(cell for cell in table("in Python") if "last_report" in cell)
    for line in readme().splitlines():
        if line.startswith(f"| {report} |"):
            for name in re.findall(r"`(?:Report\.)?(\w+)\(", line.split(" | ", 1)[1]):
                assert hasattr(gpumem_magic.Report, name), name


def test_every_command_and_flag_of_the_table_is_there() -> None:
    cells = table("in a terminal")
    for cell in cells:
        found = re.search(r"`gpumem (\w+)", cell)
        assert found is not None, cell
        known = flags_of(COMMANDS[found[1]]["arguments"])
        # What stands behind `--vary=` is the script's own flag.
        for flag in re.findall(r"(?<![\w=-])--?[a-z][a-z-]*", cell):
            assert flag in known, cell
    assert all(f"`{name}" in "".join(cells) or f"gpumem {name}" in "".join(cells) for name in COMMANDS)


def test_the_first_command_shows_what_readme_shows(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpumem_magic.cli", "demo", "--png", "new.png", "--json", "new.json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    report = gpumem_magic.Report.load(tmp_path / "new.json")
    assert done.stdout.startswith("Of 933 MiB at the peak, 384 MiB are three")
    assert "gpumem-demo/report.html" in done.stdout.replace("\\", "/")
    page = (tmp_path / "gpumem-demo" / "report.html").read_text("utf-8")
    assert not re.search(r"<script|<link|<img|https?://", page)
    assert "optimizer.zero_grad()" in page
    # README: the picture has today's rows, and who can't see it is told its answer.
    (words,) = re.findall(r"!\[([^\]]+)\]\(docs/demo\.png\)", readme())
    assert " ".join(words.split()) == report.answer
    sizes = [struct.unpack(">II", path.read_bytes()[16:24]) for path in (ROOT / "docs/demo.png", tmp_path / "new.png")]
    assert sizes[0] == sizes[1]


def test_a_program_in_the_demos_place_is_neither_run_nor_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / demo.PROGRAM
    program.write_text("raise SystemExit('run')\n")
    assert cli.main(["demo", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("gpumem: ")
    assert "is not as the demo wrote it" in said.err
    assert program.read_text() == "raise SystemExit('run')\n"


def test_the_demos_program_is_what_readme_says_of_it() -> None:
    text = (Path(inspect.getfile(demo)).with_name("demo_program.txt")).read_text("utf-8")
    assert len(text.splitlines()) == 17
    assert "program of seventeen lines" in " ".join(readme().split())
