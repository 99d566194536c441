"""`dev.py`, as far as it sets nothing up: which packages it would install, and what it makes of its arguments."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from project_scripts import load

HERE = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def dev() -> Any:
    if not (HERE / "dev.py").is_file():
        pytest.skip("dev.py is only in the repository")
    return load(HERE / "dev.py")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no tomllib to compare with")
def test_another_torch_is_the_only_difference(dev: Any) -> None:
    import tomllib

    text = (HERE / "pyproject.toml").read_text(encoding="utf-8")
    listed = tomllib.loads(text)["project"]["optional-dependencies"]["dev"]
    packages = dev.development_packages(text, "2.9.1")
    assert [new for new, old in zip(packages, listed, strict=True) if new != old] == ["torch==2.9.1"]


def test_a_project_without_a_list_is_refused(dev: Any) -> None:
    with pytest.raises(ValueError, match="no list of development packages"):
        dev.development_packages("[project]\n", "2.9.1")


@pytest.mark.parametrize(
    ("arguments", "version", "rest"),
    [
        ([], None, []),
        (["-q", "tests/test_cell.py"], None, ["-q", "tests/test_cell.py"]),
        (["--torch", "2.9.1", "-q"], "2.9.1", ["-q"]),
        (["-x", "--torch=2.11.0+cpu"], "2.11.0+cpu", ["-x"]),
        (["--torch", "2.16.0rc1"], "2.16.0rc1", []),
    ],
)
def test_the_version_is_taken_out_of_the_arguments(
    dev: Any, arguments: list[str], version: str | None, rest: list[str]
) -> None:
    assert dev.without_torch(arguments) == (version, rest)


@pytest.mark.parametrize("arguments", [["--torch"], ["--torch", "-q"], ["--torch=../.."], ["--torch", "newest"]])
def test_what_is_no_version_is_one_line(dev: Any, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert dev.main(["test", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert said.err.startswith("--torch needs a version, as in --torch 2.9.1; this is")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("Collecting torch==2.13.0 (from gpumem-magic==0.1.0)\n", "fetching torch==2.13.0"),
        ("Installing collected packages: mpmath, sympy, torch\n", "installing 3 packages"),
        ("  Downloading torch-2.13.0.whl (190.1 MB)\n", ""),
        ("WARNING: Running pip as the 'root' user\n", ""),
        ("\n", ""),
    ],
)
def test_who_waits_for_pip_is_told_where_it_is(dev: Any, line: str, said: str) -> None:
    assert dev.progress(line) == said
