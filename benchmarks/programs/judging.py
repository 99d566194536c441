"""Runs a program that was laid out, on a virtual GPU or on the host, and judges what became of it."""

from __future__ import annotations

import atexit
import io
import json
import multiprocessing.process
import os
import random
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

HERE = Path(__file__).resolve().parent
# How long a program that was ended may take for its report.
_REPORT_SECONDS = 60
# The lines that differ between any two runs: times, rates, and the device's own name and memory.
_OF_THE_MOMENT = re.compile(
    r"time|\btook\b|\bsec|seconds|\bms\b|\d[mu]s\b|/s\b|it/s|s/it|elapsed|cuda|device|memory|GPU|\bCPU\b|accelerator|MB|MiB|\bSPS\b|\dd:\d",
    re.I,
)
_CLOCK = re.compile(r"\b\d+:\d\d:\d\d(\.\d+)?s?\b")
_NUMBER = re.compile(r"[-+]?(\d[\d.,]*(e[-+]?\d+)?|\binf\b|\bnan\b) *", re.I)
# Folders that are others in each run.
_SCRATCH = re.compile(r"\S*/tmp\w{8}\b/?")
# Where an object lies, which is elsewhere in each run.
_ADDRESS = re.compile(r"\b0x[0-9a-f]+\b")
# What a run is called that calls itself by what is drawn for it (`uuid.uuid1().hex`).
_DRAWN_NAME = re.compile(r"(?<![0-9a-fA-F])[0-9a-f]{32}(?![0-9a-fA-F])")
# What PyTorch says of a tensor or a parameter that is on one.
_ON_A_DEVICE = re.compile(r",\s*device='cuda:\d+'| \(cuda:\d+\)(?=\])")
# A printed tensor, whose lines end where its numbers are long.
_TENSOR = re.compile(r"\btensor\([^()]*(?:\([^()]*\)[^()]*)*\)(  # virtual GPU: no values)?")
# What torchrun and its logs put before what a process says.
_RANK = re.compile(r"^\[(?:rank|default)\d+\]:\s?(?:\[rank\d+\]:\s?)?")
# NumPy fills numbers up with spaces, each array as its longest.
_BESIDE_NUMBERS = re.compile(r"\s*([\[\]#]|\s)\s*")


@dataclass(frozen=True)
class Run:
    """A program's run: its status, what it printed, and what it cost. status: None where the time was up."""

    status: int | None
    out: str
    err: str
    seconds: float
    host_bytes: int
    report: Mapping[str, Any]

    @property
    def peak(self) -> int | None:
        """The most that was allocated, over all devices."""
        reports = [self.report, *self.report.get("devices", ())]
        return max((one["peak"]["allocated"] for one in reports if one.get("peak")), default=None)

    @property
    def ran_compiled_code_eagerly(self) -> bool:
        """As with values=real, where compiled code takes more memory than it does compiled."""
        return any("from torch.compile ran eagerly" in note for note in self.report.get("notes", ()))

    @property
    def said(self) -> str:
        """What it printed; where its time was up, without the last line, which may be half of one."""
        return self.out if self.status is not None else self.out[: self.out.rfind("\n") + 1]

    @property
    def last_error(self) -> str:
        """The error's last line, without our own remarks."""
        # (torchrun begins the lines of its processes with their rank.)
        lines = [_RANK.sub("", line) for line in self.err.splitlines()]
        found = [
            line
            for line in lines
            if re.match(
                r"^[\w.]*(Error|Exception|Exit|Interrupt|StopIteration|CannotRun|Empty|Missing|Saved|Full|\.error)(: |$)",
                line,
            )
        ]
        return (found or [line for line in lines if line.strip()] or [""])[-1].strip()


def run(
    folder: Path, script: str, arguments: Sequence[str], *, device: str | None, packages: Sequence[str],
    limit: float, iterations: int | None, home: Path, fork: bool = False,
) -> Run:  # fmt: skip
    """device: None is the host. limit: seconds. iterations: after how many training ends, on a device.

    fork: this process has imported torch, and a copy of it runs the program: the seconds are without those of the import.
    """
    written = home / "report.json"
    if device is None:
        # (By its path: the program imports none of the modules beside it.)
        module, words = HERE / "host.py", [script, *arguments]
    else:
        module, words = "gpumem_magic.cli", ["run", "--device", device, "--json", str(written)]
        if iterations is not None:
            words += ["--max-iterations", str(iterations)]
        words += [script, "--", *arguments]
    environment = {
        "HOME": str(home),
        "MPLBACKEND": "Agg",
        "WANDB_MODE": "disabled",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join([*packages, os.environ.get("PYTHONPATH", "")]),
    }
    began = time.perf_counter()
    with open(home / "out", "w+b") as out, open(home / "err", "w+b") as err:
        if fork:
            pid = os.fork()
            if pid == 0:
                _become(module, words, folder, environment, packages, out.fileno(), err.fileno())
        else:
            pid = subprocess.Popen(
                [sys.executable, *(["-m", module] if isinstance(module, str) else [module]), *words],
                cwd=folder, env={**os.environ, **environment},
                stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
            ).pid  # fmt: skip
        status, used = _wait(pid, limit)
        seconds = time.perf_counter() - began
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    report = json.loads(written.read_text(encoding="utf-8")) if written.exists() else {}
    return Run(status, texts[0], texts[1], seconds, used, report)


