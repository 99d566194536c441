"""The script that writes down what users are shown: what it leaves out, and what it finds different."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imsave
from project_scripts import load

golden = load(Path(__file__).parents[1] / "benchmarks" / "golden.py")


def png(*, changed: bool = False) -> bytes:
    pixels = np.zeros((2, 3, 3))
    pixels[0, 0] = changed
    file = io.BytesIO()
    imsave(file, pixels, format="png", metadata={"Software": "one" if changed else "another"})
    return file.getvalue()


@pytest.fixture
def item(tmp_path: Path) -> Any:
    return golden.Item(tmp_path / "item", tmp_path / "scratch", tmp_path / "snapshots")


def test_what_changes_from_run_to_run_is_left_out(item: Any, tmp_path: Path) -> None:
    item.text("one.txt", f"<f at 0x7f0012345678> in {tmp_path}/scratch/a.py, {golden.__file__}")
    item.html("one.html", f"<b><img src='data:image/png;base64,{base64.b64encode(png()).decode()}'></b>")
    assert (
        tmp_path / "item" / "one.txt"
    ).read_text() == "<f at <address>> in <scratch>/a.py, <project>/benchmarks/golden.py\n"
    assert "base64" not in (tmp_path / "item" / "one.html").read_text()
    assert "<picture 3x2 " in (tmp_path / "item" / "one.html").read_text()


def test_tracebacks_do_not_hold_the_packages_lines(item: Any, tmp_path: Path) -> None:
    package = Path(golden._package().__file__).parent
    item.text("one.txt", f"Cell In[2]\n\nFile {package}/virtual/x.py:12, in f()\n--> 12 g()\n\nValueError: no")
    assert (tmp_path / "item" / "one.txt").read_text() == "Cell In[2]\n\nFile <package>\n\nValueError: no\n"


def test_differences_are_found_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.txt").write_text("1\n")
        (tmp_path / folder / "changed.json").write_text("1\n" * 50 + f"{folder}\n" + "2\n" * 50)
        (tmp_path / folder / "picture.png").write_bytes(png(changed=folder == "b"))
    assert golden.compare(tmp_path / "a", tmp_path / "a", 40) == 0
    assert "3 items: 3 the same, 0 different" in capsys.readouterr().out
    (tmp_path / "b" / "new.txt").write_text("")
    assert golden.compare(tmp_path / "a", tmp_path / "b", 40) == 1
    told = capsys.readouterr().out
    assert "==== changed.json: differs from line 51" in told
    assert "  -a\n  +b\n" in told
    assert "==== picture.png: 1 of 6 pixels differ" in told
    assert "==== new.txt: only in the second" in told
    assert "     same.txt: the same" in told


def test_a_picture_of_the_same_pixels_is_the_same(tmp_path: Path) -> None:
    for name, data in (("a.png", png()), ("b.png", png() + b"more")):
        (tmp_path / name).write_bytes(data)
    assert golden._difference(tmp_path / "a.png", tmp_path / "b.png", 9) == []


def test_there_are_enough_cells() -> None:
    titles = [one.title for one in golden.notebooks()]
    assert len(set(titles)) == len(titles)
    assert len([one for one in titles if one.startswith("golden_cells")]) >= 30
