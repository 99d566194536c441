"""What is built from this folder is complete: the wheel works with its dependencies alone, the sdist has its tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import gpumem_magic

ROOT = Path(__file__).parents[1]
BUILD = "from hatchling.build import build_sdist, build_wheel; import sys; build_wheel(sys.argv[1]); build_sdist(sys.argv[1])"
# In a fresh interpreter: what only development brings is as if it were not there.
ALONE = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
import gpumem_magic
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "gpumem_magic")
shell.run_line_magic("gpumem_help", "")
from gpumem_magic import cli
for arguments in (["devices"], ["--help"]):
    try:
        assert cli.main(arguments) == 0
    except SystemExit as error:
        assert error.code == 0
ours = {{module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "gpumem_magic"}}
print("FROM", *sorted(ours))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the wheel and the source distribution."""
    pytest.importorskip("hatchling", reason="building needs hatchling")
    if not (ROOT / "pyproject.toml").is_file():
        pytest.skip("pyproject.toml is only in the repository")
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-c", BUILD, str(folder)], cwd=ROOT, check=True, capture_output=True)
    return folder


def files_of(*tops: str) -> set[str]:
    """The files below these folders, without what running leaves there."""
    return {
        path.relative_to(ROOT).as_posix()
        for top in tops
        for path in (ROOT / top).rglob("*")
        if path.is_file() and not {"__pycache__", ".ruff_cache", ".ipynb_checkpoints"} & set(path.parts)
    }


def test_the_wheel_has_every_file_and_works_with_its_dependencies_alone(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
        archive.extractall(tmp_path / "unpacked")
    assert {name for name in inside if name.startswith("gpumem_magic/")} == files_of("gpumem_magic")
    (about,) = [name for name in inside if name.endswith(".dist-info/METADATA")]
    metadata = (tmp_path / "unpacked" / about).read_text("utf-8")
    assert f"\nVersion: {gpumem_magic.__version__}\n" in metadata
    needed = {
        re.split(r"[^\w-]", line)[0] for line in re.findall(r"^Requires-Dist: (.*)$", metadata, re.M) if ";" not in line
    }
    extra = {re.split(r"[^\w-]", line)[0] for line in re.findall(r"^Requires-Dist: (.*);", metadata, re.M)}
    # numpy comes with matplotlib, and both hatchling and pytest only run here.
    absent = {name.replace("-", "_") for name in extra - needed} - {"numpy"}
    assert {"transformers", "nbclient", "jupyterlab"} <= absent
    done = subprocess.run(
        [sys.executable, "-c", ALONE.format(absent=absent)],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tmp_path / "unpacked"), os.environ.get("PYTHONPATH", "")]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "usage: gpumem" in done.stdout
    (came_from,) = re.findall(r"^FROM (.*)$", done.stdout, re.MULTILINE)
    assert all(path.startswith(str(tmp_path / "unpacked")) for path in came_from.split())


def test_the_source_distribution_has_its_tests_and_what_they_read(built: Path) -> None:
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    missing = files_of("tests", "gpumem_magic", "notebooks", "binder", ".ci") - inside
    assert missing == set()
    assert {
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
        "CITATION.cff",
        "dev.py",
        "pyproject.toml",
        "docs/house.py",
    } <= inside


def test_one_version_is_said_everywhere() -> None:
    citation, changes = (ROOT / "CITATION.cff", ROOT / "CHANGELOG.md")
    if not citation.is_file():
        pytest.skip("CITATION.cff is only in the repository")
    assert f"\nversion: {gpumem_magic.__version__}\n" in citation.read_text("utf-8")
    versions = re.findall(r"^## (\S+)", changes.read_text("utf-8"), re.MULTILINE)
    assert versions[0] == gpumem_magic.__version__
    assert len(versions) == len(set(versions))
