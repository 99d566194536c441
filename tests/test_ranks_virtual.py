"""Ranks that each run alone, against real processes of the same program; which of them run, and what is said of them."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from torch import nn

from gpumem_magic import cli
from gpumem_magic.trials.roles import Roles
from gpumem_magic.virtual.torch_face.letters import Letters

if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)

import torch.distributed.checkpoint

PROGRAM = Path(__file__).with_name("rank_program.py")

_warm = pytest.fixture(autouse=True)(warm.in_place_of_python)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def run_alone(kind: str, *options: str, arguments: tuple[str, ...] = ()) -> int:
    """The command in this process; each rank is one of its own. The exit status."""
    return cli.main(["run", "--device", "A100-40GB", *options, str(PROGRAM), "--", kind, *arguments])


def run_processes(kind: str, *arguments: str) -> list[str]:
    """The same program as two processes that a launcher started, which talk to each other. Their errors' text."""
    port = str(free_port())
    started = []
    for rank in ("0", "1"):
        around = {**os.environ, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        around |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, "-m", "gpumem_magic.cli", "run", "--device", "A100-40GB", str(PROGRAM), "--", kind]
        started.append(
            subprocess.Popen(
                [*command, *arguments], env=around, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
        )
    said = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    return said


def test_a_rank_alone_allocates_what_it_does_among_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    kinds = [
        "ddp",
        "zero",
        "fsdp1",
        "hybrid",
        "fully_shard",
        "context_parallel",
        "expert_parallel",
        "load_checkpoint",
        "save_checkpoint",
        "batch_norm",
        "zero_gathered",
        "tensor_parallel",
        "pipeline",
    ]
    saved = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(128, 128), nn.ReLU())]).state_dict()
    torch.distributed.checkpoint.save(saved, checkpoint_id=tmp_path / "saved", no_dist=True)
    run_processes(",".join(kinds), str(tmp_path / "real"), str(tmp_path / "saved"))
    target = tmp_path / "report.json"
    options = ("--ranks", "2", "--json", str(target))
    assert run_alone(",".join(kinds), *options, arguments=(str(tmp_path / "alone"), str(tmp_path / "saved"))) == 0
    for rank in (0, 1):
        real, alone = (pickle.loads((tmp_path / f"{name}-{rank}").read_bytes()) for name in ("real", "alone"))
        lengths = [len(real[kind][rank]) for kind in kinds]
        assert lengths == sorted(set(lengths)), "each rank has a device of its own, on which each kind does something"
        for kind in kinds:
            assert alone[kind] == real[kind], kind
    # The pipeline's last stage has more, and the sentence names the layer for the logits.
    found: dict[str, Any] = json.loads(target.read_text("utf-8"))["ranks"]
    assert (found["world"], found["virtual"]) == (2, True)
    assert [row["rank"] for row in found["rows"]] == [1, 0]
    assert found["highest"] > found["lowest"]
    assert any("(5000, 128)" in row["differs"] for row in found["rows"])
    assert "Rank 1 peaks highest" in capfd.readouterr().err.replace("\n  ", " ")


def test_ranks_that_are_alike_run_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "report.json"
    assert run_alone("ddp", "--ranks", "8", "--json", str(target)) == 0
    rows = json.loads(target.read_text("utf-8"))["ranks"]["rows"]
    assert [row["rank"] for row in rows if row["measured"]] == [0, 7]
    assert [(row["rank"], row["like"]) for row in rows if not row["measured"]] == [(rank, 0) for rank in range(1, 7)]
    said = capfd.readouterr().err
    assert "Ranks 0, 7 of 8 ran, each alone; ranks 1-6 taken to be like them." in said
    assert "All 8 ranks peak at" in said


