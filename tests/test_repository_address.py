"""One place says the project's address; badges, links and the notebooks' first cells agree with it, also after a fork."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from project_scripts import load

ROOT = Path(__file__).parents[1]
OLDEST = Path(sys.prefix) / "oldest-ipython"
FORK = "https://github.com/somebody/gpumem-fork"
NAMES = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
BADGE = re.compile(r"\[!\[([^\]]+)\]\(([^)]+)\)\]\(([^)]+)\)")


address = load(ROOT / "notebooks" / "address.py")


def contents(root: Path) -> dict[str, bytes]:
    names = ["pyproject.toml", "README.md", "docs/online.md", *(f"notebooks/{name}" for name in NAMES)]
    return {name: (root / name).read_bytes() for name in names}


def first_code(path: Path) -> str:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "".join(next(cell["source"] for cell in cells if cell["cell_type"] == "code"))


@pytest.fixture
def fork(tmp_path: Path) -> Path:
    """A copy of what the script reads and writes."""
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "docs").mkdir()
    for name in contents(ROOT):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_the_readme_and_the_notebooks_agree_with_the_one_place() -> None:
    for path, text in address.written(ROOT).items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: `python notebooks/address.py` writes it anew"


def test_there_is_a_row_for_every_notebook() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in NAMES if f"](notebooks/{name})" in readme] == NAMES
    assert not BADGE.search(readme)
    assert len({first_code(ROOT / "notebooks" / name) for name in NAMES}) == 1


def test_one_command_makes_badges_that_lead_to_the_fork(fork: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert address.main([FORK + ".git"], fork) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(NAMES)
    project = (fork / "pyproject.toml").read_text(encoding="utf-8")
    assert f'[project.urls]\nRepository = "{FORK}"\n' in project
    if sys.version_info >= (3, 11):
        import tomllib

        assert tomllib.loads(project)["project"]["urls"] == {"Repository": FORK}
    badges = BADGE.findall((fork / "docs" / "online.md").read_text(encoding="utf-8"))
    assert [target for _, _, target in badges] == [
        link
        for name in NAMES
        for link in (
            f"https://mybinder.org/v2/gh/somebody/gpumem-fork/HEAD?labpath=notebooks%2F{name}",
            f"https://colab.research.google.com/github/somebody/gpumem-fork/blob/main/notebooks/{name}",
        )
    ]
    for words, image, _ in badges:
        assert re.fullmatch(r"Open \d\d_\w+\.ipynb on (Binder|Colab)", words)
        # A file of the checkout, not an image of somebody's server.
        drawn = ElementTree.fromstring((ROOT / "docs" / image).read_text(encoding="utf-8"))
        assert drawn.tag == "{http://www.w3.org/2000/svg}svg"
        assert not re.search(r"href|url\(|<script", (ROOT / "docs" / image).read_text(encoding="utf-8"))
    for name in NAMES:
        assert f'REPOSITORY = "{FORK}"' in first_code(fork / "notebooks" / name)


def test_it_can_be_done_again_and_taken_back(fork: Path) -> None:
    before = contents(fork)
    assert address.main([FORK], fork) == 0
    once = contents(fork)
    assert address.main([], fork) == 0
    assert contents(fork) == once
    assert address.main(["https://github.com/other/name/"], fork) == 0
    assert b"gpumem-fork" not in b"".join(contents(fork).values())
    assert address.main(["none"], fork) == 0
    known = address.address_of(before["pyproject.toml"].decode())
    assert address.main([known] if known else [], fork) == 0
    assert contents(fork) == before


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "gpumem",
        "http://github.com/a/b",
        "https://github.com/a",
        "https://example.com/a/b",
        'https://github.com/a/b"',
        "https://github.com/a/b c",
        "https://github.com/a/../b",
        "https://github.com/a/b\n[x]",
    ],
)
def test_what_is_no_address_changes_nothing(fork: Path, wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(fork)
    assert address.main([wrong], fork) == 2
    assert contents(fork) == before
    said = capsys.readouterr().err
    assert said.endswith("is not like https://github.com/OWNER/REPOSITORY\n")
    assert len(said.splitlines()) == 1


# The first cell: found there, nothing is done; on Colab without the package, pip is asked once.
CELL = """
import importlib.util, sys, types
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
asked = []
shell.register_magic_function(asked.append, "line", "pip")
source, on_colab, there = {source!r}, {on_colab}, {there}
if on_colab:
    sys.modules["google"] = types.ModuleType("google")
    sys.modules["google.colab"] = types.ModuleType("google.colab")
if not there:
    real = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *more: None if name == "gpumem_magic" else real(name, *more)
done = shell.run_cell(source)
error = done.error_in_exec or done.error_before_exec
print("ANSWER", asked, type(error).__name__, "torch" in sys.modules)
"""


def answer(source: str, *, on_colab: bool, there: bool, environment: str) -> str:
    more = [str(OLDEST)] if environment == "oldest" else []
    path = os.pathsep.join([*more, str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", CELL.format(source=source, on_colab=on_colab, there=there)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return next(line for line in done.stdout.splitlines() if line.startswith("ANSWER"))


@pytest.mark.parametrize("environment", ["this", "oldest"])
def test_the_first_cell_installs_on_colab_and_is_idle_elsewhere(environment: str) -> None:
    if environment == "oldest" and not OLDEST.is_dir():
        pytest.skip("`python3 dev.py test` installs IPython 7.34 for this test")
    cell = first_code(ROOT / "notebooks" / NAMES[0])
    ours = re.sub(r'REPOSITORY = "[^"]*"', f'REPOSITORY = "{FORK}"', cell)
    unknown = re.sub(r'REPOSITORY = "[^"]*"', 'REPOSITORY = ""', cell)
    idle, asked = "ANSWER [] NoneType False", f"ANSWER ['install --quiet git+{FORK}'] NoneType False"
    for source in (ours, unknown):
        assert answer(source, on_colab=False, there=True, environment=environment) == idle
        assert answer(source, on_colab=True, there=True, environment=environment) == idle
    assert answer(ours, on_colab=True, there=False, environment=environment) == asked
    # Without an address it says in one line what is missing, and asks nobody.
    lost = "ANSWER [] ModuleNotFoundError False"
    assert answer(unknown, on_colab=True, there=False, environment=environment) == lost
