"""The command that measures everything on a GPU: part by part, each in its place, and a page from what is there."""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import time
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import on_a_gpu  # noqa: E402
from on_a_gpu import Part  # noqa: E402


def saying(name: str, code: str, *, virtual: str | None = "--virtual", minutes: float = 1.0) -> Part:
    return Part(name, f"the part {name}", ("-c", code), virtual, minutes)


def parts_are(monkeypatch: pytest.MonkeyPatch, *parts: Part) -> None:
    monkeypatch.setattr(on_a_gpu, "parts_for", lambda folder: list(parts))


def test_each_part_leaves_what_it_said_and_a_failure_leaves_the_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts_are(monkeypatch, saying("bad", "print('broken'); raise SystemExit(3)"), saying("good", "print('twelve')"))
    assert on_a_gpu.measure(tmp_path, ["bad", "good"], None, 5, False) == 1
    ended = on_a_gpu.read(tmp_path)
    assert (ended["bad"]["ended"], ended["bad"]["status"]) == ("failed", 3)
    assert (ended["good"]["ended"], ended["good"]["status"]) == ("done", 0)
    assert (tmp_path / "good.txt").read_text() == "twelve\n"
    words = on_a_gpu.page(tmp_path)
    assert "`the part bad`: failed" in words
    assert "broken" not in words
    assert "twelve" in words


def test_called_again_it_does_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = "import pathlib; p = pathlib.Path({0!r}); p.write_text(p.read_text() + 'x' if p.exists() else 'x')"
    first, second = tmp_path / "first", tmp_path / "second"
    parts_are(monkeypatch, saying("first", count.format(str(first))))
    assert on_a_gpu.measure(tmp_path, ["first"], None, 5, False) == 0
    parts_are(monkeypatch, saying("first", count.format(str(first))), saying("second", count.format(str(second))))
    assert on_a_gpu.measure(tmp_path, ["first", "second"], None, 5, False) == 0
    assert (first.read_text(), second.read_text()) == ("x", "x")
    on_a_gpu.measure(tmp_path, ["first"], None, 5, True)
    assert first.read_text() == "xx"


def test_a_part_that_no_longer_fits_in_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 0.0, 1.0, 2.0, 290.0])
    parts_are(monkeypatch, saying("short", "print('here')"), saying("long", "print('there')", minutes=5))
    monkeypatch.setattr(on_a_gpu.time, "monotonic", lambda: next(clock))
    assert on_a_gpu.measure(tmp_path, ["short", "long"], None, 5, False) == 1
    assert "long: not begun" in capsys.readouterr().out
    assert list(on_a_gpu.read(tmp_path)) == ["short"]


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="this system has no groups of processes")
def test_a_part_that_takes_too_long_ends_with_all_that_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child, wait = tmp_path / "child", subprocess.Popen.wait

    def once_it_began(self: Any, timeout: float | None = None) -> int:
        while not (child.exists() and child.read_text()):
            time.sleep(0.01)
        return wait(self, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", once_it_began)
    code = (
        "import subprocess, sys, time\n"
        "one = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(child)!r}, 'w').write(str(one.pid))\n"
        "time.sleep(600)"
    )
    assert on_a_gpu.carry_out(saying("slow", code), tmp_path, None, 0.1)["ended"] == "took too long"
    left = Path(f"/proc/{child.read_text()}/stat")
    deadline = time.monotonic() + 300
    # What has ended and was not waited for yet is a zombie.
    with suppress(OSError):
        while left.read_text().rsplit(")", 1)[1].split()[0] != "Z":
            assert time.monotonic() < deadline, "the process that the part began still runs"
            time.sleep(0.05)


def test_a_dry_run_names_its_virtual_gpu_and_leaves_out_what_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts_are(
        monkeypatch,
        saying("real", "print('never')", virtual=None),
        saying("either", "import sys; print(sys.argv[1:])", virtual="--device"),
    )
    assert on_a_gpu.measure(tmp_path, ["real", "either"], "H100", 5, False) == 1
    assert "real: has no dry run" in capsys.readouterr().out
    assert (tmp_path / "either.txt").read_text().strip() == "['--device', 'H100']"
    assert "not figures of a GPU" in on_a_gpu.page(tmp_path)
    assert "`the part real`: not run." in on_a_gpu.page(tmp_path)


def say_help(script: list[str], said: Path) -> None:
    with open(said, "w", encoding="utf-8") as out, redirect_stdout(out), suppress(SystemExit):
        sys.argv = [*script, "--help"]
        if script[0] == "-m":
            del sys.argv[0]
            runpy.run_module(script[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(script[0]))
            runpy.run_path(script[0], run_name="__main__")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_the_parts_are_commands_that_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(on_a_gpu.ROOT)
    for part in on_a_gpu.parts_for(Path("somewhere")):
        known = [one for one in part.arguments if one.startswith("--")] + ([part.virtual] if part.virtual else [])
        script = [part.arguments[0]] if part.arguments[0] != "-m" else list(part.arguments[:2])
        script += ["calibrate"] if "calibrate" in part.arguments else []
        if "pytest" in part.arguments:
            # (Not in a copy of this process, which is pytest itself.)
            command = [sys.executable, *script, "tests/gpu", "--help"]
            helped = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        else:
            process = multiprocessing.get_context("fork").Process(target=say_help, args=(script, tmp_path / "said"))
            process.start()
            process.join()
            assert process.exitcode == 0, part
            helped = (tmp_path / "said").read_text("utf-8")
        assert all(one in helped for one in known), part


def test_bad_words_are_one_line(tmp_path: Path) -> None:
    def said(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, str(BENCHMARKS / "on_a_gpu.py"), *arguments], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        return done.stderr.strip().splitlines()[-1]

    assert "the parts are calibrate, tests, truth" in said(str(tmp_path), "--only", "lies")
    assert "above 0" in said(str(tmp_path), "--minutes", "0")
    assert "holds nothing that was measured" in said(str(tmp_path), "--page")
    (tmp_path / "parts.json").write_text(json.dumps([1]))
    assert "was not written by this command" in said(str(tmp_path), "--page")
