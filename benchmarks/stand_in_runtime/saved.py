"""What a GPU was asked for, kept in a file: a line about the GPU and what was run, then a line for each case (see running.py).

A file whose name ends in .xz is packed when all is done.
"""

from __future__ import annotations

import base64
import json
import lzma
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from building import HERE, Unfit


def save(file: str, request: dict[str, Any], processes: int, minutes: float) -> None:
    """Runs a request on this computer's GPU, split over processes, and keeps what is done in time."""
    until = time.monotonic() + 60 * minutes
    header: dict[str, Any] = {"about": about(), "asked": dict(request)}
    if "samples" in request:
        packed = lzma.compress(Path(request["samples"]).read_bytes())
        header["asked"]["samples"] = base64.b64encode(packed).decode()
    plain = Path(file.removesuffix(".xz"))
    plain.write_text(f"{json.dumps(header)}\n", encoding="utf-8")
    command = [sys.executable, str(HERE / "running.py"), str(plain)]
    started = []
    for part in range(processes):
        with tempfile.TemporaryFile("w+") as asked:
            json.dump({**request, "virtual": None, "part": [part, processes]}, asked)
            asked.seek(0)
            started.append(subprocess.Popen(command, stdin=asked, stderr=subprocess.PIPE, start_new_session=True))
    complaints = []
    for process in started:
        try:
            said = process.communicate(timeout=max(0, until - time.monotonic()))[1]
        except subprocess.TimeoutExpired:
            # (With the child that runs a case.)
            os.killpg(process.pid, signal.SIGKILL)
            said = process.communicate()[1]
        if process.returncode > 0:
            complaints += said.decode(errors="replace").strip().splitlines()[-1:] or ["it ended without a word"]
    if file.endswith(".xz"):
        Path(file).write_bytes(lzma.compress(plain.read_bytes()))
        plain.unlink()
    if complaints:
        raise Unfit(f"on this computer's GPU something did not run: {complaints[0]}")


def read(file: str, drawn: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """About the GPU, what was run, and the answers. Samples that were run are laid into `drawn`."""
    content = Path(file).read_bytes()
    first, _, rest = (lzma.decompress(content) if file.endswith(".xz") else content).decode().partition("\n")
    header = json.loads(first)
    if "samples" in header["asked"]:
        Path(drawn).write_bytes(lzma.decompress(base64.b64decode(header["asked"]["samples"])))
        header["asked"]["samples"] = drawn
    return header["about"], header["asked"], answers(rest)


def answers(lines: str) -> dict[str, Any]:
    """By name. (The last line of a run that was ended may be half a line.)"""
    return dict(json.loads(line) for line in lines.splitlines() if line.endswith("]"))


def about() -> dict[str, Any]:
    """What this computer's GPU and PyTorch are."""
    import torch

    if not torch.cuda.is_available():
        raise Unfit("PyTorch finds no GPU on this computer")
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "capability": [properties.major, properties.minor],
        "multiprocessors": properties.multi_processor_count,
        "total_bytes": properties.total_memory,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "driver": driver(),
    }


def driver() -> str | None:
    """The driver's version, as nvidia-smi has it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return next(iter(done.stdout.split()), None)
