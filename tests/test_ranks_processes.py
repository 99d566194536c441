"""Real processes as ranks: each writes its report however it ends, one report has all of them, and nothing stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import warm

from gpumem_magic import cli
from gpumem_magic.commands import launch
from gpumem_magic.files import rank_files
from gpumem_magic.files.rank_files import RankFile
from gpumem_magic.report.ranks import DONE, GONE, RUNNING

_warm = pytest.fixture(autouse=True)(warm.in_place_of_python)

if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)

PROGRAM = Path(__file__).with_name("rank_program.py")


def run(kind: str, target: Path, *arguments: str, count: int = 2) -> tuple[int, dict[str, Any]]:
    """The launcher's exit status, and what is told of the ranks."""
    options = ["--nproc", str(count), "--device", "A100-40GB", "--json", str(target)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPUMEM_TEST_MARK", str(target))
        # How long a rank that is ended may take for its report: ours, and PyTorch's launcher's.
        patch.setattr(launch, "_PATIENCE", 300.0)
        patch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "300")
        status = cli.main(["run", *options, str(PROGRAM), "--", kind, *arguments])
    return status, json.loads(target.read_text("utf-8"))["ranks"]


def left_behind(mark: Path) -> list[str]:
    """Processes that still run with this mark in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"GPUMEM_TEST_MARK={mark}".encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_text("utf-8", "replace"))
        except OSError:
            continue
    return found


def test_ranks_that_end_early_are_named_and_the_other_reports(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "report.json"
    status, ranks = run("one_fails_and_one_is_killed", target, count=3)
    assert status != 0
    rows = {row["rank"]: row for row in ranks["rows"]}
    assert [rows[1]["state"], rows[2]["state"]] == ["out_of_memory", "gone"]
    assert rows[0]["peak_allocated"] >= 4 << 20
    shown = capfd.readouterr().err.replace("\n  ", " ")
    for said in ("Rank 1 ran out of memory", "rank 2 ended without a word"):
        assert said in ranks["answer"]
        assert said in shown
    # Whichever is first: its barrier, or the launcher.
    assert "rank 0 then failed" in ranks["answer"] or "the launcher then ended rank 0" in ranks["answer"]
    assert left_behind(target) == []


def test_a_rank_that_hangs_in_a_collective_is_ended_and_says_where(tmp_path: Path) -> None:
    target, marks = tmp_path / "report.json", [tmp_path / "waits-0", tmp_path / "waits-1"]
    over = threading.Event()

    def interrupt_when_both_wait() -> None:
        while not over.wait(0.02):
            if all(mark.exists() for mark in marks):
                os.kill(os.getpid(), signal.SIGINT)
                return

    watching = threading.Thread(target=interrupt_when_both_wait)
    watching.start()
    try:
        status, ranks = run("one_hangs", target, str(tmp_path / "waits"))
    finally:
        over.set()
        watching.join()
    assert status == 130
    rows = {row["rank"]: row for row in ranks["rows"]}
    assert {row["state"] for row in rows.values()} == {"ended"}
    assert "barrier (rank_program.py" in rows[1]["where"], "what it waited in, and the line"
    assert rows[0]["where"].startswith("rank_program.py")
    assert [row["peak_allocated"] >= 4 << 20 for row in rows.values()] == [True, True]
    assert left_behind(target) == []


def test_the_time_limit_ends_also_who_does_not_listen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "_PATIENCE", 0.0)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE, start_new_session=True)
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        others: list[int] = []
        assert launch.wait([process], 0.0, lambda: others.append(1)) == launch.TIMED_OUT == 124
    assert process.returncode == -signal.SIGKILL
    assert others == [1]
    assert "time limit of 0 s is over" in capsys.readouterr().err


def test_a_rank_that_is_no_more_is_gone_and_one_that_runs_has_no_answer_yet(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    while rank_files.is_alive(ended.pid):
        time.sleep(0.01)
    host = os.uname().nodename
    rank_files.write(tmp_path, 0, RankFile(0, 3, RUNNING, host, os.getpid()))
    rank_files.write(tmp_path, 1, RankFile(1, 3, RUNNING, host, ended.pid))
    rank_files.write(tmp_path, 2, RankFile(2, 3, DONE, host, ended.pid, groups=(("dp", (0, 2)),)))
    ended.wait()
    found = rank_files.read(tmp_path)
    assert [one.known.state for one in found] == [RUNNING, GONE, DONE]
    assert found[2].groups == (("dp", (0, 2)),)


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"\xff", b'{"gpumem_rank": 1}', b'{"gpumem_rank": 1, "state": 5}', b'{"schema": 1}', b"[" * 9999],
)
def test_a_file_that_is_no_ranks_is_one_line(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank-0.json").write_bytes(content)
    assert cli.main(["ranks", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("gpumem: ")
    assert said.count("\n") == 1


def test_a_folder_of_snapshots_is_a_report_of_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import gpumem_magic
    from gpumem_magic.session import device

    for rank, size in enumerate((1 << 20, 3 << 20)):
        with gpumem_magic.measure("T4") as measured:
            kept = torch.empty(size, device="cuda")
        measured.report.save_snapshot(tmp_path / f"snapshot_rank{rank}.pickle")
        del kept
    device.off()
    page = tmp_path / "page.html"
    assert cli.main(["ranks", str(tmp_path), "--json", str(tmp_path / "all.json"), "--html", str(page)]) == 0
    ranks = json.loads((tmp_path / "all.json").read_text("utf-8"))["ranks"]
    assert [(row["rank"], row["peak_allocated"]) for row in ranks["rows"]] == [(1, 12 << 20), (0, 4 << 20)]
    assert "Rank 1 peaks highest, at 12.0 MiB" in capsys.readouterr().out
    assert "Rank 1 peaks highest" in page.read_text("utf-8")


def test_reports_that_workers_saved_are_a_report_of_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import gpumem_magic
    from gpumem_magic.session import device

    for rank in (0, 2):
        with gpumem_magic.measure("T4") as measured:
            kept = torch.ones((rank + 1) << 20, device="cuda")
        measured.report.save(tmp_path / f"rank-{rank}.json")
        del kept
    device.off()
    assert cli.main(["ranks", str(tmp_path), "--json", str(tmp_path / "all.json")]) == 0
    ranks = json.loads((tmp_path / "all.json").read_text("utf-8"))["ranks"]
    assert ranks["world"] == 3
    told = [(row["rank"], row["peak_allocated"]) for row in ranks["rows"] if row["peak_allocated"] is not None]
    assert told == [(2, 12 << 20), (0, 4 << 20)]
    assert "Rank 2" in capsys.readouterr().out


def test_the_last_rank_of_a_computer_shows_those_that_are_there(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\nkept = torch.ones(1 << 20, device='cuda')\n")
    command = [sys.executable, "-m", "gpumem_magic.cli", "run", "--device", "T4", str(script)]
    # Two launchers with two processes each; this is the second's.
    around = {**os.environ, "TMPDIR": str(tmp_path), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    first, second = (
        subprocess.run(command, env={**around, "RANK": rank}, capture_output=True, text=True, check=True, timeout=300)
        for rank in ("2", "3")
    )
    assert "ran on other computers" not in first.stderr
    answer = " ".join(second.stderr.split())
    assert "2 ranks peak at 4.0 MiB, within 0.5 %. Ranks 0-1 ran on other computers, which show theirs." in answer
    assert "not answered" not in answer


def test_a_rank_that_does_not_hear_ctrl_c_reports_beside_its_program(tmp_path: Path) -> None:
    """As under a launcher of the user's own, which sends the Ctrl-C on and then waits: the program is in a call of C's."""
    script, target = tmp_path / "train.py", tmp_path / "rank-0.json"
    script.write_text(
        "import ctypes, threading\n"
        "from gpumem_magic.session import rank_process\n"
        "rank_process.DEAF = 0.2\n"
        "import torch\n"
        "kept = torch.empty(1 << 20, device='cuda')\n"
        "library, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)\n"
        "library.pthread_mutex_lock(lock)\n"
        # (Once it is in that call: before, it hears.)
        "threading.Timer(2, print, ('waits',), {'flush': True}).start()\n"
        "library.pthread_mutex_lock(lock)\n"
    )
    around = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "GPUMEM_RANKS_FOLDER": str(tmp_path)}
    command = [sys.executable, "-m", "gpumem_magic.cli", "run", "--device", "T4", str(script)]
    with subprocess.Popen(command, env={**os.environ, **around}, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        over = time.monotonic() + 120
        while rank_files.read(tmp_path)[0].state == RUNNING and time.monotonic() < over:
            time.sleep(0.05)
        (found,) = rank_files.read(tmp_path)
        assert process.poll() is None, "its program is left alone"
        process.terminate()
    assert (found.state, found.where, target.exists()) == ("ended", "train.py:9", True)
    assert found.report is not None
    assert found.report.peak.allocated == 4 << 20
    assert process.returncode == 128 + signal.SIGTERM


def test_ctrl_c_ends_a_rank_and_is_no_failure_of_its_own(tmp_path: Path) -> None:
    import gpumem_magic
    from gpumem_magic.session import device
    from gpumem_magic.session.rank_process import RankProcess, place_of

    error: BaseException | None = None
    try:
        with gpumem_magic.measure("T4") as measured:
            raise KeyboardInterrupt
    except KeyboardInterrupt as caught:
        error = caught
    finally:
        device.off()
    rank = RankProcess(tmp_path, 0, 0, 2)
    rank.end(measured.report, where=place_of(error))
    (found,) = rank_files.read(tmp_path)
    assert found.state == "ended"
    assert found.where.startswith("test_ranks_processes.py:")


def test_where_a_program_failed_is_not_where_it_handles_other_errors() -> None:
    from gpumem_magic.session.rank_process import place_of

    program = compile("try:\n    int('one')\nexcept KeyError:\n    pass\n", "train.py", "exec")
    with pytest.raises(ValueError, match="one") as caught:
        exec(program, {"__name__": "__main__"})
    assert place_of(caught.value) == "train.py:2"


@pytest.mark.parametrize("ends_first", [False, True])
def test_a_rank_knows_whose_end_came_before_it_was_ended_or_failed(ends_first: bool, tmp_path: Path) -> None:
    """ends_first: its program had failed already when the signal came, which is then not what ended it."""
    import gpumem_magic
    from gpumem_magic.session import device
    from gpumem_magic.session.rank_process import RankProcess

    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    host = os.uname().nodename
    rank_files.write(tmp_path, 1, RankFile(1, 4, RUNNING, host, gone.pid))
    rank_files.write(tmp_path, 2, RankFile(2, 4, "failed", host, gone.pid))
    rank_files.write(tmp_path, 3, RankFile(3, 4, DONE, host, gone.pid))
    rank = RankProcess(tmp_path, 0, 0, 4)
    rank.begin(lambda: None)
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    try:
        with gpumem_magic.measure("T4") as measured:
            if ends_first:
                rank.leaves()
                os.kill(os.getpid(), signal.SIGTERM)
                raise RuntimeError("Connection closed by peer")
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
    except (SystemExit, RuntimeError):
        pass
    finally:
        device.off()
        rank.leaves()
        rank.end(measured.report)
    found = rank_files.read(tmp_path)[0]
    # Others that failed did so for themselves, as far as this one knows.
    assert (found.state, found.after) == (("failed", (1,)) if ends_first else ("ended", (1, 2)))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("how", ["--ranks", "--nproc"])
def test_a_command_that_a_scheduler_ends_leaves_no_rank_behind(how: str, tmp_path: Path) -> None:
    script, target = tmp_path / "train.py", tmp_path / "report.json"
    script.write_text(
        "import pathlib, time, torch\n"
        "kept = torch.empty(1 << 20, device='cuda')\n"
        f"pathlib.Path({str(tmp_path / 'waits')!r}).touch(); time.sleep(600)\n"
    )
    command = [sys.executable, "-m", "gpumem_magic.cli", "run", how, "2", "--device", "T4", "--json", str(target)]
    around = {**os.environ, "GPUMEM_TEST_MARK": str(target)}
    with subprocess.Popen([*command, str(script)], env=around, stderr=subprocess.DEVNULL) as process:
        while not (tmp_path / "waits").exists() and process.poll() is None:
            time.sleep(0.02)
        process.terminate()
    assert process.returncode == 130
    assert left_behind(target) == []
    ended = [row for row in json.loads(target.read_text("utf-8"))["ranks"]["rows"] if row["state"] == "ended"]
    assert ended[0]["where"] == "train.py:3"
