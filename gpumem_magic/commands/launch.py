"""Starting the ranks of a script: real processes with PyTorch's own launcher, or ranks that each run alone."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from gpumem_magic.commands.common import INTERRUPTED
from gpumem_magic.commands.ending import ending_as_after_ctrl_c
from gpumem_magic.commands.shown_ranks import show
from gpumem_magic.commands.written import targets
from gpumem_magic.files import rank_files
from gpumem_magic.own_folders import own_folder
from gpumem_magic.report.ranks import RUNNING
from gpumem_magic.session.device import for_ranks
from gpumem_magic.session.rank_process import FOLDER, RankProcess

# How long processes have to end after they were told to, in seconds: a rank makes its report meanwhile.
_PATIENCE = 30.0
TIMED_OUT = 124


def device_of_a_rank(name: str | None, rank: RankProcess | None) -> str | None:
    """As many virtual devices as the computer has ranks, where one is named."""
    if rank is None:
        return name
    return for_ranks(name, int(os.environ.get("LOCAL_WORLD_SIZE", rank.file.world)))


def arguments_of(options: argparse.Namespace, device: str | None) -> list[str]:
    """The command of one rank: this one, without what is about several."""
    words = [sys.executable, "-m", "gpumem_magic.cli", "run"]
    words += ["-m"] * options.is_module
    words += [] if device is None else ["--device", device]
    words += [] if options.max_iterations is None else ["--max-iterations", str(options.max_iterations)]
    words += ["--until-repeat"] * options.until_repeat
    for one in options.stand_in:
        words += ["--stand-in", one]
    return [*words, options.script, "--", *options.arguments]


def folder_of_ranks() -> AbstractContextManager[Path]:
    """A folder of this command's own, which goes with it."""
    return own_folder("gpumem-ranks-")


def run_processes(options: argparse.Namespace) -> int:
    """`torchrun --standalone` with this command in each process. The exit status is its own; 124 where time ran out."""
    count: int = options.nproc
    written_to = targets(options)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(count),
        "--no-python",
    ]
    with folder_of_ranks() as folder, ending_as_after_ctrl_c():
        process = subprocess.Popen(
            [*command, *arguments_of(options, for_ranks(options.device, count))],
            env={**os.environ, FOLDER: str(folder)},
            start_new_session=True,
        )
        status = wait([process], options.time_limit, lambda: _kill_ranks(folder))
        _kill_ranks(folder)
        if any(folder.glob("rank-*.json")):
            show(folder, written_to)
        else:
            print("gpumem: no rank began to run", file=sys.stderr)
    return status


def wait(processes: Sequence[subprocess.Popen[bytes]], limit: float | None, at_last: Callable[[], None]) -> int:
    """Until all have ended, or are ended. Their first status that is not 0; 124 where the limit, in seconds, was over, 130 after
    Ctrl-C or SIGTERM."""
    over = None if limit is None else time.monotonic() + limit
    status = 0
    try:
        for process in processes:
            process.wait(None if over is None else max(0.0, over - time.monotonic()))
    except subprocess.TimeoutExpired:
        print(f"gpumem: the time limit of {limit:g} s is over: the ranks are ended", file=sys.stderr)
        status = TIMED_OUT
    except KeyboardInterrupt:
        status = INTERRUPTED
    if status:
        end(processes, at_last)
    return status or next((abs(one.returncode) for one in processes if one.returncode), 0)


def end(processes: Sequence[subprocess.Popen[bytes]], at_last: Callable[[], None] = lambda: None) -> None:
    """Each that still runs is told to end, and killed after a while with all that it started. at_last: what else to kill then."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    last = time.monotonic() + _PATIENCE
    with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
        for process in processes:
            process.wait(max(0.0, last - time.monotonic()))
    at_last()
    for process in processes:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.wait()


def _kill_ranks(folder: Path) -> None:
    """No rank stays behind: those that still run are known by their files."""
    with suppress(OSError, ValueError):
        for one in rank_files.read(folder):
            if one.state == RUNNING and rank_files.is_alive(one.process):
                with suppress(OSError):
                    os.kill(one.process, signal.SIGKILL)