def _become(
    module: str | Path,
    words: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    packages: Sequence[str],
    out: int,
    err: int,
) -> NoReturn:
    """What the copy does: it becomes ``python -m module words``, or ``python file words``, with the program's folder, streams
    and import path."""
    os.setsid()
    os.chdir(folder)
    multiprocessing.process.ORIGINAL_DIR = str(folder)
    os.environ.update(environment)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    own = [name for name, one in sys.modules.items() if str(getattr(one, "__file__", "")).startswith(str(HERE))]
    for name in own:
        if name != "__main__":
            del sys.modules[name]
    own_folders = (str(HERE), str(HERE.parent))
    sys.path[:] = ["", *packages, *(one for one in sys.path[1:] if one not in packages and one not in own_folders)]
    sys.argv = [str(module), *words]
    # PyTorch's own numbers begin alike in each process; so that those of Python and NumPy do, too.
    random.seed(0)
    np.random.seed(0)
    # The streams write through, as Python's do without a buffer.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(write_through=True)
    status = 0
    try:
        if isinstance(module, str):
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(module), run_name="__main__")
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    finally:
        atexit._run_exitfuncs()
        os._exit(status & 255)


def _wait(child: int, limit: float) -> tuple[int | None, int]:
    """The exit status (None where the time was up), and the most memory that it had.

    Waiting counts a quarter: where the computer is busy with other things, a program gets as far as on an idle one. Where its
    time is up it is told so, as ``timeout`` does it, and has a while for its report.
    """
    began = time.perf_counter()
    told: float | None = None
    while True:
        pid, code, usage = os.wait4(child, os.WNOHANG)
        now = time.perf_counter()
        if pid:
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # what it started and left behind
            return os.waitstatus_to_exitcode(code) if told is None else None, usage.ru_maxrss << 10
        if told is None:
            if now - began > limit and (_processor_seconds(child) > limit or now - began > 4 * limit):
                os.kill(child, signal.SIGTERM)
                told = now
        elif now - told > _REPORT_SECONDS:
            os.killpg(child, signal.SIGKILL)
            _, _, usage = os.wait4(child, 0)
            return None, usage.ru_maxrss << 10
        time.sleep(0.05)


def _processor_seconds(child: int) -> float:
    """What a process and those that it started have taken of the processor."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == child:  # its session
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def is_refusal(found: Run) -> bool:
    """Whether the virtual GPU said that it cannot do something, and what to do instead."""
    return re.search(r"a virtual GPU|the virtual GPU|values=real|gpumem_magic", found.last_error) is not None


def came_further(stopped: Run, failed: Run) -> bool:
    """Whether a run that was stopped had passed the statement at which another ended with an error."""
    return bool(stopped.report and failed.report) and len(_steps(stopped)) > len(_steps(failed))


def same_text(ours: str, theirs: str, *, whole: bool = False) -> bool | None:
    """Whether both print the same; None where neither prints anything that can be compared.

    whole: both came to their end. Else as far as the shorter goes.
    """
    a, b = _words(ours), _words(theirs)
    if whole:
        return a == b if a or b else None
    shorter = min(len(a), len(b))
    return None if shorter == 0 else a[:shorter] == b[:shorter]


def _words(text: str) -> list[str]:
    """What is compared with a run on the host: all but which device it was."""
    return "\n".join(_comparable(_ON_A_DEVICE.sub("", text))).split()


def way_taken(guessed: Run, real: Run) -> str:
    """Whether a program went with stand-ins the way that it goes with real values: "same", "said" by the report that it may not,
    or "silent"; "" where one has no report, or real values could not be computed.

    The same: as many iterations, lines that differ in numbers only (those are measured), and a peak that does not by a part in
    a hundred, but of compiled code. Where the time was up for one of them: as far as both went.
    """
    if not (real.report and guessed.report) or (real.status and is_refusal(real)):
        return ""
    lines = [
        [_BESIDE_NUMBERS.sub(r"\1", _NUMBER.sub("#", line)) for line in _comparable(_TENSOR.sub("tensor", one.said))]
        for one in (guessed, real)
    ]
    if guessed.status is None or real.status is None:
        went = min(map(len, lines))
        steps = [_steps(one) for one in (guessed, real)]
        common = [peak for peak in zip(*steps, strict=False) if peak[0][0] == peak[1][0]]
        same = lines[0][:went] == lines[1][:went] and len(common) == min(map(len, steps))
        peaks = [max((one[way][1] for one in common), default=0) for way in (0, 1)]
        if not any(peaks):
            return ""  # neither came to the device
    else:
        turns = [[row.get("iteration") for row in one.report["checkpoints"]][-1:] for one in (guessed, real)]
        peaks = [one.peak or 0 for one in (guessed, real)]
        same = lines[0] == lines[1] and turns[0] == turns[1]
    if same and (real.ran_compiled_code_eagerly or 100 * abs(peaks[0] - peaks[1]) <= peaks[1]):
        return "same"
    return "said" if "the virtual GPU does not know" in guessed.report.get("answer", "") else "silent"


def _steps(one: Run) -> list[tuple[tuple[int, int], int]]:
    """The statements up to the first iterations that are folded, without the one in which it was stopped: line, turn and peak."""
    found = []
    for row in one.report["checkpoints"]:
        if row["kind"] not in ("statement", "before"):
            break
        turn = row["iteration"]
        if len(turn) > 1:
            break
        found.append(((row["line"], turn[0] if turn else 0), row["peak_allocated"]))
    return found


def _comparable(text: str) -> list[str]:
    lines = [line for part in text.splitlines() for line in part.split("\r")]
    return [
        _DRAWN_NAME.sub("", _ADDRESS.sub("0x", _SCRATCH.sub("", _CLOCK.sub("", line)))).rstrip()
        for line in lines
        if line.strip() and not _OF_THE_MOMENT.search(line)
    ]
