"""The table of public programs (`benchmarks/programs`), how they are laid out, and how they are judged. None is run here."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parents[1] / "benchmarks" / "programs"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    pytest.importorskip("PIL")
    monkeypatch.syspath_prepend(str(HERE))
    names = ("data", "layout", "judging")
    found = {name: importlib.import_module(name) for name in names}
    spec = importlib.util.spec_from_file_location("programs_main", HERE / "__main__.py")
    assert spec is not None
    assert spec.loader is not None
    found["main"] = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "programs_main", found["main"])
    spec.loader.exec_module(found["main"])
    yield found
    for name in names:
        del sys.modules[name]


def test_the_table(modules: dict[str, Any]) -> None:
    programs = list(modules["main"].table())
    keys = [(one["repository"], one["name"]) for one in programs]
    assert len(keys) == len(set(keys)) >= 120
    for one in programs:
        assert one.get("installed") or re.fullmatch("[0-9a-f]{10,40}", one["commit"]), one["name"]
        assert ("entry" in one) != ("script" in one)
        compile(one.get("entry", ""), one["name"], "exec")
        compile(one.get("prepare", ""), one["name"], "exec")
        assert all(recipe in modules["data"].RECIPES for recipe, *_ in one.get("data", ()))
        assert all(re.fullmatch(r"[\w-]+==[\w.]+", version) for version in one.get("versions", ()))
        assert one["domain"]


def test_a_program_that_wants_another_version_is_left_out(modules: dict[str, Any]) -> None:
    one = {"repository": "a/b", "name": "c", "versions": ["pillow==0.1"]}
    with pytest.raises(modules["layout"].Missing, match=r"it needs pillow 0\.1, and \d+\."):
        modules["main"].judged(one, None)
    with pytest.raises(modules["layout"].Missing, match=r"it needs no-such-package 1, and none is here"):
        modules["main"].judged({**one, "versions": ["no-such-package==1"]}, None)


def test_a_repository_is_laid_out_without_what_a_copy_lacks(modules: dict[str, Any], tmp_path: Path) -> None:
    source = tmp_path / "mirror" / "somebody+project" / "repo"
    source.mkdir(parents=True)

    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *who, *words], cwd=source, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    (source / "a folder").mkdir()
    (source / "a folder" / "main.py").write_text("print(1)\n")
    (source / "lost.bin").write_text("lost")
    git("add", "-A")
    git("commit", "-q", "-m", "all")
    commit = git("rev-parse", "HEAD").strip()
    lost = git("rev-parse", "HEAD:lost.bin").strip()
    (source / ".git" / "objects" / lost[:2] / lost[2:]).unlink()
    layout = modules["layout"]
    layout.lay_out(layout.repository(tmp_path / "mirror", "somebody/project"), commit, tmp_path / "out")
    assert (tmp_path / "out" / "a folder" / "main.py").read_text() == "print(1)\n"
    assert not (tmp_path / "out" / "lost.bin").exists()
    with pytest.raises(layout.Missing, match="nobody/project is not in"):
        layout.repository(tmp_path / "mirror", "nobody/project")


def test_outputs_are_compared_as_far_as_both_go(modules: dict[str, Any]) -> None:
    same = modules["judging"].same_text
    assert same("[Batch 0/3] [loss: 2.35] ETA: 0:00:01.175411", "[Batch 0/3] [loss: 2.35] ETA: 0:00:02.5") is True
    assert same("loss 1.0\nloss 0.5\n", "loss 1.0\nloss 0.5\nloss 0.25\n")
    assert not same("loss 1.0\n", "loss 1.1\n")
    assert same("loss 1.0\ntook 3 seconds\n", "loss 1.0\ntook 9 seconds\n")
    assert same("loss 1.0\naten::mul 5.2us\n", "loss 1.0\naten::add 7.1us\n")
    assert same(f"run {'0a' * 16}:\nloss 1.0\n", f"run {'1b' * 16}:\nloss 1.0\n")
    assert same("", "loss 1.0\n") is None
    listed = "(0): Parameter containing: [torch.float32 of size 5x64{}]\n"
    assert same(listed.format(" (cuda:0)"), listed.format(""))
    # Where both came to their end, one that did less of its work does not print the same.
    assert not same("loss 1.0\n", "loss 1.0\nloss 0.5\n", whole=True)
    assert not same("", "loss 1.0\n", whole=True)
    assert same("loss 1.0\n", "loss 1.0\ntook 9 seconds\n", whole=True)
    assert same("", "", whole=True) is None


def test_another_way_is_silent_unless_the_report_says_so(modules: dict[str, Any]) -> None:
    judging = modules["judging"]

    def went(out: str, peak: int, answer: str = "", turns: int = 2, status: int | None = 0) -> Any:
        rows = [
            {"kind": "statement", "line": 3, "iteration": [number], "peak_allocated": peak * (number + 1) // turns}
            for number in range(turns)
        ]
        return judging.Run(
            status, out, "", 1.0, 0, {"peak": {"allocated": peak}, "checkpoints": rows, "answer": answer}
        )

    real = went("epoch 1: loss 0.25, 12/64 right\n", 1000)
    assert judging.way_taken(went("epoch 1: loss 0, 64/64 right\n", 1009), real) == "same"
    assert judging.way_taken(went("epoch 1: loss 0, 64/64 right\nearly\n", 1000), real) == "silent"
    arrays = [went(text, 1000) for text in ("[[0. 0.]\n [0. 0.]]\n", "[[ 0.5  -1.25]\n [-3.    4.  ]]\n")]
    assert judging.way_taken(*arrays) == "same"
    assert judging.way_taken(went(real.out, 1020), real) == "silent"
    assert judging.way_taken(went(real.out, 1000, turns=1), real) == "silent"
    assert judging.way_taken(went("", 1, "It goes by a value that the virtual GPU does not know."), real) == "said"
    # The time was up: as far as both went, half a line left out.
    assert judging.way_taken(went("epoch 1: lo", 500, turns=1, status=None), real) == "same"
    assert judging.way_taken(went("", 800, turns=1, status=None), real) == "silent"
    assert judging.way_taken(went("another way\n", 500, turns=1, status=None), real) == "silent"
    # Compiled code has another peak than what runs eagerly in its stead.
    eager = went(real.out, 1300)
    eager.report["notes"] = ["Code from torch.compile ran eagerly (4 calls)."]
    assert judging.way_taken(went(real.out, 1000), eager) == "same"
    assert judging.way_taken(went("another way\n", 1000), eager) == "silent"
    # It did not come to the device, left no report, or could not be computed.
    refused = went("", 100, turns=1, status=1)
    for error, way in (("CannotRun: values=real cannot compute this.", ""), ("ValueError: no number", "silent")):
        assert judging.way_taken(real, dataclasses.replace(refused, err=f"{error}\n")) == way
    assert judging.way_taken(went("", 0, turns=0, status=None), real) == ""
    assert judging.way_taken(judging.Run(None, "", "", 1.0, 0, {}), real) == ""


@pytest.mark.parametrize(
    ("runs", "verdict"),
    [
        ({"stand-ins": (0, 2, 5)}, "works"),
        ({"stand-ins": (None, 2, 5)}, "works"),
        # Its time was up while it prepared.
        ({"stand-ins": (None, 0, 0)}, "not judged"),
        ({"stand-ins": (None, 0, None)}, "not judged"),
        # It ends with an error, and was stopped before it could there.
        ({"stand-ins": (1, 4, 5), "host": (None, 0, None), "auto": (1, 4, 5), "real": (None, 3, 5)}, "not judged"),
        ({"stand-ins": (1, 4, 5), "host": (0, 0, None), "auto": (None, 4, 5), "real": (1, 4, 5)}, "not judged"),
        ({"stand-ins": (1, 4, 5), "host": (None, 0, None), "auto": (None, 5, 5)}, "works"),
        ({"stand-ins": (1, 4, 5), "host": (0, 0, None), "auto": (0, 4, 5)}, "works"),
        ({"stand-ins": (1, 4, 5), "host": (0, 0, None), "auto": (1, 4, 5), "real": (1, 4, 5)}, "wrong"),
        ({"stand-ins": (1, 4, 5), "host": (1, 0, None)}, "its own fault"),
    ],
)
def test_what_was_stopped_before_it_did_its_work_is_not_said_to_work(
    modules: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    runs: dict[str, tuple[int | None, int, int | None]],
    verdict: str,
) -> None:
    """runs: by the way of running it the status, how many statements its report has, and its peak."""
    asked: list[str] = []

    def once(one: object, source: object, device: object, options: object, way: str) -> Any:
        asked.append(way)
        status, statements, peak = runs[way]
        rows = [{"kind": "statement", "line": line, "iteration": [], "peak_allocated": 1} for line in range(statements)]
        report = {"peak": {"allocated": peak}, "checkpoints": rows, "answer": "It goes by a value; values=real has it."}
        return modules["judging"].Run(status, "", "ValueError: no\n", 1.0, 0, {} if peak is None else report)

    monkeypatch.setattr(modules["main"], "_once", once)
    one = {"repository": "a/b", "name": "c", "domain": "basics", "installed": True}
    outcome = modules["main"].judged(one, argparse.Namespace(values=False))
    assert outcome.verdict == verdict
    assert asked == list(runs)
    assert f"1 {verdict}" in modules["main"].counts([outcome])


def test_errors_are_told_from_refusals(modules: dict[str, Any]) -> None:
    judging = modules["judging"]

    def ended(error: str) -> Any:
        said = f"Traceback (most recent call last):\n  a line\n{error}\nRuntimeError at line 3; until then 5 MiB\nMiB\n"
        return judging.Run(1, "", said, 1.0, 0, {})

    own = ended("torch.AcceleratorError: CUDA error: invalid device ordinal")
    assert own.last_error == "torch.AcceleratorError: CUDA error: invalid device ordinal"
    assert not judging.is_refusal(own)
    assert judging.is_refusal(ended("NotImplementedError: the virtual GPU cannot hold a nested tensor."))


def test_a_notebook_is_run_cell_by_cell_without_what_is_ipythons(modules: dict[str, Any]) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# Words"]},
        {"cell_type": "code", "source": ["%matplotlib inline\n", "x = 1\n", "if x:\n", "    !ls\n"]},
        {"cell_type": "code", "source": ["%%bash\n", "exit 1"]},
        {"cell_type": "code", "source": ["y = x % 2\n", "said = '''\n", "100 %\n", "'''"]},
    ]
    found: dict[str, object] = {}
    exec(modules["layout"].script_of(json.dumps({"cells": cells})), found)
    assert (found["x"], found["y"], found["said"]) == (1, 1, "\n100 %\n")


def test_an_outcome_is_a_row_of_the_kept_results(modules: dict[str, Any]) -> None:
    main = modules["main"]
    made = main.Outcome("someone/nets", "train.py", "vision", "works", seconds=3.4, host_bytes=300 << 20, peak=16 << 20)
    compared = {"real_peak": 16 << 20, "real": "works", "same_output": True, "way": "same", "day": "2026-11-30"}
    row = main.row_of(dataclasses.replace(made, **compared))
    with main.RESULTS.open(encoding="utf-8", newline="") as lines:
        assert list(row) == next(csv.reader(lines))
    told = ["works", "stand-in", "3", "300", "16.0", "same", "yes", "same", "2026-11-30"]
    assert list(row.values()) == ["someone/nets", "train.py", "vision", *told]
    # Nothing at all, in both ways, is the same; one that was stopped worked until then; what failed has no values.
    nothing = dataclasses.replace(made, peak=0, real_peak=0, ended=False)
    assert [main.row_of(nothing)[key] for key in ("result", "beside real", "prints")] == ["time was up", "same", ""]
    other = dataclasses.replace(made, verdict="wrong", real_peak=8 << 20, same_output=False)
    assert [main.row_of(other)[key] for key in ("result", "values", "beside real", "prints")] == [
        "wrong",
        "",
        "+100.00%",
        "no",
    ]


def test_the_pages_say_what_the_table_beside_an_h100_has() -> None:
    with (HERE / "beside_an_h100.csv").open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) == len({(one["repository"], one["program"]) for one in rows})
    went = ("ended", "stopped")
    ran = [one for one in rows if one["ended_there"] in went and one["ended_here"] in went]
    there, here, matched = (
        sum(int(one[key]) for one in ran) for key in ("allocations_there", "allocations_here", "matched")
    )
    assert matched <= min(there, here)
    off = [abs(int(one["growth_at_peak_here"]) / int(one["growth_at_peak_there"]) - 1) for one in ran]
    whole = sum(one["allocations_there"] == one["allocations_here"] == one["matched"] for one in ran)
    exact, near, about = (sum(each <= most for each in off) for most in (0, 0.001, 0.02))
    share, docs = f"{matched / there:.1%}".replace("%", " %"), HERE.parents[1] / "docs"
    assert (
        f"{len(ran)} programs asked the card for {there:,} allocations: {share} matched, in {whole} of the programs all, "
        f"and the growth at the peak was the same to the byte in {exact}, within 0.1 % in {near}, within 2 % in {about}."
    ) in (docs / "programs.md").read_text(encoding="utf-8")
    assert (
        f"every allocation of {len(ran)} public programs | [a real H100](programs.md), with PyTorch 2.11 | {share} of {there:,}; "
        f"the highest memory the same in {exact}, within 2 % in {about} |"
    ) in (docs / "how_true.md").read_text(encoding="utf-8")


def test_an_error_of_a_process_of_torchrun_is_known(modules: dict[str, Any]) -> None:
    said = """\
W1128 06:10:00.000000 81 torch/distributed/run.py:851]
[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 3, in <module>
[rank1]: ValueError: no such option
[default0]:[rank0]: KeyError: 'lr'
E1128 06:10:01.000000 81 torch/distributed/elastic/multiprocessing/api.py:988] failed (exitcode: 1)
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
"""
    run = modules["judging"].Run(1, "", said, 1, 0, {})
    assert run.last_error == "KeyError: 'lr'"