def test_objects_of_another_rank_are_that_ranks_and_one_without_memory_is_named(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run_alone("objects,stores,one_fails", "--ranks", "4", "--as", "1") == 1
    shown = capfd.readouterr()
    assert "Ranks 0-1 of 4 ran" in shown.err, "rank 1 waits for an object of rank 0, which runs too"
    objects, stored, refused = shown.out.splitlines()
    assert objects == "['from rank 0'] [{'rank': 1}, {'rank': 1}, {'rank': 1}, {'rank': 1}]"
    assert stored == "3,4 4", "what rank 0 set, and what all four added"
    assert refused.startswith('rank 1 runs alone, and waits for "nobody\'s", which rank 0 was to set')
    assert "Rank 1 ran out of memory." in shown.err
    assert "not answered" not in shown.err, "nobody asked the others"


def test_a_rank_waits_for_one_that_works_and_not_for_one_that_waits_for_it(tmp_path: Path) -> None:
    def answer() -> None:
        time.sleep(0.5)
        Letters(1, tmp_path).send(1, "0", "late")

    mine = Letters(0, tmp_path, patience=0.1)
    # Rank 1 waits for rank 2, which works for longer than anybody's patience.
    (tmp_path / "waits-1").write_text("2")
    thread = threading.Thread(target=answer)
    thread.start()
    assert mine.receive(1, "0") == "late"
    thread.join()
    (tmp_path / "waits-1").write_text("0")
    with pytest.raises(LookupError):
        mine.receive(1, "0")
    assert not (tmp_path / "waits-0").exists()


def test_a_rank_that_leaves_with_a_status_has_failed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "report.json"
    assert run_alone("leaves", "--ranks", "2", "--as", "1", "--json", str(target)) == 3
    (row,) = json.loads(target.read_text("utf-8"))["ranks"]["rows"]
    assert (row["rank"], row["state"], row["peak_allocated"]) == (1, "failed", 4 << 20)
    said = capfd.readouterr().err
    assert "Rank 1 failed." in said
    assert "SystemExit at line " in said


@pytest.mark.parametrize(
    "options",
    [("--ranks", "2", "--as", "2"), ("--as", "0"), ("--ranks", "2", "--nproc", "2"), ("--ranks", "2", "--as", "x")],
)
def test_wrong_flags_are_one_line(options: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_alone("ddp", *options)
    assert capsys.readouterr().err.splitlines()[-1].startswith("gpumem run: error: --")


def ran(roles: Roles, kind_of: Callable[[int], int], most: int = 16) -> list[int]:
    """Which ranks run, where `kind_of` says what each would turn out to be."""
    alike: dict[int, int] = {}
    while True:
        rank = roles.next(alike, most) if alike else 0
        if rank is None:
            return sorted(alike)
        alike[rank] = min([rank, *(other for other in alike if kind_of(other) == kind_of(rank))])


def test_ranks_along_a_dimension_that_does_not_matter_run_once() -> None:
    # A mesh of 4 stages x 8 data-parallel ranks: the stages differ.
    groups = [("pp", tuple(range(start, 32, 8))) for start in range(8)]
    groups += [("dp", tuple(range(start, start + 8))) for start in range(0, 32, 8)]
    roles = Roles(32, groups)
    assert ran(roles, lambda rank: rank // 8) == [0, 7, 8, 16, 24, 31]
    taken = roles.taken({0: 0, 7: 0, 8: 8, 16: 16, 24: 24, 31: 24})
    assert {rank: taken[rank] for rank in (1, 9, 30)} == {1: 0, 9: 8, 30: 24}
    # First and last stage differ from those between, which are alike.
    assert ran(roles, lambda rank: {0: 0, 3: 2}.get(rank // 8, 1)) == [0, 7, 8, 16, 24, 31]


def test_without_groups_the_ranks_between_two_that_differ_run() -> None:
    roles = Roles(16, [("", tuple(range(16)))])
    assert ran(roles, lambda rank: 0) == [0, 15]
    assert ran(roles, lambda rank: int(rank == 15)) == [0, 7, 11, 13, 14, 15]
    assert len(ran(roles, lambda rank: rank, most=6)) == 6
